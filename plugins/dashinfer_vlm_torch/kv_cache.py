"""Keys and values of all sequences."""

from __future__ import annotations

import torch

from dashinfer_vlm_core.text_spec import TextModelSpec


class KVCache:
    """One pool for all sequences; `KVCacheManager` assigns each a contiguous range of rows.

    On a CPU, the operating system allocates memory when a row is first written, so a new pool costs almost nothing.

    Attributes:
        pool: [layers, 2 * kv heads, tokens, head_dim], keys first.
        scales: float32 [layers, 2 * kv heads, tokens], the scale of each row of an int8 pool; None for other dtypes.
            They are a separate tensor, so that the rows keep their alignment, and attention reads the scales of
            consecutive keys as a vector.
    """

    def __init__(self, config: TextModelSpec, tokens: int, *, device: str, dtype: torch.dtype) -> None:
        shape = (config.num_hidden_layers, 2 * config.num_key_value_heads, tokens)
        self.pool: torch.Tensor = torch.empty((*shape, config.head_dim), device=device, dtype=dtype)
        self.scales: torch.Tensor | None = None
        if dtype == torch.int8:
            self.scales = torch.empty(shape, device=device, dtype=torch.float32)

    @staticmethod
    def bytes_per_token(config: TextModelSpec, dtype: torch.dtype) -> int:
        row = config.head_dim * dtype.itemsize + (torch.float32.itemsize if dtype == torch.int8 else 0)
        return config.num_hidden_layers * 2 * config.num_key_value_heads * row

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy rows; the ranges may overlap."""
        overlap = abs(source - target) < rows
        for tensor in (self.pool,) if self.scales is None else (self.pool, self.scales):
            for layer in tensor:
                moved = layer[:, source : source + rows]
                layer[:, target : target + rows].copy_(moved.clone() if overlap else moved)
