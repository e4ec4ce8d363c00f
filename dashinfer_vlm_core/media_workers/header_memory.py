"""Limit the memory in which a media worker opens a video: tables of a few bytes can claim millions of samples."""

from __future__ import annotations

from ..media.types import OpenVideo, VideoReader
from .sandbox import lower_memory_limit

HEADER_BYTES = 128 << 20
"""FFmpeg's tables of 3.5 million samples. A video of ten minutes has 144,000 at 240 frames per second; one in 8K is
opened in 16 MiB."""


class HeaderLimitedReader(VideoReader):
    """A video reader that opens files in little memory, and decodes their frames in all memory of the worker.

    Args:
        reader: opens the files.
        memory_bytes: how much memory the worker may allocate.
    """

    def __init__(self, reader: VideoReader, memory_bytes: int) -> None:
        self._reader = reader
        self._memory_bytes = memory_bytes
        self.name = reader.name
        self.priority = reader.priority

    def available(self) -> bool:
        return self._reader.available()

    def open(self, data: bytes) -> OpenVideo:
        with lower_memory_limit(self._memory_bytes - HEADER_BYTES - len(data)):
            return self._reader.open(data)
