"""Kernels for CUDA: those of PyTorch, but attention is computed for all sequences of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .torch_kernels import TorchKernels
from .types import KeyRanges, KVSpans

MAX_PADDED_KEYS = 65536
"""Keys that `padded_attention` gathers at a time: 64 MiB in float32 for each key head with 128 channels, values
included."""


class CudaKernels(TorchKernels):
    """See `Kernels`. Attention does not wait for the device, and does not loop over sequences, except where noted.

    With FlashAttention, which requires 16-bit numbers and a GPU from compute capability 8.0 on, one call computes any
    batch, and reads keys where they are. Otherwise, spans of one query are padded to the same number of keys, and other
    batches are computed by `TorchKernels`: one span after the other unless they have equal lengths.
    """

    name = "cuda"

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self._capability = compute_capability(device)
        self._has_flash_attention = self._capability >= (8, 0) and torch.backends.cuda.is_flash_attention_available()

    def groups_experts(self, dtype: torch.dtype, inputs: Sequence[int]) -> bool:
        """Whether `GroupedExperts` computes layers with these numbers of inputs without waiting for the device: torch
        has a kernel for bfloat16, on compute capability 9.x and 10.x."""
        is_aligned = all(count % 8 == 0 for count in inputs)
        return self._capability[0] in (9, 10) and dtype == torch.bfloat16 and is_aligned and hasattr(F, "grouped_mm")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spans: KVSpans) -> Tensor:
        ranges = spans.ranges
        if ranges is None:
            return super().attend(q, k, v, spans)
        if self._has_flash_attention and q.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
            return flash_attention(q, k, v, ranges)
        if ranges.max_queries == 1 and len(spans.spans) != 1:
            return padded_attention(q, k, v, ranges)
        return super().attend(q, k, v, spans)


def compute_capability(device: str) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU; (0, 0) of other devices."""
    if torch.device(device).type != "cuda" or torch.version.cuda is None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> Tensor:
    """Compute `Kernels.attend` with FlashAttention 2 (arXiv:2307.08691), which torch contains.

    `torch.nn.attention.varlen.varlen_attn` calls the same operator, but has `seqused_k` only from torch 2.12 on. With
    it, the keys of a span begin at `first_keys` and need not end where those of the next span begin. Its causal mask
    is aligned with the last query and the last key; for one query, it masks nothing, and FlashAttention is faster
    without it.
    """
    attended: Tensor = torch.ops.aten._flash_attention_forward(  # noqa: SLF001 - see above
        q,
        k.transpose(0, 1),
        v.transpose(0, 1),
        ranges.query_starts,
        ranges.first_keys,
        ranges.max_queries,
        ranges.max_keys,
        dropout_p=0.0,
        is_causal=ranges.is_causal and ranges.max_queries > 1,
        return_debug_mask=False,
        seqused_k=ranges.num_keys,
    )[0]
    return attended.flatten(1)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> Tensor:
    """Compute `Kernels.attend` for spans of one query, on any device and in any dtype.

    The keys of each span are padded to `max_keys` with its last one, because rows outside of it may contain NaN.
    """
    numbers = torch.arange(ranges.max_keys, device=q.device)
    last = ranges.num_keys[:, None] - 1
    rows = ranges.first_keys[:-1, None] + torch.minimum(numbers, last)
    is_key = (numbers <= last)[:, None, None]
    count = max(1, MAX_PADDED_KEYS // ranges.max_keys)
    parts = zip(*(torch.split(part, count) for part in (q, rows, is_key)), strict=True)
    return torch.cat([_attend_rows(queries, k, v, keys, mask) for queries, keys, mask in parts])


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """Attend from q [spans, heads, head_dim] to the rows [spans, keys] of k and v; mask [spans, 1, 1, keys]."""
    queries = torch.unflatten(q, 1, (len(k), -1))  # query heads that share keys are rows of one matrix product
    keys, values = (x[:, rows].transpose(0, 1) for x in (k, v))
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask).flatten(1)
