"""The factories of the built-in kernels. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..hooks import hookimpl
from ..installation import installed_version
from .choice import KernelFactory, LoadedKernels
from .devices import is_cpu

if TYPE_CHECKING:
    import torch

    from ..text_spec import TextModelSpec


class TorchKernelFactory:
    """Factory for PyTorch's kernels, which run every text model, for any device and dtype."""

    name = "torch"
    priority = 0

    def applies(self, device: str, dtype: torch.dtype) -> bool:
        return True

    def unsupported_reason(self, text: TextModelSpec) -> str:
        return ""

    def identity(self) -> str:
        return f"torch {installed_version('torch')}"

    def load(self, device: str) -> LoadedKernels:
        from .torch_kernels import TorchKernels

        return LoadedKernels(TorchKernels(device))


class OneDnnKernelFactory(TorchKernelFactory):
    """Factory for PyTorch's kernels with weights in oneDNN's layout, for bfloat16 on a CPU."""

    name = "onednn"
    priority = 1

    def applies(self, device: str, dtype: torch.dtype) -> bool:
        return is_cpu(device) and str(dtype) == "torch.bfloat16"

    def load(self, device: str) -> LoadedKernels:
        from .onednn import OneDnnKernels, unavailable_reason

        reason = unavailable_reason()
        return LoadedKernels(None, reason) if reason else LoadedKernels(OneDnnKernels(device))


class CudaKernelFactory(TorchKernelFactory):
    """Factory for PyTorch's kernels with batched attention, for CUDA."""

    name = "cuda"
    priority = 1

    def applies(self, device: str, dtype: torch.dtype) -> bool:
        return device.partition(":")[0] == "cuda"

    def load(self, device: str) -> LoadedKernels:
        from .cuda import CudaKernels

        return LoadedKernels(CudaKernels(device))


@hookimpl
def register_kernels(register: Callable[[KernelFactory], None]) -> None:
    register(TorchKernelFactory())
    register(OneDnnKernelFactory())
    register(CudaKernelFactory())
