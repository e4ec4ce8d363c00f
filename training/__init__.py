"""Training of the bundled model: scenes, questions, training, evaluation, export. Run from a checkout."""
