"""Content part -> decoded media: the only room that opens a socket or a file for a user."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .url_policy import Resolver
    from .fetch import FetchStats
    from .loader import MediaLoader
    from .readers import READERS, PyAVReader
    from .types import Video, Embeddings, Kind, Media, OpenVideo, Image, Pixels, StopCheck, VideoInfo, VideoReader

__all__ = [
    "READERS",
    "Video",
    "Embeddings",
    "FetchStats",
    "Kind",
    "Media",
    "MediaLoader",
    "OpenVideo",
    "Image",
    "Pixels",
    "PyAVReader",
    "Resolver",
    "StopCheck",
    "VideoInfo",
    "VideoReader",
]

# Names are imported on use: the built-in plugin registers READERS whenever the command line starts, `--help` included.
_ROOMS = {
    "FetchStats": "fetch",
    "MediaLoader": "loader",
    "PyAVReader": "readers",
    "READERS": "readers",
    "Resolver": "address",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f".{_ROOMS.get(name, 'types')}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
