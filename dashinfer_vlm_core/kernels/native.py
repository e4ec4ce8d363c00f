"""Kernels in C (`avx512.c`), called through ctypes. A row's result is the same to the bit in any company."""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import EngineConfig
from .build import BuildError, build
from .plain import Plain
from .turns import CPU_TURNS
from .types import Activation, Linear, Spans

PANEL = 32
QUANT_BLOCK = 128

MOST_SHARING = 192
"""Heads that share keys: their queries of one token are worked on together."""

_INT, _LONG, _FLOAT, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

SIGNATURES = {
    "pack_bf16": (_POINTER, _LONG, _LONG, _INT, _POINTER, _INT),
    "pack_int8": (_POINTER, _LONG, _LONG, _INT, _POINTER, _POINTER, _INT),
    "linear_bf16": (_POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _POINTER, _INT),
    "linear_int8": (_POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _INT),
    "norm_bf16": (_POINTER, _LONG, _POINTER, _POINTER, _FLOAT, _POINTER, _LONG, _LONG, _INT),
    "rotate_bf16": (_POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, _LONG, _INT),
    "attend_bf16": (_POINTER, _POINTER, _LONG, _POINTER, _INT),
}


class Ending(ctypes.Structure):
    """`Ending` in C."""

    _fields_ = (
        ("bias", _POINTER), ("out", _POINTER), ("stride", _LONG), ("columns", _LONG), ("activation", _INT),
        ("add", _INT), ("wide", _INT),
    )  # fmt: skip


class Quantised(ctypes.Structure):
    """`Quantised` in C."""

    _fields_ = (("bytes", _POINTER), ("scales", _POINTER), ("offsets", _POINTER))


class Heads(ctypes.Structure):
    """`Heads` in C."""

    _fields_ = (
        ("q", _POINTER), ("k", _POINTER), ("v", _POINTER), ("out", _POINTER), ("q_token", _LONG), ("q_head", _LONG),
        ("kv_token", _LONG), ("kv_head", _LONG), ("out_token", _LONG), ("heads", _LONG), ("kv_heads", _LONG),
        ("width", _LONG), ("scale", _FLOAT),
    )  # fmt: skip


class Native:
    """See `Kernels`. For bfloat16 on a CPU; widths of inputs are even."""

    name = "native"
    quantises = True
    turn: AbstractContextManager[None] = CPU_TURNS

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        activation: Activation = Activation.NONE,
        wide: bool = False,
        int8: bool = False,
    ) -> Linear:
        if weight.shape[1] % 4:  # four inputs of a weight stand side by side
            return Plain("cpu").linear(weight, bias, activation=activation, wide=wide)
        made = _Int8Linear if int8 else _Linear
        return made(self._library, weight.contiguous(), bias, activation, wide)

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        rows, columns = x.shape
        assert x.stride(1) == 1
        out = torch.empty(rows, columns, dtype=x.dtype)
        shift = None if bias is None else bias.data_ptr()
        self._library.norm_bf16(
            x.data_ptr(), x.stride(0), weight.data_ptr(), shift, eps, out.data_ptr(), rows, columns, _threads()
        )
        return out

    def rotate_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        rows, heads, width = x.shape
        assert x.stride()[1:] == (width, 1)
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        self._library.rotate_bf16(
            x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), rows, heads, width // 2, _threads()
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> Tensor:
        rows, heads, width = q.shape
        assert k.stride() == v.stride()
        assert q.stride(2) == k.stride(2) == 1
        if width % 2 or heads > MOST_SHARING * len(k):
            return Plain("cpu").attend(q, k, v, spans)
        out = torch.empty(rows, heads * width, dtype=q.dtype)
        threads = _threads()
        space = torch.empty(threads * self._library.attend_space(width), dtype=torch.uint8)
        description = Heads(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), q.stride(0), q.stride(1), k.stride(1),
            k.stride(0), heads * width, heads, len(k), width, width**-0.5,
        )  # fmt: skip
        table = spans.table
        self._library.attend_bf16(ctypes.byref(description), table.data_ptr(), len(table), space.data_ptr(), threads)
        return out


