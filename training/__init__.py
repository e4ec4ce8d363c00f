"""How the bundled model was made: scenes, questions, training, evaluation, export. Run from a checkout."""
