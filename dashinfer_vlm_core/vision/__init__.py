"""Patches -> visual tokens, and the uuids of media sent before."""

from .service import CachedMedia, Item, Processed, VisionAdapter, VisionService, VisionStats

__all__ = [
    "CachedMedia",
    "Item",
    "Processed",
    "VisionAdapter",
    "VisionService",
    "VisionStats",
]
