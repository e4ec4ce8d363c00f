"""C kernels for CPUs with AVX-512 BF16, optionally with AMX. Importing this package is cheap.

avx512.c  int4.h  tiles*.h                          the kernels, compiled on first use
native.py  native_linear.py  native_layers.py       the `Kernels` interface, through ctypes
build.py  library_cache.py  huge_pages.py           the build, its checked cache, and memory for weights
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dashinfer_vlm_core import hookimpl

if TYPE_CHECKING:
    import torch

    from dashinfer_vlm_core.config import EngineConfig
    from dashinfer_vlm_core.kernels import KernelFactory, LoadedKernels
    from dashinfer_vlm_core.models.spec import TextModelSpec


class NativeKernelFactory:
    """See `KernelFactory`. Text models whose layers have no fused C implementation use the individual kernels."""

    def __init__(self, name: str, priority: int) -> None:
        self.name = name
        self.priority = priority

    def applies(self, device: str, dtype: torch.dtype) -> bool:
        return device.partition(":")[0] == "cpu" and str(dtype) == "torch.bfloat16"

    def unsupported_reason(self, text: TextModelSpec) -> str:
        if text.head_dim % 2 or text.hidden_size % 2:
            return f"they require an even head_dim and hidden_size, got {text.head_dim} and {text.hidden_size}"
        return ""

    def load(self, device: str, config: EngineConfig) -> LoadedKernels:
        from .native import VARIANTS, load_variant

        (variant,) = (variant for variant in VARIANTS if variant.name == self.name)
        return load_variant(variant, config)


@hookimpl
def register_kernels(register: Callable[[KernelFactory], None]) -> None:
    register(NativeKernelFactory("amx", 20))
    register(NativeKernelFactory("avx512", 10))
