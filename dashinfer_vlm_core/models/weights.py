"""safetensors files -> tensors, one at a time, under the names that a family uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, ConfigError
from ..kernels import mmap_buffer
from .files import damaged, stored_tensors

if TYPE_CHECKING:
    from typing_extensions import Self

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Weights:
    """The safetensors of a checkpoint folder, in one file or in the shards that an index lists.

    A file is opened for one tensor at a time: while it stays mapped, every page that was read counts beside its copy,
    which would double the memory that loading a checkpoint needs. Opening it again costs less than a millisecond.

    Attributes:
        names: the tensors.
    """

    def __init__(self, stored: Mapping[str, tuple[Path, str]]) -> None:
        """Use `open`. `stored` maps a name to the file and the name there."""
        self._stored = dict(stored)
        self.names: frozenset[str] = frozenset(self._stored)

    @classmethod
    def open(cls, folder: Path, renames: Iterable[tuple[str, str]] = ()) -> Weights:
        """List the tensors of the checkpoint in `folder`; `renames` as in `ModelSpec.tensor_renames`.

        Raises:
            CheckpointError: there are no safetensors, a shard is missing, or a file is damaged.
        """
        return cls(stored_tensors(folder, renames))

    def tensor(self, name: str, shape: Sequence[int], *, device: str, dtype: torch.dtype) -> torch.Tensor:
        """Read one tensor of `shape` into memory of its own, on `device` in `dtype`.

        Raises:
            CheckpointError: it is not there, has another shape, or its file is damaged.
        """
        found = self.empty(shape, device=device, dtype=dtype)
        self.read(name, found)
        return found

    @staticmethod
    def empty(shape: Sequence[int], *, device: str, dtype: torch.dtype) -> torch.Tensor:
        """Memory to read weights into, which many of them leave again at once for a layout of their own."""
        if device == "cpu":
            return mmap_buffer.empty(shape, dtype)
        return torch.empty(*shape, device=device, dtype=dtype)

    def read(self, name: str, into: torch.Tensor) -> None:
        """Read one tensor into another of the same shape, a part of a larger one perhaps, converting as it goes.

        The file is mapped, not read: no copy of the tensor is ever in memory beside `into`.

        Raises:
            CheckpointError: as `tensor`.
        """
        if name not in self._stored:
            raise CheckpointError(f"The checkpoint has no tensor {name!r}. Copy or download its safetensors again.")
        file, stored_name = self._stored[name]
        try:
            with safe_open(file, framework="pt") as opened:
                shape = opened.get_slice(stored_name).get_shape()
                if shape != list(into.shape):
                    raise CheckpointError(
                        f"{file}: tensor {stored_name!r} is {shape}, but the configuration asks for "
                        f"{list(into.shape)}. Take config.json and the safetensors of one and the same checkpoint."
                    )
                into.copy_(opened.get_tensor(stored_name))
        except (OSError, SafetensorError) as error:
            raise damaged(file, error) from error

    def close(self) -> None:
        """Forget the files; no tensor can be read any more. Closing twice is allowed."""
        self._stored.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def torch_dtype(name: str) -> torch.dtype:
    """torch's number type of that name, which is one of `TORCH_DTYPES`.

    Raises:
        ConfigError: it is another.
    """
    if name not in TORCH_DTYPES:
        raise ConfigError(f"`dtype` is {name!r}; choose one of {', '.join(TORCH_DTYPES)}.", param="dtype")
    return TORCH_DTYPES[name]
