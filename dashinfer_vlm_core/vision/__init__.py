"""Patches -> visual tokens, and names for what was sent before."""

from .service import Item, Processed, CachedMedia, VisionService, VisionStats

__all__ = [
    "Item",
    "Processed",
    "CachedMedia",
    "VisionService",
    "VisionStats",
]
