"""Patches -> visual tokens, and the uuids of media sent before."""

from .service import VisionLora, VisionService, VisionStats

__all__ = [
    "VisionLora",
    "VisionService",
    "VisionStats",
]
