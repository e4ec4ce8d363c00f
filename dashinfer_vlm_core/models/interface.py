"""What an architecture gives to the engine: what its checkpoints say, and a vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from .patches import Grid, Patches
from .spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from ..config import EngineConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisualTokens:
    """One picture or video as the language model sees it.

    Attributes:
        embedding: [tokens, hidden_size] on the tower's device and in its dtype; shared, never written to.
        grid: patches along time, height and width.
        digest: 32 bytes that name the content; under a salt, the content and the salt.
    """

    embedding: torch.Tensor
    grid: Grid
    digest: bytes


class VisionEncoder(Protocol):
    """A vision tower; called from one thread at a time. On a CPU it computes by `Kernels.compute`, in parts.

    Attributes:
        batch_patches: patches that keep the device busy; with more in a pass, the first ones only wait for the last.
    """

    batch_patches: int

    def encode(self, batch: Sequence[Patches]) -> list[torch.Tensor]:
        """One [tokens, hidden_size] tensor per item; an item's rows do not depend on the rest of the batch."""

    def adopt(self, rows: npt.NDArray[np.float32]) -> torch.Tensor:
        """Rows that somebody else encoded, on the device and in the dtype of those that `encode` gives."""


class Architecture(Protocol):
    """Reads the checkpoints of one `model_type`; a plugin registers one by `register_architectures`."""

    model_type: str

    def read(self, folder: Path) -> ModelSpec:
        """What the checkpoint says about itself.

        Raises:
            CheckpointError: a file is missing or says something that we do not support.
        """

    def load_vision(self, spec: ModelSpec, config: EngineConfig) -> VisionEncoder:
        """The vision tower, where and in the number type that the configuration says, which may be `auto`.

        Raises:
            CheckpointError: tensors are missing or have other shapes.
        """
