"""The version of this package, which hatchling reads."""

__version__ = "0.1.0.dev0"
