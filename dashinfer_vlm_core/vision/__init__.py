"""Patches -> visual tokens, and the uuids of media sent before."""

from .service import VisionAdapter, VisionService, VisionStats

__all__ = [
    "VisionAdapter",
    "VisionService",
    "VisionStats",
]
