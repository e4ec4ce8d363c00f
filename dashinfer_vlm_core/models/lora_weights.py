"""Read the tensors of LoRA adapters, and merge them into the tensors of a checkpoint."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import CheckpointError
from .files import open_tensors
from .lora import LoraFactors, LoraWeights, VisionMerge


class Factors(NamedTuple):
    """The factors of one module, in float32.

    Attributes:
        a: [rank, inputs].
        b: [outputs, rank], multiplied by the scale.
    """

    a: torch.Tensor
    b: torch.Tensor


def read_factors(lora: LoraWeights, factors: LoraFactors) -> Factors:
    """Read the factors of one module.

    Raises:
        CheckpointError: the file is damaged.
    """
    return Factors(read_tensor(lora, factors.a), read_tensor(lora, factors.b) * factors.scale)


def read_tensor(lora: LoraWeights, stored: str) -> torch.Tensor:
    """Read a tensor of the adapter's file, by its name there, in float32.

    Raises:
        CheckpointError: the file is damaged, or the tensor contains infinity or NaN.
    """
    with open_tensors(lora.file, "pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(stored).float()
    if not tensor.isfinite().all():
        raise CheckpointError(f"{lora.file}: tensor {stored!r} contains infinity or NaN. Train the adapter again.")
    return tensor


def merge_tensor(merge: VisionMerge, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor `name` of the checkpoint with the adapter's changes, in float32 if it has any."""
    lora = merge.lora
    module = name.removesuffix(".weight")
    merge.unused.discard(name)
    if name in lora.saved_vision:
        tensor = read_tensor(lora, lora.saved_vision[name])
    if module in lora.vision and name.endswith(".weight"):
        a, b = read_factors(lora, lora.vision[module])
        tensor = tensor.float() + b @ a
    return tensor
