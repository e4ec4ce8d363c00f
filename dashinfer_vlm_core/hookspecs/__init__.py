"""The hooks. All of them register objects at start-up; none runs while a request is served."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import pluggy

if TYPE_CHECKING:
    import click

    from ..config import EngineConfig, PluginOptions
    from ..decoders import DecoderFactory
    from ..kernels.choice import KernelFactory
    from ..media.types import VideoReader
    from ..models.interface import ModelFamily

GROUP = "dashinfer_vlm"
"""Name of the pluggy project, and of the entry-point group that plugins are found by."""

API_VERSION = 2
"""Of the hooks below and of what they register. A plugin says which one it was written for in `dashinfer_vlm_api`."""

hookspec: pluggy.HookspecMarker = pluggy.HookspecMarker(GROUP)
hookimpl: pluggy.HookimplMarker = pluggy.HookimplMarker(GROUP)


Status: TypeAlias = Literal["ok", "missing", "unusable", "slow", "broken"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a check of `dashinfer-vlm doctor` found.

    Attributes:
        name: what was looked at.
        status: `broken` has to be mended; `missing` and `unusable` are optional, and `slow` works.
        detail: what was found.
        mend: what to do about it, with the command; empty if nothing has to be done.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""


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
def register_options(register: Callable[[type[PluginOptions]], None]) -> None:
    """Add options of the plugin's own, which are set as those of `EngineConfig` are."""


@hookspec
def register_commands(group: click.Group) -> None:
    """Add commands to the `dashinfer-vlm` command line."""


@hookspec
def register_checks(register: Callable[[str, Callable[[EngineConfig], Iterable[Finding]]], None]) -> None:
    """Add a check to `dashinfer-vlm doctor`, under a name. It is given the configuration that the environment sets."""
