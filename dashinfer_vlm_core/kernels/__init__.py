"""Kernels that the vision encoder and the decoder share: linear layers, norms, rotary embedding, attention.

`types` defines the interface. `torch_kernels` implements it in PyTorch for any device, `cuda` with attention of whole
batches, `onednn` with packed weights for CPUs, and plugins register faster kernels. `choice` selects one set by
priority, or by what `dashinfer-vlm tune` measured, which `tuned` stores. `streams` has what runs the parts of a model
on a GPU, and `graphs` records work there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ..hooks import hookimpl

if TYPE_CHECKING:
    import torch

    from ..text_spec import TextModelSpec
    from .choice import KernelChoice, KernelFactory, KernelSelector, LoadedKernels
    from .quantization import INT4, INT8, Quantization, QuantizedWeight
    from .types import (
        Activation,
        AdapterLayer,
        AdapterLayers,
        AdapterRows,
        Additions,
        DecoderLayer,
        DecoderLayers,
        DecoderShape,
        DrawnTokens,
        Experts,
        ForwardBatch,
        Int8CacheAttention,
        Kernels,
        KeyRanges,
        KVCacheLayer,
        KVSpan,
        KVSpans,
        Linear,
        LMHead,
        LowRank,
        LowRankPart,
        Norm,
        TokenDrawing,
    )

__all__ = [
    "INT4",
    "INT8",
    "Activation",
    "AdapterLayer",
    "AdapterLayers",
    "AdapterRows",
    "Additions",
    "DecoderLayer",
    "DecoderLayers",
    "DecoderShape",
    "DrawnTokens",
    "Experts",
    "ForwardBatch",
    "Int8CacheAttention",
    "KVCacheLayer",
    "KVSpan",
    "KVSpans",
    "KernelChoice",
    "KernelFactory",
    "KernelSelector",
    "Kernels",
    "KeyRanges",
    "LMHead",
    "Linear",
    "LoadedKernels",
    "LowRank",
    "LowRankPart",
    "Norm",
    "Quantization",
    "QuantizedWeight",
    "TokenDrawing",
]  # fmt: skip

_MODULES = {
    "KernelChoice": "choice", "KernelFactory": "choice", "KernelSelector": "choice",
    "LoadedKernels": "choice",
    "INT4": "quantization", "INT8": "quantization", "Quantization": "quantization", "QuantizedWeight": "quantization",
}  # fmt: skip
"""Modules of the names that are not in `types`."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = _MODULES.get(name, "types")
        return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _PyTorchKernelFactory:
    """A factory for kernels that consist of PyTorch's operators and run every text model; see `KernelFactory`."""

    def unsupported_reason(self, text: TextModelSpec) -> str:
        return ""

    def identity(self) -> str:
        return f"torch {version('torch')}"


class TorchKernelFactory(_PyTorchKernelFactory):
    """Factory for PyTorch's kernels, for any device and dtype."""

    name = "torch"
    priority = 0

    def applies(self, device: str, dtype: torch.dtype) -> bool:
        return True

    def load(self, device: str) -> LoadedKernels:
        from .choice import LoadedKernels
        from .torch_kernels import TorchKernels

        return LoadedKernels(TorchKernels(device))


class OneDnnKernelFactory(_PyTorchKernelFactory):
    """Factory for PyTorch's kernels with weights in oneDNN's layout, for bfloat16 on a CPU."""

    name = "onednn"
    priority = 1

    def applies(self, device: str, dtype: torch.dtype) -> bool:
        return device.partition(":")[0] == "cpu" and str(dtype) == "torch.bfloat16"

    def load(self, device: str) -> LoadedKernels:
        from .choice import LoadedKernels
        from .onednn import OneDnnKernels, unavailable_reason

        reason = unavailable_reason()
        return LoadedKernels(None, reason) if reason else LoadedKernels(OneDnnKernels(device))


class CudaKernelFactory(_PyTorchKernelFactory):
    """Factory for PyTorch's kernels with batched attention, for CUDA."""

    name = "cuda"
    priority = 1

    def applies(self, device: str, dtype: torch.dtype) -> bool:
        return device.partition(":")[0] == "cuda"

    def load(self, device: str) -> LoadedKernels:
        from .choice import LoadedKernels
        from .cuda import CudaKernels

        return LoadedKernels(CudaKernels(device))


@hookimpl
def register_kernels(register: Callable[[KernelFactory], None]) -> None:
    register(TorchKernelFactory())
    register(OneDnnKernelFactory())
    register(CudaKernelFactory())
