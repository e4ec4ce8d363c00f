"""Read the weights of a checkpoint that `export` wrote, to continue its training."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

CONVOLUTION = "visual.patch_embed.proj.weight"
"""A matrix in training, a convolution in published checkpoints."""


def read(folder: Path) -> dict[str, Tensor]:
    """Return the weights by the network's names, in fp32. The auxiliary heads are not published."""
    weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    return weights | {CONVOLUTION: weights[CONVOLUTION].flatten(1)}
