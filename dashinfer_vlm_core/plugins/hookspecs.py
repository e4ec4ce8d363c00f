"""The plugin hooks. All of them register objects at startup; none runs while a request is served."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..hooks import hookspec

if TYPE_CHECKING:
    import click

    from ..config import EngineConfig, PluginOptions
    from ..decoders import DecoderFactory
    from ..embedding_store import EmbeddingStoreFactory
    from ..findings import Finding
    from ..kernels.choice import KernelFactory
    from ..media.types import VideoReader
    from ..models.formats.interface import CheckpointFormat
    from ..models.interface import ModelFamily


class RegisterModel(Protocol):
    """Registers a name for the checkpoint in a folder; see `register_models`."""

    def __call__(
        self, name: str, folder: Path, *, description: str = "", example_prompts: Iterable[str] = ()
    ) -> None: ...


@hookspec
def register_models(register: RegisterModel) -> None:
    """Register a name for a checkpoint folder: `register("demo", folder)`.

    The server shows its users a `description` of the model and `example_prompts`, a list, if they are given too.
    """


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
