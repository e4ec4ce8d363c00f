"""Messages and grids -> prompt; what the model would see of a request."""
