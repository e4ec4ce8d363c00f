"""The plugin hooks. All of them register objects at startup; none runs while a request is served."""

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
    from ..embedding_store import EmbeddingStoreFactory
    from ..kernels.choice import KernelFactory
    from ..media.types import VideoReader
    from ..models.formats.interface import CheckpointFormat
    from ..models.interface import ModelFamily

GROUP = "dashinfer_vlm"
"""Name of the pluggy project and of the entry point group of plugins."""

API_VERSION = 1
"""Version of the hooks and of the interfaces that they register. Plugins declare theirs in `dashinfer_vlm_api`."""

hookspec: pluggy.HookspecMarker = pluggy.HookspecMarker(GROUP)
hookimpl: pluggy.HookimplMarker = pluggy.HookimplMarker(GROUP)


Status: TypeAlias = Literal["ok", "missing", "unusable", "slow", "broken"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One result of a check of `dashinfer-vlm doctor`.

    Attributes:
        name: what was checked.
        status: `broken` has to be fixed; `missing` and `unusable` components are optional, and `slow` ones work.
        detail: the result, human-readable.
        fix: what to do about it, with the command; empty if nothing has to be done.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""


@hookspec
def register_models(register: Callable[[str, Path], None]) -> None:
    """Register a name for a checkpoint folder: `register("demo", folder)`."""


@hookspec
def register_model_families(register: Callable[[ModelFamily], None]) -> None:
    """Register a model family, which loads and runs checkpoints of its `model_types`."""


@hookspec
def register_decoders(register: Callable[[DecoderFactory], None]) -> None:
    """Register a decoder, which `EngineConfig.decoder` selects by name."""


@hookspec
def register_kernels(register: Callable[[KernelFactory], None]) -> None:
    """Register kernels that are faster than PyTorch's on some devices."""


@hookspec
def register_video_readers(register: Callable[[VideoReader], None]) -> None:
    """Register a reader for video files."""


@hookspec
def register_checkpoint_formats(register: Callable[[CheckpointFormat], None]) -> None:
    """Register a format of quantized checkpoints."""


@hookspec
def register_embedding_stores(register: Callable[[EmbeddingStoreFactory], None]) -> None:
    """Register stores of visual embeddings, which `embedding_store` selects by the scheme of its URL."""


@hookspec
def register_options(register: Callable[[type[PluginOptions]], None]) -> None:
    """Register options of the plugin, which are set like those of `EngineConfig`."""


@hookspec
def register_commands(group: click.Group) -> None:
    """Add commands to the `dashinfer-vlm` command line."""


@hookspec
def register_checks(register: Callable[[str, Callable[[EngineConfig], Iterable[Finding]]], None]) -> None:
    """Register a named check for `dashinfer-vlm doctor`. It receives the configuration that the environment sets."""