class _Linear:
    """bfloat16 weights in panels."""

    def __init__(
        self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None, activation: Activation, wide: bool
    ) -> None:
        self._library = library
        self._bias = bias
        self._activation = activation
        self._wide = wide
        self._outputs, self._inputs = weight.shape
        gated = activation is Activation.SILU_GATE
        self._columns = self._outputs // 2 if gated else self._outputs
        assert not gated or bias is None
        self._pack(weight, gated)

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(len(x), self._columns, dtype=torch.float32 if self._wide else torch.bfloat16)
        self._run(x, self._ending(out, add=False))
        return F.gelu(out) if self._activation is Activation.GELU else out

    def add_to(self, total: Tensor, x: Tensor) -> None:
        self._run(x, self._ending(total, add=True))

    def _ending(self, out: Tensor, *, add: bool) -> Ending:
        bias = None if self._bias is None else self._bias.data_ptr()
        return Ending(bias, out.data_ptr(), out.stride(0), self._columns, self._activation, add, self._wide)

    def _pack(self, weight: Tensor, gated: bool) -> None:
        panels = -(-self._outputs // PANEL)
        self._packed = torch.empty(panels * PANEL * self._inputs, dtype=torch.bfloat16)
        self._library.pack_bf16(
            weight.data_ptr(), self._outputs, self._inputs, gated, self._packed.data_ptr(), _threads()
        )

    def _run(self, x: Tensor, ending: Ending) -> None:
        assert x.stride(1) == 1
        self._library.linear_bf16(
            x.data_ptr(), x.stride(0), self._packed.data_ptr(), len(x), self._outputs, self._inputs,
            ctypes.byref(ending), _threads(),
        )  # fmt: skip


class _Int8Linear(_Linear):
    """Weights of 8 bits in panels, one scale per output; activations get 8 bits and a scale per 128 inputs."""

    def _pack(self, weight: Tensor, gated: bool) -> None:
        panels = -(-self._outputs // PANEL)
        self._packed = torch.empty(panels * PANEL * self._inputs, dtype=torch.uint8)
        self._scales = torch.empty(panels * PANEL, dtype=torch.float32)
        self._library.pack_int8(
            weight.data_ptr(), self._outputs, self._inputs, gated, self._packed.data_ptr(), self._scales.data_ptr(),
            _threads(),
        )  # fmt: skip

    def _run(self, x: Tensor, ending: Ending) -> None:
        assert x.stride(1) == 1
        rows, blocks = len(x), -(-self._inputs // QUANT_BLOCK)
        data = torch.empty(rows, self._inputs, dtype=torch.int8)
        scales = torch.empty(2, rows, blocks, dtype=torch.float32)  # the second half holds int32 offsets
        space = Quantised(data.data_ptr(), scales[0].data_ptr(), scales[1].data_ptr())
        self._library.linear_int8(
            x.data_ptr(), x.stride(0), self._packed.data_ptr(), self._scales.data_ptr(), rows, self._outputs,
            self._inputs, ctypes.byref(space), ctypes.byref(ending), _threads(),
        )  # fmt: skip


class Loaded(NamedTuple):
    """The kernels, or why there are none."""

    kernels: Native | None
    reason: str


_LOADING = threading.Lock()


def load_native(config: EngineConfig) -> Loaded:
    """The kernels in C, compiled into the cache of `config` where they are not there yet: that takes seconds.

    Whoever asks meanwhile waits for that.
    """
    with _LOADING:  # a cache alone would let two that ask at once compile twice
        return _load(config)


@functools.cache
def _load(config: EngineConfig) -> Loaded:
    missing = [name for name in ("avx512_bf16", "avx512_vnni") if name not in cpu_flags()]
    if missing:
        return Loaded(None, f"this CPU has no {' and no '.join(missing)}")
    try:
        library = ctypes.CDLL(str(build(Path(__file__).with_name("avx512.c"), config.cache_folder / "kernels")))
    except (BuildError, OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        return Loaded(None, str(error))
    for name, types in SIGNATURES.items():
        getattr(library, name).argtypes = types
        getattr(library, name).restype = None
    library.attend_space.argtypes, library.attend_space.restype = (_LONG,), _LONG
    return Loaded(Native(library), "")


def cpu_flags() -> frozenset[str]:
    """The processor's features in Linux's words; empty where they cannot be known."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def _threads() -> int:
    return torch.get_num_threads()
