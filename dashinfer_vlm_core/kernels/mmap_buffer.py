"""Tensors in their own memory mapping, which is returned to the system as soon as the tensor is freed.

The C library's allocator keeps freed memory, and small allocations in between fragment it, so that it cannot be reused
for the next matrix: loading a model with 2 billion parameters left 3 GB of unused memory in the process.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

MIN_MMAP_BYTES = 1 << 20
"""Smaller tensors use torch's allocator: they are not worth a system call."""


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return a tensor with uninitialized values (zeros if it has its own mapping, which is only possible on a CPU)."""
    count = math.prod(shape)
    on_cpu = torch.device(device).type == "cpu"
    if not on_cpu or count * dtype.itemsize < MIN_MMAP_BYTES:
        return torch.empty(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
