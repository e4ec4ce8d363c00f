"""Weights with 4 or 8 bits: how a matrix is quantized, and matrices that are quantized already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..deprecation import warn_renamed

if TYPE_CHECKING:
    from .types import Kernels

GROUPS = (32, 64, 128)
"""Numbers of inputs that can share a scale and a zero point."""

MAX_CODE = 15
MAX_ZERO = 16
"""Largest zero point: GPTQ's first format stores zero points minus one."""

ROWS_ELEMENTS = 1 << 20
"""Number of weights that `quantize` processes together, to limit the memory for intermediate results."""

CLIPPING = (1.0, 0.95, 0.9, 0.85)
"""The shares of a group's range that are tried: clipping a few outliers makes the steps of all others smaller."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a linear layer are quantized.

    Attributes:
        bits: 8: one scale per output; 4: a scale and a zero point for each group of inputs of an output.
        group: number of inputs of a group, one of `GROUPS`; ignored with 8 bits.

    Raises:
        ValueError: a value is out of range.
    """

    bits: Literal[4, 8]
    group: int = 32

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"`bits` must be 4 or 8, got {self.bits}.")
        if self.group not in GROUPS:
            raise ValueError(f"`group` must be one of {', '.join(map(str, GROUPS))}, got {self.group}.")


INT8 = Quantization(8)
INT4 = Quantization(4)


def resolve_quantization(quantization: Quantization | None, *, int8: bool) -> Quantization | None:
    """Return `quantization`, or that of the deprecated argument `int8` of `Kernels.linear` and `Kernels.head`."""
    if not int8:
        return quantization
    if quantization is not None:
        raise TypeError("`int8` and `quantization` exclude each other; use `quantization`.")
    warn_renamed("Kernels.linear(int8=True)", "Kernels.linear(quantization=INT8)", stacklevel=4)
    return INT8


def quantization_options(kernels: Kernels, quantization: Quantization | None) -> dict[str, Any]:
    """Return the arguments of `Kernels.linear` and `Kernels.head` that select a quantization.

    Kernels of plugins may have only the deprecated argument `int8`.
    """
    if quantization is None:
        return {}
    return {"quantization": quantization} if hasattr(kernels, "supports_int4") else {"int8": True}


class QuantizedWeight(NamedTuple):
    """Weights with 4 bits: weight[o, i] = (codes[o, i] - zeros[o, i // group]) * scales[o, i // group].

    Attributes:
        codes: uint8 [outputs, inputs], 0 to 15.
        scales: float [outputs, groups]; the last group may be incomplete.
        zeros: uint8 [outputs, groups], 0 to 16.
        group: number of inputs of a group, one of `GROUPS`.
        order: int64 [inputs], a permutation: column i of `codes` multiplies input order[i] (`act-order` of GPTQ); None
            if the columns are in the order of the inputs.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group: int
    order: Tensor | None = None

    def check(self) -> None:
        """Check shapes, types and ranges.

        Raises:
            ValueError: the message names the attribute and the expected value.
        """
        if self.group not in GROUPS:
            raise ValueError(f"`group` must be one of {', '.join(map(str, GROUPS))}, got {self.group}.")
        if self.codes.dtype != torch.uint8 or self.codes.dim() != 2:
            raise ValueError(f"`codes` must be uint8 [outputs, inputs], got {_describe(self.codes)}.")
        outputs, inputs = self.codes.shape
        shape = (outputs, -(-inputs // self.group))
        if self.zeros.dtype != torch.uint8 or self.zeros.shape != shape:
            raise ValueError(f"`zeros` must be uint8 {list(shape)}, got {_describe(self.zeros)}.")
        if not self.scales.is_floating_point() or self.scales.shape != shape:
            raise ValueError(f"`scales` must be floats {list(shape)}, got {_describe(self.scales)}.")
        for name, values, limit in (("codes", self.codes, MAX_CODE), ("zeros", self.zeros, MAX_ZERO)):
            if values.numel() and int(values.max()) > limit:
                raise ValueError(f"`{name}` must be at most {limit}, got {int(values.max())}.")
        if self.order is not None and not torch.equal(self.order.sort().values.cpu(), torch.arange(inputs)):
            raise ValueError(f"`order` must be a permutation of 0 to {inputs - 1}.")

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [outputs, inputs] in `dtype`, with the columns in the order of the inputs."""
        scales, zeros = (
            part.float().repeat_interleave(self.group, dim=1)[:, : self.codes.shape[1]]
            for part in (self.scales, self.zeros)
        )
        weight = ((self.codes.float() - zeros) * scales).to(dtype)
        return weight if self.order is None else weight[:, self.order.argsort()]


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
    low, high = x.amin(2, keepdim=True).clamp(max=0), x.amax(2, keepdim=True).clamp(min=0)
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
    """Fit codes to the range from `low` to `high`, and then a scale to the codes by least squares."""
    inverse = torch.where(high > low, MAX_CODE / (high - low), 0)
    zero = (-low * inverse).round()
    codes = ((x * inverse).round() + zero).clamp(0, MAX_CODE)
    steps = codes - zero
    products, squares = (x * steps).sum(2, keepdim=True), (steps * steps).sum(2, keepdim=True)
    scale = torch.where(squares == 0, 0, products / squares)
    return _Fit(codes, zero, scale, products * scale)
