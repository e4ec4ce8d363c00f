"""Linear layers of the C kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dashinfer_vlm_core.concurrency.compute import CPU_EXECUTOR
from dashinfer_vlm_core.kernels.progressive import STEP_GROUP
from dashinfer_vlm_core.kernels.quantization import QuantizedWeight
from dashinfer_vlm_core.kernels.types import Activation

from . import huge_pages

PANEL = 32

BLOCK_WEIGHTS = 1 << 23
"""Weights that are packed at a time, in about 10 ms: a decode step of another model waits for them."""

PROGRESSIVE_BLOCK_WEIGHTS = BLOCK_WEIGHTS // 6
"""The same for weights that are rounded to 4 bits."""

MAX_SKIPPED_STEPS = 63
"""Maximum number of steps between two attempts to find the argmax without computing all logits: a failed attempt makes
the LM head two thirds more expensive."""

MAX_NORM = 1e18
"""Maximum norm of a row of weights; with larger ones, a logit could overflow float32."""

C_TYPES: dict[str, type[ctypes._SimpleCData[Any]]] = {
    "p": ctypes.c_void_p,
    "l": ctypes.c_int64,
    "i": ctypes.c_int32,
    "f": ctypes.c_float,
}
"""Letters of C types: pointer, long (int64), int (int32) and float."""


def fields(layout: str) -> list[tuple[str, type[ctypes._SimpleCData[Any]]]]:
    """Return the fields of a C struct from a layout such as `p data, l rows columns`, with the letters of `C_TYPES`."""
    groups = (group.split() for group in layout.split(","))
    return [(name, C_TYPES[letter]) for letter, *names in groups for name in names]


class Matrix(ctypes.Structure):
    """`Matrix` in C."""

    _fields_ = fields("p packed scales codes bias, l outputs inputs columns, i activation fp32_output group, p order")


class PackedWeights(NamedTuple):
    """Weights in the layout of the C kernels.

    Attributes:
        outputs: number of outputs, without padding.
        inputs: number of inputs.
        weights: the panels.
        scales: one scale per output of 4-bit and 8-bit weights.
        codes: the code tables of 12-bit weights.
        group: number of inputs of a group of 4-bit weights; `STEP_GROUP` if their scales are integer steps.
        order: int32 [inputs], as in `QuantizedWeight`.
    """

    outputs: int
    inputs: int
    weights: Tensor
    scales: Tensor | None = None
    codes: Tensor | None = None
    group: int = 0
    order: Tensor | None = None


class NativeLinear:
    """A linear layer with weights in panels.

    They are bfloat16, losslessly compressed to 12 bits where possible; or they have 8 bits, with one scale per output;
    or 4 bits, see `int4.h` and `progressive.h`. For 8 and 4 bits, activations are quantized to 8 bits, with one scale
    per 128 inputs.

    Args:
        library: the C functions.
        weight: bfloat16 [outputs, inputs]; quantized weights, which have been checked and have 4 bits or are
            `is_symmetric_int8`; or those of a layer that was stored.
        bias: bfloat16 [outputs].
        activation: the activation to apply to the output.
        fp32_output: return float32.
        bits: 16 keeps bfloat16 weights, 8 and 4 round them, 4 as `ProgressiveWeight`.

    Attributes:
        packed: its weights.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor | QuantizedWeight | PackedWeights,
        bias: Tensor | None,
        activation: Activation,
        fp32_output: bool,
        *,
        bits: int = 16,
    ) -> None:
        self._library = library
        gated = activation is Activation.SILU_GATE
        self.packed: PackedWeights = (
            weight if isinstance(weight, PackedWeights) else self._pack(weight, gated=gated, bits=bits)
        )
        packed = self.packed
        self.inputs: int = packed.inputs
        self.columns: int = packed.outputs // 2 if gated else packed.outputs
        self._bias = bias
        self.matrix: Matrix = Matrix(
            *map(_address, (packed.weights, packed.scales, packed.codes, bias)), packed.outputs, packed.inputs,
            self.columns, activation, fp32_output, packed.group, _address(packed.order),
        )  # fmt: skip

    def __call__(self, x: Tensor, row_bias: Tensor | None = None) -> Tensor:
        out = torch.empty(len(x), self.columns, dtype=torch.float32 if self.matrix.fp32_output else torch.bfloat16)
        self._run(x, out, row_bias, add=False)
        return out

    def add_to(self, total: Tensor, x: Tensor, row_bias: Tensor | None = None) -> None:
        assert total.dtype == torch.bfloat16
        assert total.stride(1) == 1
        assert not self.matrix.fp32_output
        assert self.matrix.activation == Activation.NONE
        self._run(x, total, row_bias, add=True)

    def argmax(self, x: Tensor) -> Tensor | None:
        """See `LMHead`; None if the largest output of a row is not finite, or if any output is NaN.

        One call to C: several of PyTorch's operators take a few percent of a decode step, since their code is not in
        the caches after all weights were read.
        """
        assert self.matrix.fp32_output
        results = self(x)
        columns = torch.empty(len(x), dtype=torch.int64)
        found = self._library.largest_tokens(
            results.data_ptr(), results.stride(0), len(x), self.columns, columns.data_ptr(), torch.get_num_threads()
        )
        return columns if found else None

    def workspace_bytes(self, rows: int) -> int:
        """Return the number of workspace bytes for `rows` rows."""
        return int(self._library.linear_workspace_size(ctypes.byref(self.matrix), rows, torch.get_num_threads()))

    @property
    def workspace_key(self) -> tuple[int, bool, int]:
        """What `workspace_bytes` depends on, in addition to the rows and threads."""
        return self.inputs, self.matrix.scales is None, self.matrix.group

    def _run(self, x: Tensor, out: Tensor, row_bias: Tensor | None, *, add: bool) -> None:
        if not len(x):
            return  # the address of an empty tensor is 0
        assert x.stride(1) == 1
        assert row_bias is None or (row_bias.is_contiguous() and row_bias.shape[1] == self.matrix.outputs)
        workspace = torch.empty(self.workspace_bytes(len(x)), dtype=torch.uint8)
        bias, biased_rows = (None, 0) if row_bias is None else (row_bias.data_ptr(), len(row_bias))
        self._library.linear_biased(
            ctypes.byref(self.matrix), x.data_ptr(), x.stride(0), len(x), out.data_ptr(), out.stride(0), add,
            bias, biased_rows, workspace.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip

    def _pack(self, weight: Tensor | QuantizedWeight, *, gated: bool, bits: int) -> PackedWeights:
        if not isinstance(weight, QuantizedWeight):
            pack = {4: self._pack_progressive, 8: self._pack_int8, 16: self._pack_bf16}[bits]
            return pack(weight, gated)
        return self._pack_int4(weight, gated) if weight.bits == 4 else self._pack_int8_codes(weight, gated)

    def _pack_bf16(self, weight: Tensor, gated: bool) -> PackedWeights:
        outputs, inputs = weight.shape
        threads = torch.get_num_threads()
        packed = huge_pages.empty(_padded(outputs) * inputs // 2 * 3, torch.uint8)
        codes = huge_pages.empty(_padded(outputs) // PANEL * self._library.codes_size(inputs), torch.uint8)
        scratch = torch.empty(threads * PANEL * inputs, dtype=torch.bfloat16)  # a panel for each thread
        for first, end in _blocks(outputs, inputs):
            if not self._library.pack_codes(
                weight.data_ptr(), outputs, inputs, gated, scratch.data_ptr(), packed.data_ptr(), codes.data_ptr(),
                first, end, threads,
            ):  # fmt: skip
                return PackedWeights(outputs, inputs, self._panels(weight, gated))
        return PackedWeights(outputs, inputs, packed, codes=codes)

    def _panels(self, weight: Tensor, gated: bool) -> Tensor:
        outputs, inputs = weight.shape
        panels = huge_pages.empty(_padded(outputs) * inputs, torch.bfloat16)
        for first, end in _blocks(outputs, inputs):
            self._library.pack_bf16(
                weight.data_ptr(), outputs, inputs, gated, panels.data_ptr(), first, end, torch.get_num_threads()
            )
        return panels

    def _pack_int8(self, weight: Tensor, gated: bool) -> PackedWeights:
        outputs, inputs = weight.shape
        packed = huge_pages.empty(_padded(outputs) * inputs, torch.uint8)
        scales = torch.empty(_padded(outputs), dtype=torch.float32)
        for first, end in _blocks(outputs, inputs):
            self._library.pack_int8(
                weight.data_ptr(), outputs, inputs, gated, packed.data_ptr(), scales.data_ptr(), first, end,
                torch.get_num_threads(),
            )  # fmt: skip
        return PackedWeights(outputs, inputs, packed, scales)

    def _pack_progressive(self, weight: Tensor, gated: bool) -> PackedWeights:
        outputs, inputs = weight.shape
        packed = huge_pages.empty(self._library.progressive_size(outputs, inputs), torch.uint8).zero_()
        scales = torch.empty(_padded(outputs), dtype=torch.float32)
        for first, end in _blocks(outputs, inputs, PROGRESSIVE_BLOCK_WEIGHTS):
            self._library.pack_progressive(
                weight.data_ptr(), outputs, inputs, gated, packed.data_ptr(), scales.data_ptr(), first, end,
                torch.get_num_threads(),
            )  # fmt: skip
        return PackedWeights(outputs, inputs, packed, scales, group=STEP_GROUP)

    def _pack_int8_codes(self, weight: QuantizedWeight, gated: bool) -> PackedWeights:
        outputs, inputs = weight.codes.shape
        codes = weight.codes.contiguous()
        row_scales = weight.scales.float().contiguous()
        packed = huge_pages.empty(_padded(outputs) * inputs, torch.uint8)
        scales = torch.empty(_padded(outputs), dtype=torch.float32)
        for first, end in _blocks(outputs, inputs):
            self._library.pack_int8_codes(
                codes.data_ptr(), row_scales.data_ptr(), outputs, inputs, gated, packed.data_ptr(), scales.data_ptr(),
                first, end, torch.get_num_threads(),
            )  # fmt: skip
        return PackedWeights(outputs, inputs, packed, scales)

    def _pack_int4(self, weight: QuantizedWeight, gated: bool) -> PackedWeights:
        # A group's scale is stored as fp16, relative to a power of two for its output: this is exact for scales of fp16
        # and bfloat16 unless those of an output differ by more than a factor of 2^14.
        outputs, inputs = weight.codes.shape
        codes = weight.codes.contiguous()
        zeros = weight.zeros.contiguous()
        scales = weight.scales.float()
        exponents = torch.frexp(scales.abs().amax(dim=1)).exponent
        relative = torch.ldexp(scales, -exponents[:, None]).half().contiguous()
        row_scales = torch.ldexp(torch.ones(outputs), exponents)
        packed = huge_pages.empty(self._library.int4_size(outputs, inputs, weight.group), torch.uint8).zero_()
        column_scales = torch.empty(_padded(outputs), dtype=torch.float32)
        for first, end in _blocks(outputs, inputs):
            self._library.pack_int4(
                codes.data_ptr(), relative.data_ptr(), zeros.data_ptr(), row_scales.data_ptr(), outputs, inputs,
                weight.group, gated, packed.data_ptr(), column_scales.data_ptr(), first, end, torch.get_num_threads(),
            )  # fmt: skip
        order = None if weight.order is None else weight.order.to(torch.int32).contiguous()
        return PackedWeights(outputs, inputs, packed, column_scales, group=weight.group, order=order)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class PackedHead(NamedTuple):
    """An LM head in the layout of the C kernels.

    Attributes:
        exact: its weights.
        int8: these in 8 bits.
        bounds: float32 [2, outputs], the norms of the weights and of their rounding errors.
    """

    exact: PackedWeights
    int8: PackedWeights
    bounds: Tensor


class ArgmaxBounds(ctypes.Structure):
    """`ArgmaxBounds` in C."""

    _fields_ = fields("p exact quantized norms errors")


class NativeLMHead(NativeLinear):
    """An LM head that also holds its weights in 8 bits, to find the argmax at two thirds of the cost.

    The 8-bit weights are read instead of the original ones, which are used only for the columns that remain ambiguous:
    the argmax is exactly that of all logits. See `argmax_columns` in C.
    """

    def __init__(self, library: ctypes.CDLL, weight: Tensor | PackedHead) -> None:
        exact = weight.exact if isinstance(weight, PackedHead) else weight
        codes = weight.int8 if isinstance(weight, PackedHead) else weight
        super().__init__(library, exact, None, Activation.NONE, fp32_output=True)
        self._int8 = NativeLinear(library, codes, None, Activation.NONE, fp32_output=True, bits=8)
        bounds = weight.bounds if isinstance(weight, PackedHead) else self._compute_bounds(weight)
        self.packed_head: PackedHead = PackedHead(self.packed, self._int8.packed, bounds)
        self._argmax_bounds = ArgmaxBounds(
            ctypes.addressof(self.matrix), ctypes.addressof(self._int8.matrix), *(bound.data_ptr() for bound in bounds)
        )
        self._bounds_are_finite = bool((bounds < MAX_NORM).all())
        self._misses = self._steps_to_skip = 0

    def _compute_bounds(self, weight: Tensor) -> Tensor:
        outputs, inputs = weight.shape
        bounds = torch.empty(2, outputs, dtype=torch.float32)
        norms, errors = (bound.data_ptr() for bound in bounds)
        for first, end in _blocks(outputs, inputs):
            rows = weight[first * PANEL : end * PANEL]
            offset = first * PANEL * bounds.itemsize
            self._library.compute_argmax_bounds(
                rows.data_ptr(), len(rows), inputs, self._int8.matrix.scales + offset, norms + offset, errors + offset,
                torch.get_num_threads(),
            )  # fmt: skip
        return bounds

    def argmax(self, x: Tensor) -> Tensor | None:
        """See `LMHead`. After failed attempts, it skips a growing number of steps."""
        if not self._bounds_are_finite:
            return None
        if self._steps_to_skip:
            self._steps_to_skip -= 1
            return None
        columns = self._argmax(x)
        self._misses = 0 if columns is not None else self._misses + 1
        self._steps_to_skip = min(2**self._misses - 1, MAX_SKIPPED_STEPS)
        return columns

    def _argmax(self, x: Tensor) -> Tensor | None:
        assert x.stride(1) == 1
        columns = torch.empty(len(x), dtype=torch.int64)
        workspace = torch.empty(
            self._library.argmax_workspace_size(len(x), self.inputs, self.columns), dtype=torch.uint8
        )
        self._library.argmax_columns(
            ctypes.byref(self._argmax_bounds), x.data_ptr(), x.stride(0), len(x), columns.data_ptr(),
            workspace.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return None if bool((columns < 0).any()) else columns


def _padded(outputs: int) -> int:
    return -(-outputs // PANEL) * PANEL


def _blocks(outputs: int, inputs: int, weights: int = BLOCK_WEIGHTS) -> Iterator[tuple[int, int]]:
    """Divide the panels of a matrix into blocks, between which other tasks run: the first and the end of each."""
    panels = _padded(outputs) // PANEL
    step = max(1, weights // (PANEL * inputs))
    for first in range(0, panels, step):
        yield first, min(first + step, panels)
        CPU_EXECUTOR.pause()
