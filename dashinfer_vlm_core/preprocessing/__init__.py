"""Messages and grids -> prompt; previews of the model's input."""
