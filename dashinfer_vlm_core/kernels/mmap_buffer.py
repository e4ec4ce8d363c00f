"""Memory that the system has back as soon as nobody holds it.

The C library keeps what is freed, and cannot give a matrix the place of the one before it once something small lies in
there: loading a model of 2 billion parameters left it with 3 GB.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

LEAST = 1 << 20
"""Bytes from which on it is worth a call to the system."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in the memory of the CPU, of any values; zeros, where it is large."""
    count = math.prod(shape)
    if count * dtype.itemsize < LEAST or sys.platform == "win32":
        return torch.empty(*shape, dtype=dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
