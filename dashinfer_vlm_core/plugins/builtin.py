"""Built-in components without a separate package. They use the same hooks as third-party plugins."""

from __future__ import annotations

from collections.abc import Callable

from ..hookspecs import hookimpl
from ..media.readers import READERS, DecordReader
from ..media.types import VideoReader


@hookimpl
def register_video_readers(register: Callable[[VideoReader], None]) -> None:
    for reader in (*READERS, DecordReader()):
        register(reader)
