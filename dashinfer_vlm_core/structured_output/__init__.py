"""A format or tools -> grammar -> token masks; text of the answer -> content and calls."""
