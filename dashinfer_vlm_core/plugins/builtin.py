"""Built-in components without a separate package. They use the same hooks as third-party plugins."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from ..hooks import hookimpl
from ..media.readers import READERS, DecordReader
from ..media.types import VideoReader
from ..models.formats.interface import CheckpointFormat


@hookimpl
def register_video_readers(register: Callable[[VideoReader], None]) -> None:
    for reader in (*READERS, DecordReader()):
        register(reader)


@hookimpl
def register_checkpoint_formats(register: Callable[[CheckpointFormat], None]) -> None:
    # Imported by name, because they import torch when they read weights, and packages without torch import this one.
    for checkpoint_format in importlib.import_module("dashinfer_vlm_core.models.formats").BUILTIN_FORMATS:
        register(checkpoint_format)
