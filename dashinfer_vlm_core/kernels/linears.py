"""Create linear layers from weights that may be quantized already."""

from __future__ import annotations

import torch
from torch import Tensor

from .layers import FullLMHead
from .quantization import Quantization, QuantizedWeight, keeps_bits
from .types import Activation, Kernels, Linear, LMHead


def create_linear(
    kernels: Kernels,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    activation: Activation = Activation.NONE,
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
        quantization: how to quantize weights that are not quantized, or not anymore.
    """
    if isinstance(weight, QuantizedWeight) and keeps_bits(kernels, weight):
        return kernels.linear_quantized(weight, bias, dtype=dtype, activation=activation)
    return kernels.linear(_dequantized(weight, dtype), bias, activation=activation, quantization=quantization)


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
