"""Content part -> decoded media: the only room that opens a socket or a file for a user."""

from __future__ import annotations

from .address import Resolver
from .fetch import FetchStats
from .loader import MediaLoader
from .readers import READERS, PyAVReader
from .types import Clip, Embeddings, Kind, Media, OpenVideo, Picture, Pixels, StopCheck, VideoInfo, VideoReader

__all__ = [
    "READERS",
    "Clip",
    "Embeddings",
    "FetchStats",
    "Kind",
    "Media",
    "MediaLoader",
    "OpenVideo",
    "Picture",
    "Pixels",
    "PyAVReader",
    "Resolver",
    "StopCheck",
    "VideoInfo",
    "VideoReader",
]
