"""Keys and values of all sequences."""

from __future__ import annotations

import torch

from dashinfer_vlm_core.models.spec import TextModelSpec


class KVCache:
    """One pool for all sequences; `KVCacheManager` assigns each a contiguous range of rows.

    On a CPU, the operating system allocates memory when a row is first written, so a new pool costs almost nothing.

    Attributes:
        pool: [layers, 2 * kv heads, tokens, head_dim], keys first.
    """

    def __init__(self, config: TextModelSpec, tokens: int, *, device: str, dtype: torch.dtype) -> None:
        shape = (config.num_hidden_layers, 2 * config.num_key_value_heads, tokens, config.head_dim)
        self.pool: torch.Tensor = torch.empty(shape, device=device, dtype=dtype)

    @staticmethod
    def bytes_per_token(config: TextModelSpec, dtype: torch.dtype) -> int:
        return config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy rows; the ranges may overlap."""
        overlap = abs(source - target) < rows
        for layer in self.pool:
            moved = layer[:, source : source + rows]
            layer[:, target : target + rows].copy_(moved.clone() if overlap else moved)
