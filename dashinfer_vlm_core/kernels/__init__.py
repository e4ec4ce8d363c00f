"""The arithmetic that tower and decoder share: linear layers, norms, rotary positions, attention.

Implementations of one protocol: `plain`, in PyTorch, for any device; `native`, in C, for CPUs with AVX-512 BF16, with
or without AMX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .choice import choose_kernels
    from .types import Activation, DecoderLayer, DecoderLayers, DecoderShape, Head, Kernels, Linear, Pass, Span, Spans

__all__ = [
    "Activation", "DecoderLayer", "DecoderLayers", "DecoderShape", "Head", "Kernels", "Linear", "Pass", "Span", "Spans",
    "choose_kernels",
]  # fmt: skip

# Names are imported on use: what the processor can do is asked without torch.


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = "choice" if name == "choose_kernels" else "types"
        return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
