"""Write and read one layer of the KV cache in PyTorch, for any device and dtype.

Keys and values are quantized once, when they are written, and attention always reads them from the cache, those of the
batch's own tokens included. Results therefore do not depend on how a prompt is divided into chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .types import Int8CacheAttention, Kernels, KVCacheLayer, KVSpan, KVSpans

MAX_INT8 = 127

MIN_SCALE = 2.0**-126
"""The smallest normal float32. The reciprocal of a smaller scale could overflow, so such rows are stored as zeros."""


def write_rows(layer: KVCacheLayer, slots: Tensor, rows: Tensor) -> None:
    """Write keys and values to the cache, quantized if it has 8 bits.

    Args:
        layer: the layer to write to.
        slots: int64 [tokens], rows of the cache.
        rows: [tokens, 2 * kv_heads, head_dim].
    """
    rows = rows.transpose(0, 1)
    if layer.scales is None:
        layer.rows.index_copy_(1, slots, rows.to(layer.rows.dtype))
        return
    quantized, scales = quantize_rows(rows)
    layer.rows.index_copy_(1, slots, quantized)
    layer.scales.index_copy_(1, slots, scales)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows [..., head_dim] to int8, with one scale for each row.

    The C kernels compute the same values, bit-exactly. The scale of a row that contains NaN or infinity is not finite.

    Returns:
        int8 [..., head_dim] and the scales, float32 [...]: a row is about equal to its bytes times its scale.
    """
    rows = rows.float()
    scales = rows.abs().amax(dim=-1) / MAX_INT8
    inverse = torch.where(scales >= MIN_SCALE, 1.0 / scales, 0.0)
    bytes_ = (rows * inverse[..., None]).round().nan_to_num(0.0).to(torch.int8)
    return bytes_, scales


def attend_cached(kernels: Kernels, q: Tensor, layer: KVCacheLayer, spans: KVSpans) -> Tensor:
    """Attend to a layer of the cache in any of its dtypes; `q` and the result are those of `Kernels.attend`.

    A cache in another dtype than `q` is read by `kernels` if they support it. Otherwise, the rows of all spans are
    converted to the dtype of `q` first.
    """
    if layer.scales is not None and isinstance(kernels, Int8CacheAttention):
        return kernels.attend_int8(q, layer, spans)
    if layer.rows.dtype == q.dtype:
        keys, values = layer.rows.chunk(2)
        return kernels.attend(q, keys, values, spans)
    keys, values = convert_rows(layer, spans, q.dtype).chunk(2)
    return kernels.attend(q, keys, values, spans.packed)


def convert_rows(layer: KVCacheLayer, spans: KVSpans, dtype: torch.dtype) -> Tensor:
    """Return the rows of all spans, one span after the other, in `dtype`: [2 * kv_heads, all keys, head_dim]."""
    return torch.cat([_convert_span(layer, span, dtype) for span in spans.spans], dim=1)


def _convert_span(layer: KVCacheLayer, span: KVSpan, dtype: torch.dtype) -> Tensor:
    rows = slice(span.first_key, span.first_key + span.num_keys)
    if layer.scales is None:
        return layer.rows[:, rows].to(dtype)
    return (layer.rows[:, rows].float() * layer.scales[:, rows, None]).to(dtype)
