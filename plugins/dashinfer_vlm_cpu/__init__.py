"""C kernels for CPUs with AVX2, AVX-512 BF16, or AMX. Importing this package is cheap.

avx512.c  avx512_*.h  tiles*.h                      the kernels for AVX-512 and AMX
avx2.c  avx2_*.h                                    the kernels for AVX2, with the same functions
base.h  arguments.h  argmax.h  decoder_*.h          parts of both
sample.h  int*.h  progressive.h  delta_*.h
build.py  common.c                                  compilation of all instruction sets into one library
library.py                                          loads the library
package_digest.py                                   identifies the code
native.py  native_*.py                              the `Kernels` interface, through ctypes
huge_pages.py                                       memory for weights
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dashinfer_vlm_core import hookimpl
from dashinfer_vlm_core.kernels.devices import is_cpu

from .build import VARIANTS, Variant
from .package_digest import package_digest

if TYPE_CHECKING:
    import torch

    from dashinfer_vlm_core.kernels.choice import KernelFactory, LoadedKernels
    from dashinfer_vlm_core.text_spec import TextModelSpec


class NativeKernelFactory:
    """See `KernelFactory`. Text models whose layers have no fused C implementation use the individual kernels."""

    def __init__(self, variant: Variant, priority: int) -> None:
        self.name: str = variant.name
        self.priority = priority
        self._variant = variant

    def applies(self, device: str, dtype: torch.dtype) -> bool:
        return is_cpu(device) and str(dtype) == "torch.bfloat16"

    def unsupported_reason(self, text: TextModelSpec) -> str:
        head_dim = text.attention.head_dim
        if head_dim % 2 or text.hidden_size % 2:
            return f"they require an even head_dim and hidden_size, got {head_dim} and {text.hidden_size}"
        return ""

    def load(self, device: str) -> LoadedKernels:
        from .native import load_variant

        return load_variant(self._variant)

    def identity(self) -> str:
        return package_digest()


@hookimpl
def register_kernels(register: Callable[[KernelFactory], None]) -> None:
    for priority, variant in enumerate(reversed(VARIANTS), start=5):
        register(NativeKernelFactory(variant, priority))
