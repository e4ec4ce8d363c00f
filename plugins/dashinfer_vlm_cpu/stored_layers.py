"""Layers of the C kernels as named tensors, from which they are created again without conversion."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from dashinfer_vlm_core.kernels.layers import FullLMHead
from dashinfer_vlm_core.kernels.types import Activation, Linear, LMHead

from .native_linear import NativeLinear, NativeLMHead, PackedHead, PackedWeights

SIZES = "sizes"
"""The name of the tensor with the numbers of outputs, inputs, and inputs of a group."""

BOUNDS = "bounds"


def stored_tensors(layer: Linear | LMHead) -> dict[str, Tensor] | None:
    """See `StorableLayers`."""
    if isinstance(layer, FullLMHead):
        return stored_tensors(layer.linear)
    if isinstance(layer, NativeLMHead):
        exact, int8, bounds = layer.packed_head
        return {**_tensors(exact, "exact."), **_tensors(int8, "int8."), BOUNDS: bounds}
    return _tensors(layer.packed) if isinstance(layer, NativeLinear) else None


def load_linear(
    library: ctypes.CDLL,
    tensors: Mapping[str, Tensor],
    bias: Tensor | None,
    *,
    activation: Activation,
    fp32_output: bool,
) -> NativeLinear:
    """See `StorableLayers`."""
    return NativeLinear(library, _packed(tensors), bias, activation, fp32_output)


def load_head(library: ctypes.CDLL, tensors: Mapping[str, Tensor]) -> LMHead:
    """See `StorableLayers`."""
    if BOUNDS in tensors:
        head = PackedHead(_packed(tensors, "exact."), _packed(tensors, "int8."), tensors[BOUNDS])
        return NativeLMHead(library, head)
    return FullLMHead(load_linear(library, tensors, None, activation=Activation.NONE, fp32_output=True))


def _tensors(packed: PackedWeights, prefix: str = "") -> dict[str, Tensor]:
    optional = {"scales": packed.scales, "codes": packed.codes, "order": packed.order}
    return {
        f"{prefix}{SIZES}": torch.tensor([packed.outputs, packed.inputs, packed.group]),
        f"{prefix}weights": packed.weights,
        **{f"{prefix}{name}": tensor for name, tensor in optional.items() if tensor is not None},
    }


def _packed(tensors: Mapping[str, Tensor], prefix: str = "") -> PackedWeights:
    outputs, inputs, group = tensors[f"{prefix}{SIZES}"].tolist()
    scales, codes, order = (tensors.get(f"{prefix}{name}") for name in ("scales", "codes", "order"))
    return PackedWeights(
        outputs, inputs, tensors[f"{prefix}weights"], scales=scales, codes=codes, group=group, order=order
    )
