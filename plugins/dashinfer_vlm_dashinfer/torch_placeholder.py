"""The part of torch and safetensors that a conversion by DashInfer uses, in numpy, without quantization. In an
environment without torch, `serialize.py` installs this module as `torch` and as `safetensors`.

It contains the names that `dashinfer.allspark` uses during its import, and those that its Qwen2 converter calls. Any
other name raises an AttributeError, and the conversion fails. This file imports only numpy.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import struct
import types
from typing import Any, Iterator, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Data types are their names: DashInfer compares them, and looks them up in a table.
dtype = str
float64 = "torch.float64"
float32 = "torch.float32"
float16 = "torch.float16"
bfloat16 = "torch.bfloat16"
float8_e4m3fn = "torch.float8_e4m3fn"
uint8 = "torch.uint8"
int64 = "torch.int64"
int32 = "torch.int32"
int16 = "torch.int16"
int8 = "torch.int8"

STORED = {"F64": (float64, "<f8"), "F32": (float32, "<f4"), "F16": (float16, "<f2"), "BF16": (bfloat16, "<u2")}
"""The data types of safetensors, as ours and as numpy's. bfloat16, which numpy lacks, is read as its bits."""


class Tensor:
    """An array, of bits for bfloat16; empty by default."""

    def __init__(self, values: Array | int, kind: str = float32) -> None:
        self.values = np.zeros(values, np.float32) if isinstance(values, int) else values
        self.dtype = kind
        self.shape = self.values.shape

    def numpy(self) -> Array:
        return self.values

    def cpu(self) -> Tensor:
        return self

    def contiguous(self) -> Tensor:
        return Tensor(np.ascontiguousarray(self.values), self.dtype)

    def to(self, target: str) -> Tensor:
        """Convert it to another data type, as torch does; `target` may also be the device `cpu`."""
        if target in ("cpu", self.dtype):
            return self
        if self.dtype == bfloat16:
            wide = (self.values.astype(np.uint32) << 16).view(np.float32)
        else:
            wide = self.values.astype(np.float32)
        if target == bfloat16:
            return Tensor(bfloat16_bits(wide), target)
        with np.errstate(over="ignore"):  # too large numbers become infinite, as in torch
            return Tensor(wide.astype(np.float16 if target == float16 else np.float32), target)


LongTensor = Tensor


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16, ties to even, and return the bits."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def tensor(value: bool | float | Sequence[Any]) -> Tensor:
    """Convert a scalar or list to torch's default type: bool, int64 or float32."""
    array = np.array(value)
    return Tensor(array.astype(np.float32) if array.dtype.kind == "f" else array)


def concat(tensors: Sequence[Tensor]) -> Tensor:
    return Tensor(np.concatenate([part.values for part in tensors]), tensors[0].dtype)


def permute(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    return Tensor(tensor.values.transpose(axes), tensor.dtype)


def to_dlpack(tensor: Tensor) -> Any:
    """Create a DLPack capsule, which owns the array."""
    capsule = tensor.values.__dlpack__()
    if tensor.dtype == bfloat16:
        ctypes.c_uint8.from_address(_pointer(capsule, b"dltensor") + DTYPE_CODE).value = BFLOAT_CODE
    return capsule


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

DTYPE_CODE = 20
"""Offset of `dl_tensor.dtype.code` in DLPack's `DLManagedTensor`."""
BFLOAT_CODE = 4

utils: types.SimpleNamespace = types.SimpleNamespace(dlpack=types.SimpleNamespace(to_dlpack=to_dlpack))
cuda: types.ModuleType = types.ModuleType("torch.cuda")
vars(cuda)["is_available"] = lambda: False


class SafetensorsFile:
    """See https://github.com/huggingface/safetensors#format."""

    def __init__(self, path: str) -> None:
        self._path = path
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            self._entries = json.loads(file.read(length))
        self._start = 8 + length

    def get_tensor(self, name: str) -> Tensor:
        entry = self._entries[name]
        if entry["dtype"] not in STORED:
            raise TypeError("%s in %s has the unsupported dtype %s" % (name, self._path, entry["dtype"]))
        kind, stored = STORED[entry["dtype"]]
        start, end = entry["data_offsets"]
        count = (end - start) // np.dtype(stored).itemsize
        values = np.fromfile(self._path, stored, count, offset=self._start + start)
        return Tensor(values.reshape(entry["shape"]), kind)


@contextlib.contextmanager
def safe_open(path: str, framework: str) -> Iterator[SafetensorsFile]:
    yield SafetensorsFile(path)
