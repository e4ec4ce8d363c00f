"""Create linear layers from weights that may be quantized already, and whether these keep their bits."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .layers import FullLMHead
from .quantization import Quantization, QuantizedWeight
from .types import Activation, Kernels, Linear, LMHead


def supported_bits(kernels: Kernels) -> frozenset[Literal["int4", "int8"]]:
    """Return the bits in which the kernels keep weights that are quantized already; `int8`: one scale per output."""
    bits: list[tuple[Literal["int4", "int8"], bool]] = [
        ("int4", kernels.supports_int4),
        ("int8", kernels.supports_int8),
    ]
    return frozenset(name for name, is_supported in bits if is_supported)


def keeps_bits(kernels: Kernels, weight: QuantizedWeight) -> bool:
    """Whether kernels keep weights in their 4 or 8 bits; otherwise, they have to be dequantized."""
    supported = supported_bits(kernels)
    return "int4" in supported if weight.bits == 4 else "int8" in supported and weight.is_symmetric_int8


def create_linear(
    kernels: Kernels,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    activation: Activation = Activation.NONE,
    fp32_output: bool = False,
    quantization: Quantization | None = None,
) -> Linear:
    """Create a linear layer; see `Kernels.linear`.

    Quantized weights are dequantized if the kernels do not keep them in their bits.

    Args:
        kernels: the kernels.
        weight: [outputs, inputs].
        bias: [outputs].
        dtype: the model's dtype.
        activation: the activation to apply to the output.
        fp32_output: return float32.
        quantization: how to quantize weights that are not quantized, or not anymore.
    """
    if isinstance(weight, QuantizedWeight) and keeps_bits(kernels, weight):
        return kernels.linear_quantized(weight, bias, dtype=dtype, activation=activation, fp32_output=fp32_output)
    return kernels.linear(
        _dequantized(weight, dtype), bias, activation=activation, fp32_output=fp32_output, quantization=quantization
    )


def create_head(
    kernels: Kernels,
    weight: Tensor | QuantizedWeight,
    *,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
) -> LMHead:
    """Create an LM head; see `create_linear` and `Kernels.head`."""
    if isinstance(weight, QuantizedWeight) and keeps_bits(kernels, weight):
        return FullLMHead(kernels.linear_quantized(weight, dtype=dtype, fp32_output=True))
    return kernels.head(_dequantized(weight, dtype), quantization=quantization)


def _dequantized(weight: Tensor | QuantizedWeight, dtype: torch.dtype) -> Tensor:
    return weight.dequantize(dtype) if isinstance(weight, QuantizedWeight) else weight
