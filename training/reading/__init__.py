"""Training of a model that reads printed lines, on pages of random text: `python -m training.reading.train`."""
