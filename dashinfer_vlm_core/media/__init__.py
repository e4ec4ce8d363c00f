"""Content parts -> decoded media: the only package that opens sockets or files on behalf of a request."""

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

__all__ = [
    "READERS",
    "DecordReader",
    "Embeddings",
    "Grid",
    "Image",
    "Kind",
    "Media",
    "OpenVideo",
    "Pixels",
    "PyAVReader",
    "StopCheck",
    "Video",
    "VideoInfo",
    "VideoReader",
    "VisualInput",
]
