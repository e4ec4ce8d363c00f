"""What DashInfer's converter uses of torch, in numpy and for float32 alone: `serialize.py` puts this module in the
place of torch where an environment for the CPU only has none.

Of torch it has what `dashinfer.allspark` mentions while it is imported, and what its Qwen2 converter calls:
`tensor(value).numpy()`, `concat`, `permute(...).contiguous()`, `cpu()`, `to("cpu")`, `shape`, `dtype`, `Tensor(0)` and
`utils.dlpack.to_dlpack`. Anything else is an AttributeError, and fails the conversion.

A tensor of a checkpoint is read when its values are used and not kept, so that a conversion holds one tensor at a time.
Imports nothing of ours, and needs numpy alone.
"""

from __future__ import annotations

import json
import struct
import types
from typing import Any, Callable, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class dtype:  # noqa: N801 - torch's name for it
    """A number type; DashInfer compares its name and looks it up in a table."""

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


class Tensor:
    """A float32 tensor, which knows its shape and where its values come from."""

    dtype = float32

    def __init__(self, *shape: int, values: Callable[[], Array] | None = None) -> None:
        self.shape = shape
        self._values = values or (lambda: np.zeros(shape, np.float32))

    def numpy(self) -> Array:
        return self._values()

    def cpu(self) -> Tensor:
        return self

    def to(self, device: str) -> Tensor:
        assert device == "cpu"
        return self

    def contiguous(self) -> Tensor:
        return Tensor(*self.shape, values=lambda: np.ascontiguousarray(self.numpy()))


def tensor(value: bool | float | Sequence[Any]) -> types.SimpleNamespace:
    """A scalar or list as an array of the type that torch chooses: bool, int64 or float32."""
    array = np.array(value)
    chosen = np.float32 if array.dtype.kind == "f" else array.dtype if array.dtype.kind == "b" else np.int64
    return types.SimpleNamespace(numpy=lambda: array.astype(chosen))


def concat(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors joined along their first axis."""
    first = sum(part.shape[0] for part in tensors)
    values = lambda: np.concatenate([part.numpy() for part in tensors])  # noqa: E731 - nothing but a value
    return Tensor(first, *tensors[0].shape[1:], values=values)


def permute(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    shape = [tensor.shape[axis] for axis in axes]
    return Tensor(*shape, values=lambda: tensor.numpy().transpose(axes))


def to_dlpack(tensor: Tensor) -> Any:
    """A DLPack capsule, which keeps the array; numpy makes them of writable arrays only."""
    return np.require(tensor.numpy(), np.float32, ["C", "A", "W"]).__dlpack__()


LongTensor = Tensor
utils: types.SimpleNamespace = types.SimpleNamespace(dlpack=types.SimpleNamespace(to_dlpack=to_dlpack))
cuda: types.ModuleType = types.ModuleType("torch.cuda")
vars(cuda)["is_available"] = lambda: False


class SafetensorsFile:
    """A file of tensors: https://github.com/huggingface/safetensors#format. They are mapped, not read."""

    def __init__(self, path: str) -> None:
        self._path = path
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            self._entries = json.loads(file.read(length))
        self._start = 8 + length

    def tensor(self, name: str) -> Tensor:
        """The tensor `name` as float32."""
        entry = self._entries[name]
        if entry["dtype"] not in STORED:
            raise TypeError("%s in %s has the type %s, which is not read here" % (name, self._path, entry["dtype"]))
        return Tensor(*entry["shape"], values=lambda: self._read(**entry))

    def _read(self, dtype: str, shape: list[int], data_offsets: list[int]) -> Array:
        start, end = data_offsets
        if start == end:
            return np.zeros(shape, np.float32)
        stored = np.memmap(self._path, STORED[dtype], "c", self._start + start, tuple(shape))
        if dtype == "BF16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return np.asarray(stored, np.float32)


STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Types of stored tensors in numpy's words; of bfloat16, its bits, which are the upper half of float32's."""
