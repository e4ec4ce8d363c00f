"""Patches -> VisualTokens: each content is encoded once, whoever asks for it, and pictures of different requests share a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .model import ModelSpec
from .patches import Grid, Patches

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisualTokens:
    """One picture or video as the language model sees it.

    Attributes:
        embedding: [tokens, hidden_size] on the tower's device and in its dtype; shared, never written to.
        grid: patches along time, height and width.
        digest: as in `Patches`: names the content.
    """

    embedding: torch.Tensor
    grid: Grid
    digest: bytes


class VisionEncoder(Protocol):
    """A vision tower; called from one thread at a time."""

    def encode(self, batch: Sequence[Patches]) -> list[torch.Tensor]:
        """One [tokens, hidden_size] tensor per item; an item's rows do not depend on the rest of the batch."""


class Architecture(Protocol):
    """Reads the checkpoints of one `model_type`; a plugin registers one by `register_architectures`."""

    model_type: str

    def read(self, folder: Path) -> ModelSpec:
        """What the checkpoint says about itself.

        Raises:
            CheckpointError: a file is missing or says something that we do not support.
        """

    def load_vision(self, spec: ModelSpec, *, device: str, dtype: str) -> VisionEncoder:
        """The vision tower, on `device` (such as `cpu`) in `dtype` (such as `float32`), never `auto`.

        Raises:
            CheckpointError: tensors are missing or have other shapes.
        """
