"""Load tensors from safetensors files, one at a time, under the names that a family uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, ConfigError
from ..kernels import mmap_buffer
from .files import stored_tensors, unreadable_file_error
from .lora import MERGE
from .lora_weights import merge_tensor

if TYPE_CHECKING:
    from typing_extensions import Self

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Weights:
    """The tensors of a checkpoint folder, in a single safetensors file or in the shards of an index.

    A file is opened for one tensor at a time. While a file stays mapped, every page that was read counts in addition to
    its copy, which would double the memory for loading a checkpoint. Reopening takes less than a millisecond.

    Attributes:
        names: names of the tensors.
    """

    def __init__(self, stored: Mapping[str, tuple[Path, str]]) -> None:
        """Use `open` instead. `stored` maps a name to the file and the stored name."""
        self._stored = dict(stored)
        self._merge = MERGE.get()
        self.names: frozenset[str] = frozenset(self._stored)

    @classmethod
    def open(cls, folder: Path, renames: Iterable[tuple[str, str]] = ()) -> Weights:
        """List the tensors of the checkpoint in `folder`; `renames` as in `ModelSpec.tensor_renames`.

        Raises:
            CheckpointError: there are no safetensors files, a shard is missing, or a file is damaged.
        """
        return cls(stored_tensors(folder, renames))

    def tensor(self, name: str, shape: Sequence[int], *, device: str, dtype: torch.dtype) -> torch.Tensor:
        """Load a tensor of `shape` into newly allocated memory on `device`, converted to `dtype`.

        Raises:
            CheckpointError: the tensor is missing or has another shape, or its file is damaged.
        """
        tensor = self.empty(shape, device=device, dtype=dtype)
        self.read(name, tensor)
        return tensor

    @staticmethod
    def empty(shape: Sequence[int], *, device: str, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor to read weights into, often only briefly before they are packed into another layout."""
        if device == "cpu":
            return mmap_buffer.empty(shape, dtype)
        return torch.empty(*shape, device=device, dtype=dtype)

    def read(self, name: str, into: torch.Tensor) -> None:
        """Copy a stored tensor into `into`, which has the same shape and may be a view, with dtype conversion.

        The file is memory-mapped, so there is never a second copy of the tensor in memory.

        Raises:
            CheckpointError: as for `tensor`.
        """
        file, stored_name = self._locate(name)
        try:
            with safe_open(file, framework="pt") as opened:
                shape = opened.get_slice(stored_name).get_shape()
                if shape != list(into.shape):
                    raise CheckpointError(
                        f"{file}: tensor {stored_name!r} is {shape}, but the configuration requires "
                        f"{list(into.shape)}. Use config.json and safetensors files of the same checkpoint."
                    )
                if self._merge is None:
                    into.copy_(opened.get_tensor(stored_name))
                else:
                    into.copy_(merge_tensor(self._merge, name, opened.get_tensor(stored_name)))
        except (OSError, SafetensorError) as error:
            raise unreadable_file_error(file, error) from error

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the stored shape of a tensor.

        Raises:
            CheckpointError: the tensor is missing, or its file is damaged.
        """
        file, stored_name = self._locate(name)
        try:
            with safe_open(file, framework="pt") as opened:
                return tuple(opened.get_slice(stored_name).get_shape())
        except (OSError, SafetensorError) as error:
            raise unreadable_file_error(file, error) from error

    def close(self) -> None:
        """Release the files; no tensor can be read afterwards. Idempotent."""
        self._stored.clear()

    def _locate(self, name: str) -> tuple[Path, str]:
        """Return the file of a tensor and its name there."""
        if name not in self._stored:
            raise CheckpointError(f"The checkpoint has no tensor {name!r}. Copy or download its safetensors again.")
        return self._stored[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for one of the names in `TORCH_DTYPES`.

    Raises:
        ConfigError: `name` is not one of them.
    """
    if name not in TORCH_DTYPES:
        raise ConfigError(f"`dtype` is {name!r}; choose one of {', '.join(TORCH_DTYPES)}.", param="dtype")
    return TORCH_DTYPES[name]
