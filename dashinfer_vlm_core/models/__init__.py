"""Models: families, what a checkpoint says, where it lies, patches and weights."""
