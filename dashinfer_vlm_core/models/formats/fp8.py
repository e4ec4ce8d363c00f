"""FP8 (e4m3) with a scale per block of weights, as Qwen and DeepSeek publish it, or with one scale per module.

No kernel multiplies FP8 weights here: they are dequantized when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .interface import ModuleReader, StoredBits, StoredMatrix, StoredWeight
from .options import UNQUANTIZED_STEP, check_value

if TYPE_CHECKING:
    import torch

    from ..headers import TensorHeader
    from ..json_fields import JsonFields
    from ..module_tensors import ModuleTensors

E4M3 = ("float8_e4m3fn",)
SCALES = ("weight_scale_inv", "weight_scale")
"""Names of the scales. Both multiply the weights, despite the name of the first."""


class Fp8Format:
    """See `CheckpointFormat`. Activations are not quantized, whatever `activation_scheme` is."""

    name = "fp8"

    def create_reader(self, config: JsonFields) -> ModuleReader:
        check_value(config, "fmt", ("e4m3",), default="e4m3")
        check_value(config, "scale_fmt", ("float",), default="float")
        return Fp8Reader(block=read_block(config, "weight_block_size"))


def read_block(config: JsonFields, name: str) -> tuple[int, int] | None:
    """Return the numbers of outputs and inputs that share a scale; None if a module has one scale, or one per output.

    Raises:
        CheckpointError: they are not two positive integers.
    """
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        config.fail(name, f"must be two positive integers, got {value!r}", UNQUANTIZED_STEP)
    return value[0], value[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Reader:
    """See `ModuleReader`.

    Attributes:
        block: see `read_block`.
    """

    block: tuple[int, int] | None
    name: str = Fp8Format.name
    markers: tuple[str, ...] = SCALES
    stored_bits: StoredBits = "none"

    def describe(self, headers: Mapping[str, TensorHeader]) -> StoredMatrix:
        return StoredMatrix(headers["weight"].numel if "weight" in headers else 0, "none")

    def read(self, tensors: ModuleTensors, shape: tuple[int, int], dtype: torch.dtype) -> StoredWeight:
        return read_fp8(tensors, shape, dtype, scales=_scales_name(tensors), block=self.block)

    def read_experts(self, tensors: ModuleTensors, into: torch.Tensor, *, transposed: bool) -> None:
        """See `ExpertsReader`."""
        from .packing import dequantize_fp8

        stored = into.transpose(1, 2) if transposed else into
        count, rows, columns = stored.shape
        block = self.block or into.shape[1:]
        if transposed:
            block = block[1], block[0]
        weight = tensors.load("weight", E4M3, stored.shape, device="cpu")
        grid = (count, -(-rows // block[0]), -(-columns // block[1]))
        scales = tensors.load(_scales_name(tensors), tensors.FLOATS, grid, device="cpu")
        for expert, factors, part in zip(weight, scales, stored, strict=True):
            dequantize_fp8(expert, factors, block, part)


def _scales_name(tensors: ModuleTensors) -> str:
    return next(name for name in SCALES if name in tensors)


def read_fp8(
    tensors: ModuleTensors, shape: tuple[int, int], dtype: torch.dtype, *, scales: str, block: tuple[int, int] | None
) -> torch.Tensor:
    """Dequantize the tensor `weight` of a module with the tensor `scales`; see `ModuleReader.read`.

    Without a `block`, the module has one scale, or one per output.
    """
    from ...kernels import mmap_buffer
    from .packing import dequantize_fp8

    outputs, inputs = shape
    weight = tensors.load("weight", E4M3, shape, device="cpu")
    stored = tensors.shape(scales)
    if block is not None:
        expected: tuple[int, ...] = (-(-outputs // block[0]), -(-inputs // block[1]))
    elif math.prod(stored) == 1:
        block, expected = shape, stored
    else:
        block, expected = (1, inputs), (outputs, 1)[: len(stored)]
    factors = tensors.load(scales, tensors.FLOATS, expected, device="cpu").reshape(-(-outputs // block[0]), -1)
    out = mmap_buffer.empty(shape, dtype)
    dequantize_fp8(weight, factors, block, out)
    return out.to(tensors.device)
