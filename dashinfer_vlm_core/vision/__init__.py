"""Patches -> visual tokens, and names for what was sent before."""

from .service import Item, Recalled, VisionService, VisionStats

__all__ = [
    "Item",
    "Recalled",
    "VisionService",
    "VisionStats",
]
