"""Keys and values of all running requests."""

from __future__ import annotations

import torch
from torch import Tensor

from dashinfer_vlm_core.qwen2_vl.config import TextConfig


class KVCache:
    """One pool for all requests; a request has a contiguous range of its rows, and `Memory` says which.

    On a CPU the operating system gives memory to rows when they are first written, so that a new pool costs next to
    nothing.
    """

    def __init__(self, config: TextConfig, tokens: int, *, device: str, dtype: torch.dtype) -> None:
        self._heads = config.num_key_value_heads
        shape = (config.num_hidden_layers, 2 * self._heads, tokens, config.head_dim)
        self._pool = torch.empty(shape, device=device, dtype=dtype)

    @staticmethod
    def bytes_per_token(config: TextConfig, dtype: torch.dtype) -> int:
        return config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize

    def write(self, layer: int, slots: Tensor, keys_values: Tensor) -> None:
        """Store [tokens, 2 * kv heads, head_dim], keys first, at rows `slots` (int64 [tokens])."""
        self._pool[layer].index_copy_(1, slots, keys_values.transpose(0, 1))

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """All keys and all values of a layer, each [kv heads, rows, head_dim]."""
        keys, values = torch.split(self._pool[number], self._heads)
        return keys, values

    def move(self, source: int, target: int, rows: int) -> None:
        """Copy rows; the ranges may overlap."""
        overlap = abs(source - target) < rows
        for layer in self._pool:
            moved = layer[:, source : source + rows]
            layer[:, target : target + rows].copy_(moved.clone() if overlap else moved)
