"""Kernels that the vision encoder and the decoder share: linear layers, norms, rotary embedding, attention.

`types` defines the interface. `torch_kernels` implements it in PyTorch for any device, `cuda` with attention of whole
batches, `onednn` with packed weights for CPUs, and plugins register faster kernels. `choice` selects one set: `measure`
times them with the layers that `workload` describes, and `choice_cache` stores the result. `streams` has what runs the
parts of a model on a GPU, and `graphs` records work there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ..hooks import hookimpl

if TYPE_CHECKING:
    import torch

    from ..config import EngineConfig
    from ..text_spec import TextModelSpec
    from .choice import Candidates, KernelChoice, KernelFactory, KernelSelector, LoadedKernels
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
    from .workload import LinearGroup, LinearShape

__all__ = [
    "INT4",
    "INT8",
    "Activation",
    "AdapterLayer",
    "AdapterLayers",
    "AdapterRows",
    "Additions",
    "Candidates",
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
    "LinearGroup",
    "LinearShape",
    "LoadedKernels",
    "LowRank",
    "LowRankPart",
    "Norm",
    "Quantization",
    "QuantizedWeight",
    "TokenDrawing",
]  # fmt: skip

_MODULES = {
    "Candidates": "choice", "KernelChoice": "choice", "KernelFactory": "choice", "KernelSelector": "choice",
    "LoadedKernels": "choice", "LinearGroup": "workload", "LinearShape": "workload",
    "INT4": "quantization", "INT8": "quantization", "Quantization": "quantization", "QuantizedWeight": "quantization",
}  # fmt: skip
"""Modules of the names that are not in `types`."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = _MODULES.get(name, "types")
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

    def identity(self) -> str:
        return _torch_identity()


class OneDnnKernelFactory:
    """Factory for PyTorch's kernels with weights in oneDNN's layout, for bfloat16 on a CPU; see `KernelFactory`."""

    name = "onednn"
    priority = 1

    def applies(self, device: str, dtype: torch.dtype) -> bool:
        return device.partition(":")[0] == "cpu" and str(dtype) == "torch.bfloat16"

    def unsupported_reason(self, text: TextModelSpec) -> str:
        return ""

    def load(self, device: str, config: EngineConfig) -> LoadedKernels:
        from .choice import LoadedKernels
        from .onednn import OneDnnKernels, unavailable_reason

        reason = unavailable_reason()
        return LoadedKernels(None, reason) if reason else LoadedKernels(OneDnnKernels(device))

    def identity(self) -> str:
        return _torch_identity()


class CudaKernelFactory:
    """Factory for PyTorch's kernels with batched attention, for CUDA; see `KernelFactory`."""

    name = "cuda"
    priority = 1

    def applies(self, device: str, dtype: torch.dtype) -> bool:
        return device.partition(":")[0] == "cuda"

    def unsupported_reason(self, text: TextModelSpec) -> str:
        return ""

    def load(self, device: str, config: EngineConfig) -> LoadedKernels:
        from .choice import LoadedKernels
        from .cuda import CudaKernels

        return LoadedKernels(CudaKernels(device))

    def identity(self) -> str:
        return _torch_identity()


def _torch_identity() -> str:
    """Return the identity of kernels that consist of torch's operators."""
    return f"torch {version('torch')}"


@hookimpl
def register_kernels(register: Callable[[KernelFactory], None]) -> None:
    register(TorchKernelFactory())
    register(OneDnnKernelFactory())
    register(CudaKernelFactory())
