"""Patches -> visual tokens, and names for what was sent before."""

from .service import CachedMedia, Item, Processed, VisionService, VisionStats

__all__ = [
    "CachedMedia",
    "Item",
    "Processed",
    "VisionService",
    "VisionStats",
]
