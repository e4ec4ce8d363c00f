"""Patches -> visual tokens, and names for what was sent before."""

from .service import Item, Processed, Recalled, VisionService, VisionStats

__all__ = [
    "Item",
    "Processed",
    "Recalled",
    "VisionService",
    "VisionStats",
]
