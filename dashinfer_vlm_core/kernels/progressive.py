"""Weights with 4 bits whose groups have integers as scales, to which `quantization` int4 rounds.

With these, 4-bit codes are 8-bit weights, as in QServe's progressive group quantization (arXiv:2405.04532).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import mmap_buffer
from .quantization import MAX_CODE, ROWS_ELEMENTS

STEP_GROUP = 16
"""Number of inputs that share a step and a zero point. It is no group of `QuantizedWeight`, whose scales are floats."""

MAX_STEP = 15

CLIPPING = (1.0, 0.9)
"""Shares of a group's range; two steps are tried for each."""

BYTES = 4 / 8 + 1 / STEP_GROUP
"""What the C kernels store for a weight: a group has 8 bits in addition to its codes."""


class ProgressiveWeight(NamedTuple):
    """Weights [outputs, inputs]: weight[o, i] = integers[o, i] * scales[o].

    An integer is the product of the group's step, 1 to 15, and the difference of a code and the group's zero point,
    both of 0 to 15.

    Attributes:
        integers: int8 [outputs, inputs], -127 to 127.
        scales: float32 [outputs, 1].
    """

    integers: Tensor
    scales: Tensor

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [outputs, inputs] in `dtype`."""
        weight = mmap_buffer.empty(self.integers.shape, dtype, self.integers.device)
        rows = max(1, ROWS_ELEMENTS // max(1, weight.shape[1]))
        for part, *factors in zip(*(torch.split(tensor, rows) for tensor in (weight, *self)), strict=True):
            part.copy_(factors[0].float() * factors[1])
        return weight


def quantize_progressive(weight: Tensor) -> ProgressiveWeight:
    """Round weights [outputs, inputs] as the C kernels do in `progressive.h`."""
    rows = max(1, ROWS_ELEMENTS // max(1, weight.shape[1]))
    parts = [_quantize_rows(part.float()) for part in torch.split(weight, rows)]
    return ProgressiveWeight(*map(torch.cat, zip(*parts, strict=True)))


def _quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.unflatten(F.pad(weight, (0, -weight.shape[1] % STEP_GROUP)), 1, (-1, STEP_GROUP))
    low = x.amin(2, keepdim=True).clamp(max=0)
    high = x.amax(2, keepdim=True).clamp(min=0)
    distance = (high - low) / MAX_CODE
    unit = (distance / _max_step(_zero_point(low, distance))).amax(1, keepdim=True)
    best, best_gain = torch.zeros_like(x), torch.full_like(low, -torch.inf)
    for share in CLIPPING:
        for more in (0, 1):
            step = ((distance * share * _inverse(unit)).floor() + more).clamp(1, MAX_STEP)
            zero = _zero_point(low * share, step * unit)
            step = torch.minimum(step, _max_step(zero))
            steps = torch.minimum(torch.maximum((x * _inverse(step * unit)).round(), -zero), MAX_CODE - zero)
            rounded = steps * step * unit
            gain = (rounded * (2 * x - rounded)).sum(2, keepdim=True)
            best = torch.where(gain > best_gain, steps * step, best)
            best_gain = torch.maximum(gain, best_gain)
    integers = best.flatten(1)[:, : weight.shape[1]]
    products, squares = ((integers * one).sum(1, keepdim=True) for one in (weight, integers))
    return integers.to(torch.int8), torch.where(squares > 0, products / squares, products)


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x > 0, 1 / x, 0)


def _zero_point(low: Tensor, distance: Tensor) -> Tensor:
    return (-low * _inverse(distance)).round().clamp(0, MAX_CODE)


def _max_step(zero: Tensor) -> Tensor:
    """Return the largest step with which no integer is beyond 127."""
    return (127 / torch.maximum(zero, MAX_CODE - zero)).floor()
