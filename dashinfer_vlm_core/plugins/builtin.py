"""Built-in parts that have no package of their own, entering by the same door as a stranger's plugin."""

from __future__ import annotations

from collections.abc import Callable

from ..hookspecs import hookimpl
from ..media.readers import READERS
from ..media.types import VideoReader


@hookimpl
def register_video_readers(register: Callable[[VideoReader], None]) -> None:
    for reader in READERS:
        register(reader)
