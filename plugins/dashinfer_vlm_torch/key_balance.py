"""Balance the channels of keys for an 8-bit KV cache.

A large bias of the key projection makes a channel of the keys many times larger than the others. With one scale per
key, it would leave few bits for the rest. Each channel of the keys is therefore divided by a factor, and the same
channel of the queries multiplied by it, which does not change their product (SmoothAttention of QServe,
arXiv:2405.04532). Rotary embedding mixes the channels i and i + head_dim / 2, so these share a factor.

Unlike QServe's, the factors need no calibration: they are estimated from the weights. They are powers of two, so that
scaling the weights does not round them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dashinfer_vlm_core.kernels.quantization import QuantizedWeight
from dashinfer_vlm_core.kernels.types import Norm

LARGEST_DEVIATION = 3
"""The largest of the channels of a key, in standard deviations. Channels with a large bias do not deviate as much."""

MAX_EXPONENT = 8
"""Factors are between 2^-8 and 2^8, so that queries in float16 do not overflow."""


def balance_projection(
    weight: Tensor | QuantizedWeight, bias: Tensor | None, gain: Tensor, *, heads: int, kv_heads: int
) -> Tensor:
    """Scale the rows of queries and keys of a projection in place.

    The largest values of a key channel are estimated for uncorrelated inputs: the bias and `LARGEST_DEVIATION` standard
    deviations.

    Args:
        weight: [(heads + 2 * kv_heads) * head_dim, hidden]: query, key and value heads; of quantized weights, the
            scales are scaled.
        bias: [(heads + 2 * kv_heads) * head_dim].
        gain: [hidden], the weight of the norm before the projection.
        heads: number of query heads.
        kv_heads: number of key heads.

    Returns:
        float32 [(heads + 2 * kv_heads) * head_dim], the factors of the rows.
    """
    stored = weight.scales if isinstance(weight, QuantizedWeight) else weight
    head_dim = len(stored) // (heads + 2 * kv_heads)
    keys = slice(heads * head_dim, (heads + kv_heads) * head_dim)
    magnitudes = LARGEST_DEVIATION * (_float_rows(weight, keys) * gain.float()).norm(dim=-1)
    if bias is not None:
        magnitudes += bias[keys].float().abs()
    factors = channel_factors(magnitudes.view(kv_heads, head_dim)).to(stored.dtype)
    shared = factors.repeat_interleave(heads // kv_heads, dim=0)
    scales = torch.cat([shared, 1 / factors, torch.ones_like(factors)]).flatten()
    stored *= scales.view(-1, *[1] * (stored.ndim - 1))
    if bias is not None:
        bias *= scales
    return scales.float()


def _float_rows(weight: Tensor | QuantizedWeight, rows: slice) -> Tensor:
    if isinstance(weight, QuantizedWeight):
        numbers = torch.arange(rows.start, rows.stop, device=weight.codes.device)
        return weight.take_rows(numbers).dequantize(torch.float32)
    return weight[rows].float()


def balance_norms(query: Norm, key: Norm) -> tuple[Norm, Norm]:
    """Scale the norms of query and key heads, which determine the magnitude of the channels."""
    factors = channel_factors(key.weight.float().abs()).to(key.weight.dtype)
    return (
        Norm(query.weight * factors, None if query.bias is None else query.bias * factors),
        Norm(key.weight / factors, None if key.bias is None else key.bias / factors),
    )


def channel_factors(magnitudes: Tensor) -> Tensor:
    """Return the factors of channels of these magnitudes, relative to the median; both float32 [..., head_dim]."""
    pairs = torch.unflatten(magnitudes, -1, (2, -1)).square().mean(dim=-2).sqrt()
    exponents = pairs.clamp_min(torch.finfo(torch.float32).tiny).log2()
    exponents -= exponents.median(dim=-1, keepdim=True).values
    factors = exponents.round().clamp(-MAX_EXPONENT, MAX_EXPONENT).exp2()
    return torch.cat([factors, factors], dim=-1)
