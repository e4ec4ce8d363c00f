"""Kernels that the vision encoder and the decoder share: linear layers, norms, rotary embedding, attention.

`types` defines the interface and `torch_kernels` implements it in PyTorch for any device. Plugins register faster
kernels, and `choice` selects the fastest that can run on this machine.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

    from ..config import EngineConfig
    from ..models.spec import TextModelSpec
    from .choice import KernelFactory, KernelSelector, LoadedKernels
    from .quantization import INT4, INT8, Quantization, QuantizedWeight
    from .types import (
        Activation,
        Additions,
        DecoderLayer,
        DecoderLayers,
        DecoderShape,
        Experts,
        ForwardBatch,
        Int8CacheAttention,
        Kernels,
        KVCacheLayer,
        KVSpan,
        KVSpans,
        Linear,
        LMHead,
        Norm,
    )

__all__ = [
    "INT4",
    "INT8",
    "Activation",
    "Additions",
    "DecoderLayer",
    "DecoderLayers",
    "DecoderShape",
    "Experts",
    "ForwardBatch",
    "Int8CacheAttention",
    "KVCacheLayer",
    "KVSpan",
    "KVSpans",
    "KernelFactory",
    "KernelSelector",
    "Kernels",
    "LMHead",
    "Linear",
    "LoadedKernels",
    "Norm",
    "Quantization",
    "QuantizedWeight",
]  # fmt: skip

_MODULES = {
    "choice": ("KernelFactory", "KernelSelector", "LoadedKernels"),
    "quantization": ("INT4", "INT8", "Quantization", "QuantizedWeight"),
}

# Names are imported lazily, so that CPU features can be queried without importing torch.


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = next((module for module, names in _MODULES.items() if name in names), "types")
        return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class TorchKernelFactory:
    """Factory for PyTorch's kernels, for any device and dtype; see `KernelFactory`."""

    name = "torch"
    priority = 0

    def applies(self, device: str, dtype: torch.dtype) -> bool:
        return True

    def unsupported_reason(self, text: TextModelSpec) -> str:
        return ""

    def load(self, device: str, config: EngineConfig) -> LoadedKernels:
        from .choice import LoadedKernels
        from .torch_kernels import TorchKernels

        return LoadedKernels(TorchKernels(device))


@hookimpl
def register_kernels(register: Callable[[KernelFactory], None]) -> None:
    register(TorchKernelFactory())
