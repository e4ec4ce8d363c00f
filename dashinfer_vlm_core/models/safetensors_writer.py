"""Write safetensors files tensor by tensor, so that only one of them is in memory.

The format: the length of the header in 8 bytes, little-endian; the header, a JSON object with type, shape and offsets
of each tensor; the tensors (https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""The format's names of data types."""

HEADER_ALIGNMENT = 8
"""Tensors begin at a multiple of 8 bytes, as in files of the safetensors library."""


class TensorInfo(NamedTuple):
    """A tensor to be written.

    Attributes:
        name: its name.
        dtype: its data type, one of `DTYPES`.
        shape: its shape.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in the file, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(path: Path, infos: Sequence[TensorInfo], tensors: Iterable[Tensor]) -> None:
    """Write a new file.

    Args:
        path: the file, which must not exist.
        infos: all its tensors, in the order of `tensors`.
        tensors: CPU tensors, each of which is written before the next one is requested.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    with path.open("xb") as file:
        file.write(_header(infos))
        iterator = iter(tensors)
        for info in infos:  # unlike `zip`, this does not keep a tensor while the next one is computed
            file.write(_content(info, next(iterator)))
        assert next(iterator, None) is None


def _content(info: TensorInfo, tensor: Tensor) -> memoryview:
    assert (tensor.dtype, tuple(tensor.shape)) == info[1:], info
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _header(infos: Sequence[TensorInfo]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    offset = 0
    for info in infos:
        entries[info.name] = {
            "dtype": DTYPES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offset, offset + info.nbytes],
        }
        offset += info.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % HEADER_ALIGNMENT)
    return len(header).to_bytes(8, "little") + header
