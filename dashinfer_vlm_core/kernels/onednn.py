"""Kernels in PyTorch whose bfloat16 weights are in oneDNN's layout, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .devices import cpu_flags
from .torch_kernels import TORCH_DELTA_NET_SECONDS, TORCH_LAYER_SECONDS, TorchKernels, TorchLinear
from .types import Activation, Linear, StepCost, WeightBits


class OneDnnKernels(TorchKernels):
    """See `Kernels`. Linear layers with packed bfloat16 weights; everything else is `TorchKernels`'."""

    name = "onednn"
    weight_bits: WeightBits = WeightBits(tied_head=16)

    def __init__(self, device: str) -> None:
        super().__init__(device)
        # Without these instructions, oneDNN widens weights to 32 bits, in another implementation (`gemm:jit`), whose
        # weights are not in a layout of its own.
        slowdown = 1.3 if cpu_flags() & {"avx512_bf16", "bf16"} else 1.7
        self.step_cost = StepCost(
            slowdown=slowdown, layer_seconds=TORCH_LAYER_SECONDS, delta_net_seconds=TORCH_DELTA_NET_SECONDS
        )

    def _linear(self, weight: Tensor, bias: Tensor | None, activation: Activation, fp32_output: bool) -> Linear:
        return OneDnnLinear(weight, bias, activation, fp32_output)


class OneDnnLinear(TorchLinear):
    """A linear layer with the weights in oneDNN's layout.

    oneDNN would otherwise reorder them in every call; up to twice as fast on a CPU.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation, fp32_output: bool) -> None:
        super().__init__(_operator("_reorder_linear_weight")(weight), bias, activation, fp32_output)

    def _product(self, x: Tensor) -> Tensor:
        product: Tensor = _operator("_linear_pointwise")(x, self._weight, self._bias, "none", [], "")
        return product


def unavailable_reason() -> str:
    """Return why torch cannot multiply bfloat16 matrices with oneDNN on this machine; empty if it can."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this build of torch has no oneDNN"
    if not all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS):
        return "oneDNN's operators are missing in this version of torch"
    if not _operator("_is_mkldnn_bf16_supported")():
        return "oneDNN does not support bfloat16 on this CPU"
    return ""


_OPERATORS = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise")


def _operator(name: str) -> Callable[..., Any]:
    """Return one of torch's oneDNN operators, which torch.compile uses and which have no public name."""
    function: Callable[..., Any] = getattr(torch.ops.mkldnn, name)
    return function
