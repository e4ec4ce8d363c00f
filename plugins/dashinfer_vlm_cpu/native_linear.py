"""Linear layers of the kernels in C."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dashinfer_vlm_core.kernels import mmap_buffer
from dashinfer_vlm_core.kernels.types import Activation

from . import huge_pages

PANEL = 32

LONGEST_PAUSE = 63
"""Steps between two attempts to find the largest result without computing all: in vain, it costs two thirds more."""

LARGEST_NORM = 1e18
"""Of weights; with larger ones, a result could leave the range of float32."""

_INT, _LONG, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class Matrix(ctypes.Structure):
    """`Matrix` in C."""

    _fields_ = (
        ("packed", _POINTER), ("scales", _POINTER), ("codes", _POINTER), ("bias", _POINTER), ("outputs", _LONG),
        ("inputs", _LONG), ("columns", _LONG), ("activation", _INT), ("fp32_output", _INT),
    )  # fmt: skip


class PackedWeights(NamedTuple):
    """Weights as C wants them.

    Attributes:
        weights: in panels.
        scales: of 8-bit weights.
        codes: of 12-bit weights.
    """

    weights: Tensor
    scales: Tensor | None = None
    codes: Tensor | None = None


class NativeLinear:
    """bfloat16 weights in panels: of 12 bits, from which C restores all 16; where that cannot be, of 16."""

    def __init__(
        self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None, activation: Activation, fp32_output: bool
    ) -> None:
        self._library = library
        outputs, inputs = weight.shape
        gated = activation is Activation.SILU_GATE
        self.columns: int = outputs // 2 if gated else outputs
        self.inputs = inputs
        assert not gated or bias is None
        self._kept = (*self._pack(weight, gated), bias)
        self.matrix: Matrix = Matrix(
            *(None if kept is None else kept.data_ptr() for kept in self._kept), outputs, inputs, self.columns,
            activation, fp32_output,
        )  # fmt: skip

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(len(x), self.columns, dtype=torch.float32 if self.matrix.fp32_output else torch.bfloat16)
        self._run(x, out, add=False)
        return F.gelu(out) if self.matrix.activation == Activation.GELU else out

    def add_to(self, total: Tensor, x: Tensor) -> None:
        self._run(x, total, add=True)

    def workspace_bytes(self, rows: int) -> int:
        """Bytes of scratch memory that so many rows need."""
        return int(self._library.linear_space(ctypes.byref(self.matrix), rows, torch.get_num_threads()))

    def _pack(self, weight: Tensor, gated: bool) -> PackedWeights:
        panels = self._panels(weight, gated)
        outputs, inputs = weight.shape
        packed = huge_pages.empty(len(panels) // 2 * 3, torch.uint8)
        codes = huge_pages.empty(_padded(outputs) // PANEL * self._library.codes_space(inputs), torch.uint8)
        coded = self._library.pack_codes(
            panels.data_ptr(), outputs, inputs, packed.data_ptr(), codes.data_ptr(), torch.get_num_threads()
        )  # fmt: skip
        if coded:
            return PackedWeights(packed, codes=codes)
        return PackedWeights(huge_pages.empty(len(panels), panels.dtype).copy_(panels))

    def _panels(self, weight: Tensor, gated: bool) -> Tensor:
        """All 16 bits."""
        outputs, inputs = weight.shape
        panels = mmap_buffer.empty([_padded(outputs) * inputs], torch.bfloat16)
        self._library.pack_bf16(weight.data_ptr(), outputs, inputs, gated, panels.data_ptr(), torch.get_num_threads())
        return panels

    def _run(self, x: Tensor, out: Tensor, *, add: bool) -> None:
        assert x.stride(1) == 1
        space = torch.empty(self.workspace_bytes(len(x)), dtype=torch.uint8)
        self._library.linear(
            ctypes.byref(self.matrix), x.data_ptr(), x.stride(0), len(x), out.data_ptr(), out.stride(0), add,
            space.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip


class NativeInt8Linear(NativeLinear):
    """Weights of 8 bits in panels, one scale per output; activations get 8 bits and a scale per 128 inputs."""

    def _pack(self, weight: Tensor, gated: bool) -> PackedWeights:
        outputs, inputs = weight.shape
        packed = huge_pages.empty(_padded(outputs) * inputs, torch.uint8)
        scales = torch.empty(_padded(outputs), dtype=torch.float32)
        self._library.pack_int8(
            weight.data_ptr(), outputs, inputs, gated, packed.data_ptr(), scales.data_ptr(), torch.get_num_threads()
        )
        return PackedWeights(packed, scales)


class ArgmaxBounds(ctypes.Structure):
    """`Screen` in C."""

    _fields_ = (("exact", _POINTER), ("rough", _POINTER), ("norms", _POINTER), ("errors", _POINTER))


class NativeLMHead(NativeLinear):
    """An output layer that also holds its weights in 8 bits, to find the largest result at two thirds of the cost.

    They are read in place of the others, which only confirm what the 8 bits leave open: the largest is that of all
    results, to the bit. See `largest_columns` in C.
    """

    def __init__(self, library: ctypes.CDLL, weight: Tensor) -> None:
        super().__init__(library, weight, None, Activation.NONE, fp32_output=True)
        outputs, inputs = weight.shape
        self._rough = NativeInt8Linear(library, weight, None, Activation.NONE, fp32_output=True)
        self._bounds = torch.empty(2, outputs, dtype=torch.float32)
        norms, errors = (bound.data_ptr() for bound in self._bounds)
        library.screen_bounds(
            weight.data_ptr(), outputs, inputs, self._rough.matrix.scales, norms, errors, torch.get_num_threads()
        )
        self._screen = ArgmaxBounds(ctypes.addressof(self.matrix), ctypes.addressof(self._rough.matrix), norms, errors)
        self._sound = bool((self._bounds < LARGEST_NORM).all())
        self._misses = self._pause = 0

    def argmax(self, x: Tensor) -> Tensor | None:
        """See `Head`. Where it was in vain, it is tried more and more rarely."""
        if not self._sound:
            return None
        if self._pause:
            self._pause -= 1
            return None
        best = self._argmax(x)
        self._misses = 0 if best is not None else self._misses + 1
        self._pause = min(2**self._misses - 1, LONGEST_PAUSE)
        return best

    def _argmax(self, x: Tensor) -> Tensor | None:
        assert x.stride(1) == 1
        best = torch.empty(len(x), dtype=torch.int64)
        space = torch.empty(self._library.largest_space(len(x), self.inputs, self.columns), dtype=torch.uint8)
        self._library.largest_columns(
            ctypes.byref(self._screen), x.data_ptr(), x.stride(0), len(x), best.data_ptr(), space.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return None if bool((best < 0).any()) else best


def _padded(outputs: int) -> int:
    """Columns of whole panels."""
    return -(-outputs // PANEL) * PANEL
