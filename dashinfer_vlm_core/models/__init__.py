"""Models: families, checkpoint specs, checkpoint files, image processing and weights."""
