"""Weights with 4 or 8 bits: how a matrix is quantized, and matrices that are quantized already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import mmap_buffer

GROUPS = (32, 64, 128)
"""Numbers of inputs that can share a scale and a zero point."""

MAX_CODE = 15
MAX_ZERO = 16
"""Largest zero point of weights with 4 bits: GPTQ's first format stores zero points minus one."""

SYMMETRIC_ZERO = 128
"""Zero point of all 8-bit weights that kernels keep in 8 bits."""

ROWS_ELEMENTS = 1 << 20
"""Number of weights that are quantized together, to limit the memory for intermediate results."""

CLIPPING = (1.0, 0.95, 0.9, 0.85)
"""The shares of a group's range that are tried: clipping a few outliers makes the steps of all others smaller."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a linear layer are quantized.

    Attributes:
        bits: 8: one scale per output; 4: as `ProgressiveWeight`.

    Raises:
        ValueError: a value is out of range.
    """

    bits: Literal[4, 8]

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"`bits` must be 4 or 8, got {self.bits}.")


INT8 = Quantization(8)
INT4 = Quantization(4)


class QuantizedWeight(NamedTuple):
    """Quantized weights: weight[o, i] = (codes[o, i] - zeros[o, i // group]) * scales[o, i // group].

    Attributes:
        codes: uint8 [outputs, inputs], 0 to 15 with 4 bits.
        scales: float [outputs, groups]; the last group may be incomplete.
        zeros: [outputs, groups]: with 4 bits, uint8, 0 to 16; with 8 bits, int16, 0 to 256.
        group: number of inputs of a group; with 4 bits, one of `GROUPS`.
        order: int64 [inputs], a permutation: column i of `codes` multiplies input order[i] (`act-order` of GPTQ); None
            if the columns are in the order of the inputs.
        bits: 4 or 8.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group: int
    order: Tensor | None = None
    bits: int = 4

    def check(self) -> None:
        """Check shapes, types and ranges.

        Raises:
            ValueError: the message names the attribute and the expected value.
        """
        if self.bits not in (4, 8):
            raise ValueError(f"`bits` must be 4 or 8, got {self.bits}.")
        if self.group not in GROUPS and (self.bits == 4 or self.group < 1):
            expected = f"one of {', '.join(map(str, GROUPS))}" if self.bits == 4 else "positive"
            raise ValueError(f"`group` must be {expected}, got {self.group}.")
        if self.codes.dtype != torch.uint8 or self.codes.dim() != 2:
            raise ValueError(f"`codes` must be uint8 [outputs, inputs], got {_describe(self.codes)}.")
        outputs, inputs = self.codes.shape
        shape = (outputs, -(-inputs // self.group))
        dtype, max_zero = (torch.uint8, MAX_ZERO) if self.bits == 4 else (torch.int16, 256)
        if self.zeros.dtype != dtype or self.zeros.shape != shape:
            name = str(dtype).removeprefix("torch.")
            raise ValueError(f"`zeros` must be {name} {list(shape)}, got {_describe(self.zeros)}.")
        if not self.scales.is_floating_point() or self.scales.shape != shape:
            raise ValueError(f"`scales` must be floats {list(shape)}, got {_describe(self.scales)}.")
        max_code = MAX_CODE if self.bits == 4 else 255
        for name, values, limit in (("codes", self.codes, max_code), ("zeros", self.zeros, max_zero)):
            if values.numel() and int(values.max()) > limit:
                raise ValueError(f"`{name}` must be at most {limit}, got {int(values.max())}.")
        if self.order is not None and not torch.equal(self.order.sort().values.cpu(), torch.arange(inputs)):
            raise ValueError(f"`order` must be a permutation of 0 to {inputs - 1}.")

    @property
    def is_symmetric_int8(self) -> bool:
        """Whether the weights are those of `quantization=INT8`: signed, with one scale per output."""
        return (
            self.bits == 8
            and self.order is None
            and self.scales.shape[1] == 1
            and bool((self.zeros == SYMMETRIC_ZERO).all())
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [outputs, inputs] in `dtype`, with the columns in the order of the inputs."""
        weight = mmap_buffer.empty(self.codes.shape, dtype, self.codes.device)
        self.dequantize_into(weight)
        return weight

    def dequantize_into(self, weight: Tensor) -> None:
        """Write the weights to `weight` [outputs, inputs]; see `dequantize`."""
        inputs = self.codes.shape[1]
        columns = slice(None) if self.order is None else self.order.argsort()
        rows = max(1, ROWS_ELEMENTS // max(1, inputs))
        parts = (torch.split(tensor, rows) for tensor in (weight, self.codes, self.scales, self.zeros))
        for part, codes, *groups in zip(*parts, strict=True):
            scales, zeros = (x.float().repeat_interleave(self.group, dim=1)[:, :inputs] for x in groups)
            part.copy_(((codes.float() - zeros) * scales)[:, columns])

    def take_rows(self, rows: Tensor) -> QuantizedWeight:
        """Return the outputs `rows`, int64 [outputs], in this order."""
        return self._replace(codes=self.codes[rows], scales=self.scales[rows], zeros=self.zeros[rows])


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Concatenate matrices along the outputs, without rounding; None if they cannot be one `QuantizedWeight`.

    With 4 bits, groups of different sizes are split into smaller ones with the same scale and zero point.
    """
    first = weights[0]
    inputs = weights[0].codes.shape[1]
    group = min(weight.group for weight in weights)
    if any(weight.bits != first.bits or weight.group % group or not _same_order(weight, first) for weight in weights):
        return None
    parts = [_split_groups(weight, group, inputs) for weight in weights]
    codes = mmap_buffer.empty([sum(len(part.codes) for part in parts), inputs], torch.uint8, first.codes.device)
    torch.cat([part.codes for part in parts], out=codes)
    scales, zeros = (torch.cat(tensors) for tensors in list(zip(*parts, strict=True))[1:3])
    return QuantizedWeight(codes, scales, zeros, group, first.order, first.bits)


def _same_order(weight: QuantizedWeight, other: QuantizedWeight) -> bool:
    if weight.order is None or other.order is None:
        return weight.order is other.order
    return torch.equal(weight.order, other.order)


def _split_groups(weight: QuantizedWeight, group: int, inputs: int) -> QuantizedWeight:
    count = -(-inputs // group)
    scales, zeros = (
        part.repeat_interleave(weight.group // group, dim=1)[:, :count] for part in (weight.scales, weight.zeros)
    )
    return weight._replace(scales=scales, zeros=zeros, group=group)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def quantize_int8(weight: Tensor) -> Tensor:
    """Return weights [outputs, inputs] rounded to 8 bits with one scale per output, in their own dtype."""
    codes, scales = int8_codes(weight)
    return (codes.float() * scales).to(weight.dtype)


def int8_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weights [outputs, inputs] to 8 bits.

    Returns:
        The codes, int8 [outputs, inputs], -127 to 127, and the scales, float32 [outputs, 1]: a weight is the product of
        its code and its output's scale. Scales are rounded to the dtype of the weights, as in `quantize`.
    """
    scales = (weight.float().abs().amax(dim=1, keepdim=True) / 127).to(weight.dtype).float()
    codes = (weight.float() * torch.where(scales > 0, 1 / scales, 0)).round()
    return codes.to(torch.int8), scales


def has_8_bits(layer: int, num_layers: int) -> bool:
    """Whether a layer of a text model has 8 bits if most layers have 4: the first and the last one, whose errors change
    the logits most, unless there is no other layer."""
    return layer in (0, num_layers - 1) and num_layers > 2


def quantize(weight: Tensor, group: int) -> QuantizedWeight:
    """Round weights [outputs, inputs] to 4 bits.

    The codes cover a group's range, from its smallest to its largest weight and zero, or a share of it, and the scale
    is then fitted to the codes by least squares. The share with the smallest squared error is used. Scales are rounded
    to the dtype of the weights, in which checkpoints store them.
    """
    rows = [
        _quantize_rows(part, group) for part in torch.split(weight, max(1, ROWS_ELEMENTS // max(1, weight.shape[1])))
    ]
    codes, scales, zeros = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return QuantizedWeight(codes[:, : weight.shape[1]].contiguous(), scales.to(weight.dtype).float(), zeros, group)


def _quantize_rows(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [outputs, inputs padded to whole groups], scales and zero points [outputs, groups]."""
    x = torch.unflatten(F.pad(weight.float(), (0, -weight.shape[1] % group)), 1, (-1, group))
    low = x.amin(2, keepdim=True).clamp(max=0)
    high = x.amax(2, keepdim=True).clamp(min=0)
    best = _fit_codes(x, low, high)
    for share in CLIPPING[1:]:
        fit = _fit_codes(x, low * share, high * share)
        better = fit.gain > best.gain
        best = _Fit(*(torch.where(better, new, old) for new, old in zip(fit, best, strict=True)))
    return best.codes.to(torch.uint8).flatten(1), best.scale.squeeze(2), best.zero.to(torch.uint8).squeeze(2)


class _Fit(NamedTuple):
    """Codes [outputs, groups, group] with the zero point, the best scale, and the reduction of the squared error."""

    codes: Tensor
    zero: Tensor
    scale: Tensor
    gain: Tensor


def _fit_codes(x: Tensor, low: Tensor, high: Tensor) -> _Fit:
    inverse = torch.where(high > low, MAX_CODE / (high - low), 0)
    zero = (-low * inverse).round()
    codes = ((x * inverse).round() + zero).clamp(0, MAX_CODE)
    steps = codes - zero
    products = (x * steps).sum(2, keepdim=True)
    squares = (steps * steps).sum(2, keepdim=True)
    scale = torch.where(squares == 0, 0, products / squares)
    return _Fit(codes, zero, scale, products * scale)
