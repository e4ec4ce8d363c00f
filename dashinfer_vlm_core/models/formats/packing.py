"""Unpack quantized weights, exactly as stored; formats differ in the order of the bits and in the zero points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels import mmap_buffer
from ...kernels.quantization import GROUPS, QuantizedWeight

if TYPE_CHECKING:
    from ..module_tensors import ModuleTensors

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each of the eight codes of an int32, from its lowest four bits on, in AutoAWQ's GEMM layout."""

FP8_ROWS_ELEMENTS = 1 << 20
"""Number of FP8 weights that are dequantized together, to limit the memory for intermediate results."""


def unpack_rows(packed: Tensor, bits: int) -> Tensor:
    """Unpack int32 [rows, columns * bits / 32], low bits first, to uint8 [rows, columns], with 4 or 8 bits."""
    stored = _rows_of_bytes(packed)
    if bits == 8:
        return stored
    codes = mmap_buffer.empty([stored.shape[0], 2 * stored.shape[1]], torch.uint8, stored.device)
    pairs = codes.view(torch.int16)
    pairs.copy_(stored)
    pairs |= pairs << 4
    pairs &= 0x0F0F
    return codes


def unpack_awq(packed: Tensor) -> Tensor:
    """Unpack int32 [rows, columns / 8] in the order `AWQ_COLUMNS` to uint8 [columns, rows]: transposed."""
    stored = torch.unflatten(_rows_of_bytes(packed.T), 1, (-1, 4))
    codes = mmap_buffer.empty([len(stored), 8, stored.shape[1]], torch.uint8, stored.device)
    for place, column in enumerate(AWQ_COLUMNS):
        byte = stored[:, :, place // 2]
        codes[:, column] = byte >> 4 if place % 2 else byte & 15
    return codes.flatten(0, 1)


def _rows_of_bytes(packed: Tensor) -> Tensor:
    # Flat, since a tensor of one column can be contiguous with another stride than 1.
    return packed.contiguous().view(-1).view(torch.uint8).view(len(packed), -1)


def signed_to_unsigned(codes: Tensor, bits: int) -> Tensor:
    """Convert int8 codes of 4 or 8 bits to uint8 with half of the range added."""
    return codes.view(torch.uint8) + (1 << (bits - 1))  # modulo 256


def quantized_weight(
    codes: Tensor, scales: Tensor, zeros: Tensor, group: int, *, bits: int, order: Tensor | None = None
) -> QuantizedWeight:
    """Create weights whose groups kernels can use.

    With 4 bits, larger groups are split into groups of 128, 64 or 32 inputs with the same scale and zero point.

    Args:
        codes: uint8 [outputs, inputs].
        scales: [outputs, groups], any float dtype.
        zeros: [outputs, groups], any integer dtype.
        group: number of inputs of a group; a multiple of 32, or at least the number of inputs.
        bits: 4 or 8.
        order: as in `QuantizedWeight`.
    """
    inputs = codes.shape[1]
    scales = scales.float()
    zeros = zeros.to(torch.uint8 if bits == 4 else torch.int16)
    size = min(group, inputs)
    repeats = 1
    if bits == 4:
        size = max(GROUPS) if group >= inputs else max(size for size in GROUPS if group % size == 0)
        repeats = -(-min(group, inputs) // size)
    count = -(-inputs // size)
    # Copied, since callers may scale them: stored ones are a read-only mapping of the file.
    scales, zeros = (
        part.repeat_interleave(repeats, dim=1)[:, :count].clone(memory_format=torch.contiguous_format)
        for part in (scales, zeros)
    )
    return QuantizedWeight(codes, scales, zeros, size, order, bits)


def load_order(tensors: ModuleTensors, name: str, group: int, shape: tuple[int, int]) -> Tensor | None:
    """Load the group of each input; return the order that sorts the inputs by group, or None if they are sorted.

    Args:
        tensors: the module's stored tensors.
        name: the name of the tensor.
        group: number of inputs of a group.
        shape: numbers of outputs and inputs.

    Raises:
        CheckpointError: the tensor is missing, or the groups do not have `group` inputs.
    """
    inputs = shape[1]
    groups = -(-inputs // group)
    numbers = tensors.load(name, ("int32", "int64"), (inputs,)).long()
    if bool(((numbers < 0) | (numbers >= groups)).any()):
        tensors.fail(name, f"has values outside of 0 to {groups - 1}, the numbers of the groups")
    if bool((numbers.bincount(minlength=groups)[:-1] != group).any()):
        tensors.fail(name, f"has groups that do not consist of {group} inputs, the `group_size`")
    is_sorted = bool((numbers[1:] >= numbers[:-1]).all())
    return None if is_sorted else numbers.argsort(stable=True)


def dequantize_fp8(weight: Tensor, scales: Tensor, block: Sequence[int], into: Tensor) -> None:
    """Multiply FP8 weights by their scales, in float32.

    Args:
        weight: [rows, columns], as stored.
        scales: [ceil(rows / block[0]), ceil(columns / block[1])], any float dtype.
        block: numbers of rows and columns that share a scale.
        into: [rows, columns], which gets the products in its dtype; may be a view.
    """
    count, columns = weight.shape
    rows = max(1, FP8_ROWS_ELEMENTS // columns // block[0]) * block[0]
    # In mapped memory and in place: the allocator would keep most of the memory of intermediate results.
    buffer = mmap_buffer.empty([min(rows, count), columns], torch.float32)
    for start in range(0, count, rows):
        stop = min(start + rows, count)
        products = buffer[: stop - start].copy_(weight[start:stop])
        factors = scales[start // block[0] : -(-stop // block[0])].float().repeat_interleave(block[0], dim=0)
        for column in range(factors.shape[1]):
            products[:, column * block[1] : (column + 1) * block[1]] *= factors[: stop - start, column : column + 1]
        into[start:stop] = products
