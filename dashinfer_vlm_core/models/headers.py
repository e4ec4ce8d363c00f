"""What a safetensors file states about its tensors. This module imports neither torch nor safetensors."""

from __future__ import annotations

import math
import re
from typing import NamedTuple


class TensorHeader(NamedTuple):
    """Shape and data type of a stored tensor.

    Attributes:
        shape: its dimensions.
        dtype: its data type as safetensors names it, such as `BF16`, `I32` or `F8_E4M3`.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        bits = re.search(r"\d+", self.dtype)
        return self.numel * (int(bits[0]) if bits else 8) // 8


def module_of(name: str) -> tuple[str, str]:
    """Split the name of a tensor into those of its module and of the tensor within it."""
    module, _, tensor = name.rpartition(".")
    return module, tensor
