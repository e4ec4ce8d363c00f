"""Content parts -> decoded media: the only package that opens sockets or files on behalf of a request."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fetch import FetchStats
    from .loader import MediaLoader
    from .readers import READERS, DecordReader, PyAVReader
    from .types import (
        Embeddings,
        Grid,
        Image,
        Kind,
        Media,
        OpenVideo,
        Pixels,
        StopCheck,
        Video,
        VideoInfo,
        VideoReader,
        VisualInput,
    )
    from .url_policy import Resolver

__all__ = [
    "READERS",
    "DecordReader",
    "Embeddings",
    "FetchStats",
    "Grid",
    "Image",
    "Kind",
    "Media",
    "MediaLoader",
    "OpenVideo",
    "Pixels",
    "PyAVReader",
    "Resolver",
    "StopCheck",
    "Video",
    "VideoInfo",
    "VideoReader",
    "VisualInput",
]

# Names are imported on first use: the built-in plugin registers READERS whenever the command line starts, even for
# `--help`.
_MODULES = {
    "DecordReader": "readers",
    "FetchStats": "fetch",
    "MediaLoader": "loader",
    "PyAVReader": "readers",
    "READERS": "readers",
    "Resolver": "url_policy",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f".{_MODULES.get(name, 'types')}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
