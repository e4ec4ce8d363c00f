"""The hooks. All of them register objects at start-up; none runs while a request is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import click

    from .decoders import DecoderFactory
    from .kernels.choice import KernelFactory
    from .media.types import VideoReader
    from .models.interface import ModelFamily

GROUP = "dashinfer_vlm"
"""Name of the pluggy project, and of the entry-point group that plugins are found by."""

API_VERSION = 2
"""Of the hooks below and of what they register. A plugin says which one it was written for in `dashinfer_vlm_api`."""

hookspec: pluggy.HookspecMarker = pluggy.HookspecMarker(GROUP)
hookimpl: pluggy.HookimplMarker = pluggy.HookimplMarker(GROUP)


@hookspec
def register_models(register: Callable[[str, Path], None]) -> None:
    """Give a checkpoint folder a name: `register("demo", folder)`."""


@hookspec
def register_model_families(register: Callable[[ModelFamily], None]) -> None:
    """Teach the engine to read and run checkpoints of another `model_type`."""


@hookspec
def register_decoders(register: Callable[[DecoderFactory], None]) -> None:
    """Add a language decoder that `EngineConfig.decoder` can name."""


@hookspec
def register_kernels(register: Callable[[KernelFactory], None]) -> None:
    """Add kernels, which run models faster than PyTorch's on some devices."""


@hookspec
def register_video_readers(register: Callable[[VideoReader], None]) -> None:
    """Add a reader of video files."""


@hookspec
def register_commands(group: click.Group) -> None:
    """Add commands to the `dashinfer-vlm` command line."""
