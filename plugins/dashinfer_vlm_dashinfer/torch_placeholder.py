"""The part of torch that DashInfer's converter uses, in numpy, without quantization. In an environment without torch,
`serialize.py` installs this module as `torch`.

It contains the names that `dashinfer.allspark` uses during its import, and those that its Qwen2 converter calls:
`tensor(value).numpy()`, `concat`, `permute(...).contiguous()`, `cpu()`, `to("cpu")`, `shape`, `dtype`, `Tensor(0)` and
`utils.dlpack.to_dlpack`. Any other name raises an AttributeError, and the conversion fails.

A checkpoint's tensor is read when its values are used and is not kept, so a conversion holds one tensor at a time.
This file imports only numpy.
"""

from __future__ import annotations

import ctypes
import json
import struct
import types
from typing import Any, Callable, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class dtype:  # noqa: N801 - torch's name for it
    """A data type; DashInfer compares its name and looks it up in a table."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return "torch." + self._name


float64: dtype = dtype("float64")
float32: dtype = dtype("float32")
float16: dtype = dtype("float16")
bfloat16: dtype = dtype("bfloat16")
float8_e4m3fn: dtype = dtype("float8_e4m3fn")
uint8: dtype = dtype("uint8")
int64: dtype = dtype("int64")
int32: dtype = dtype("int32")
int16: dtype = dtype("int16")
int8: dtype = dtype("int8")

ARRAYS: dict[dtype, Any] = {float32: np.float32, float16: np.float16, bfloat16: np.uint16}
"""numpy's dtypes of the values of a tensor; bfloat16 as its bits."""


class Tensor:
    """A tensor whose values are read on demand, in the dtype that `ARRAYS` has for its own."""

    def __init__(self, *shape: int, values: Callable[[], Array] | None = None, kind: dtype = float32) -> None:
        self.shape = shape
        self.dtype = kind
        self._values = values or (lambda: np.zeros(shape, ARRAYS[kind]))

    def numpy(self) -> Array:
        return self._values()

    def cpu(self) -> Tensor:
        return self

    def to(self, device: str) -> Tensor:
        assert device == "cpu"
        return self

    def contiguous(self) -> Tensor:
        return Tensor(*self.shape, values=lambda: np.ascontiguousarray(self.numpy()), kind=self.dtype)


def tensor(value: bool | float | Sequence[Any]) -> types.SimpleNamespace:
    """Convert a scalar or list to an array of torch's default type: bool, int64 or float32."""
    array = np.array(value)
    numpy_dtype = np.float32 if array.dtype.kind == "f" else array.dtype if array.dtype.kind == "b" else np.int64
    return types.SimpleNamespace(numpy=lambda: array.astype(numpy_dtype))


def concat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along the first axis."""
    first = sum(part.shape[0] for part in tensors)
    values = lambda: np.concatenate([part.numpy() for part in tensors])  # noqa: E731 - a lazy value
    return Tensor(first, *tensors[0].shape[1:], values=values, kind=tensors[0].dtype)


def permute(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    shape = [tensor.shape[axis] for axis in axes]
    return Tensor(*shape, values=lambda: tensor.numpy().transpose(axes), kind=tensor.dtype)


def to_dlpack(tensor: Tensor) -> Any:
    """Create a DLPack capsule, which owns the array. numpy creates them only from writable arrays."""
    capsule = np.require(tensor.numpy(), ARRAYS[tensor.dtype], ["C", "A", "W"]).__dlpack__()
    if tensor.dtype is bfloat16:
        ctypes.c_uint8.from_address(_pointer(capsule, b"dltensor") + DTYPE_CODE).value = BFLOAT_CODE
    return capsule


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

DTYPE_CODE, BFLOAT_CODE = 20, 4
"""Offset of `dl_tensor.dtype.code` in DLPack's `DLManagedTensor`, and the code of bfloat16, which numpy lacks."""

LongTensor = Tensor
utils: types.SimpleNamespace = types.SimpleNamespace(dlpack=types.SimpleNamespace(to_dlpack=to_dlpack))
cuda: types.ModuleType = types.ModuleType("torch.cuda")
vars(cuda)["is_available"] = lambda: False


class SafetensorsFile:
    """A memory-mapped safetensors file: https://github.com/huggingface/safetensors#format."""

    def __init__(self, path: str) -> None:
        self._path = path
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            self._entries = json.loads(file.read(length))
        self._start = 8 + length

    def tensor(self, name: str, kind: dtype = float32) -> Tensor:
        """The tensor `name`, converted to `kind` as torch converts it."""
        entry = self._entries[name]
        if entry["dtype"] not in STORED:
            raise TypeError("%s in %s has the unsupported dtype %s" % (name, self._path, entry["dtype"]))
        return Tensor(*entry["shape"], values=lambda: self._read(kind, **entry), kind=kind)

    def _read(self, kind: dtype, dtype: str, shape: list[int], data_offsets: list[int]) -> Array:
        start, end = data_offsets
        if start == end:
            return np.zeros(shape, ARRAYS[kind])
        stored = np.memmap(self._path, STORED[dtype], "c", self._start + start, tuple(shape))
        if dtype == "BF16" and kind is bfloat16:
            return stored
        wide = (stored.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else np.asarray(stored, np.float32)
        if kind is bfloat16:
            return bfloat16_bits(wide)
        with np.errstate(over="ignore"):  # too large numbers become infinite, as in torch
            return np.asarray(wide, ARRAYS[kind])


def bfloat16_bits(values: Array) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16, ties to even, and return the bits."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""numpy's dtypes of stored tensors. bfloat16 is read as its bits, which are the upper half of a float32."""
