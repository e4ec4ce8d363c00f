"""Load tensors from safetensors files, one at a time, under the names that a family uses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from ..concurrency.compute import executor_for
from ..errors import CheckpointError, ConfigError
from ..kernels import mmap_buffer
from ..kernels.quantization import QuantizedWeight, concatenate
from .files import open_tensors, read_header, stored_headers, stored_tensors
from .formats.detection import quantized_modules
from .formats.interface import ExpertsReader, ModuleReader, StoredWeight
from .headers import TensorHeader
from .lora import VisionMerge
from .lora_weights import merge_tensor
from .module_tensors import ModuleTensors

T = TypeVar("T")

_BLOCK_BYTES = 1 << 25
"""Bytes that are copied at a time, in about 10 ms: a decode step of another model waits for them."""

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Weights(AbstractContextManager["Weights"]):
    """The tensors of a checkpoint folder, in a single safetensors file or in the shards of an index.

    A file is opened for one tensor at a time. While a file stays mapped, every page that was read counts in addition to
    its copy, which would double the memory for loading a checkpoint. Reopening takes less than a millisecond.

    Attributes:
        folder: the folder.
        renames: as in `ModelSpec`.
        names: names of the tensors.
        reader: reads the modules whose weights are quantized; None if the checkpoint is not quantized.
        widened: names of the modules that were dequantized, because a layer joins them with modules that are quantized
            in another way.
    """

    def __init__(
        self,
        folder: Path,
        renames: Iterable[tuple[str, str]] = (),
        quantization: ModuleReader | None = None,
        merge: VisionMerge | None = None,
    ) -> None:
        """List the tensors of the checkpoint in `folder`; `renames` and `quantization` as in `ModelSpec`.

        With `merge`, the tensors have the changes of an adapter.

        Raises:
            CheckpointError: there are no safetensors files, a shard is missing, or a file is damaged.
        """
        self.folder = folder
        self.renames: tuple[tuple[str, str], ...] = tuple(renames)
        self._stored = stored_tensors(folder, self.renames)
        self._merge = merge
        self.names: frozenset[str] = frozenset(self._stored)
        self.reader = quantization
        self._quantized = quantized_modules(self.names, quantization) if quantization else frozenset[str]()
        self.widened: list[str] = []

    def tensor(self, name: str, shape: Sequence[int], *, device: str, dtype: torch.dtype) -> torch.Tensor:
        """Load a tensor of `shape` into newly allocated memory on `device`, converted to `dtype`.

        Raises:
            CheckpointError: the tensor is missing or has another shape, or its file is damaged.
        """
        tensor = mmap_buffer.empty(shape, dtype, device)
        self.read(name, tensor)
        return tensor

    def matrix(
        self,
        modules: Sequence[str],
        outputs: Sequence[int],
        inputs: int,
        *,
        device: str,
        dtype: torch.dtype,
        mapped: bool = False,
    ) -> StoredWeight:
        """Load the weights of linear layers, whose outputs are concatenated.

        Quantized weights stay quantized if those of all modules are, in a compatible way; otherwise, they are
        dequantized to `dtype`.

        Args:
            modules: the names of the layers, without `.weight`.
            outputs: their numbers of outputs.
            inputs: the number of inputs.
            device: torch's name of the device.
            dtype: the dtype of weights that are not quantized.
            mapped: whether the result may be a view of the mapped file, which must not be kept or changed: for kernels
                that copy the weights.

        Raises:
            CheckpointError: a tensor is missing or has another shape, or a file is damaged.
        """
        shapes = [(count, inputs) for count in outputs]
        if self._quantized.isdisjoint(modules):
            if mapped and (view := self._view(modules, shapes, dtype)) is not None:
                return view
            joined = mmap_buffer.empty([sum(outputs), inputs], dtype, device)
            for module, part in zip(modules, torch.split(joined, list(outputs)), strict=True):
                self.read(f"{module}.weight", part)
            return joined
        parts = [self._part(*named, device=device, dtype=dtype) for named in zip(modules, shapes, strict=True)]
        return self._join(modules, parts, inputs, device=device, dtype=dtype)

    def _view(
        self, modules: Sequence[str], shapes: Sequence[tuple[int, int]], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return weights in the file; None if they must be converted or do not follow each other there."""
        located = [self._locate(f"{module}.weight") for module in modules]
        file = located[0][0]
        if self._merge is not None or any(other != file for other, _ in located):
            return None
        with open_tensors(file, "pt") as opened:
            parts = [opened.get_tensor(name) for _, name in located]
        if any(part.dtype != dtype or part.shape != shape for part, shape in zip(parts, shapes, strict=True)):
            return None
        return _adjacent(parts)

    def _part(self, module: str, shape: tuple[int, int], *, device: str, dtype: torch.dtype) -> StoredWeight:
        if self.reader is None or module not in self._quantized:
            return self.tensor(f"{module}.weight", shape, device=device, dtype=dtype)
        tensors = ModuleTensors(self._with_file, self._stored, module, device)
        weight = self.reader.read(tensors, shape, dtype)
        if isinstance(weight, QuantizedWeight):
            try:
                weight.check()
            except ValueError as error:
                tensors.fail(self.reader.markers[0], f"is inconsistent: {error}")
        if self._merge is None or not self._merge.changes(f"{module}.weight"):
            return weight
        wide = weight.dequantize(torch.float32) if isinstance(weight, QuantizedWeight) else weight
        return self._merged(f"{module}.weight", wide).to(dtype)

    def _merged(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._merge is None else merge_tensor(self._merge, name, tensor)

    def _join(
        self, modules: Sequence[str], parts: Sequence[StoredWeight], inputs: int, *, device: str, dtype: torch.dtype
    ) -> StoredWeight:
        if len(parts) == 1:
            return parts[0]
        quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
        if len(quantized) == len(parts) and (together := concatenate(quantized)):
            return together
        counts = [len(part.codes if isinstance(part, QuantizedWeight) else part) for part in parts]
        joined = mmap_buffer.empty([sum(counts), inputs], dtype, device)
        for module, part, into in zip(modules, parts, torch.split(joined, counts), strict=True):
            if isinstance(part, QuantizedWeight):
                part.dequantize_into(into)
                self.widened.append(module)
            else:
                into.copy_(part)
        return joined

    def read(self, name: str, into: torch.Tensor) -> None:
        """Copy a stored tensor into `into`, which has the same shape and may be a view, with dtype conversion.

        The file is memory-mapped, so there is never a second copy of the tensor in memory.

        Raises:
            CheckpointError: as for `tensor`.
        """
        merge = functools.partial(self._merged, name)
        self._with_file(name, lambda opened, file, stored: _copy(opened, file, stored, into, merge))

    def read_experts(self, module: str, into: torch.Tensor, *, transposed: bool) -> None:
        """Copy the weights of all experts of a layer, stored as one tensor, with dtype conversion.

        Quantized weights are dequantized.

        Args:
            module: the name of the tensor, without `.weight`.
            into: [experts, outputs, inputs].
            transposed: whether the weights are stored as [experts, inputs, outputs].

        Raises:
            CheckpointError: as for `tensor`, or the format stores experts separately.
        """
        if self.reader is None or module not in self._quantized:
            self.read(f"{module}.weight", into.transpose(1, 2) if transposed else into)
            return
        tensors = ModuleTensors(self._with_file, self._stored, module, str(into.device))
        if not isinstance(self.reader, ExpertsReader):
            marker = next(name for name in self.reader.markers if name in tensors)
            tensors.fail(marker, f"is of several experts, which the format {self.reader.name} stores separately")
        self.reader.read_experts(tensors, into, transposed=transposed)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the stored shape of a tensor.

        Raises:
            CheckpointError: the tensor is missing, or its file is damaged.
        """
        return self._with_file(name, lambda opened, _, stored: read_header(opened, stored).shape)

    def headers(self) -> dict[str, TensorHeader]:
        """Read the headers of all tensors.

        Raises:
            CheckpointError: a file is damaged.
        """
        return stored_headers(self._stored)

    def _with_file(self, name: str, use: Callable[[Any, Path, str], T]) -> T:
        file, stored_name = self._locate(name)
        with open_tensors(file, "pt") as opened:
            return use(opened, file, stored_name)

    def close(self) -> None:
        """Release the files; no tensor can be read afterwards. Idempotent."""
        self._stored.clear()

    def _locate(self, name: str) -> tuple[Path, str]:
        if name not in self._stored:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}. Copy or download its safetensors again.")
        return self._stored[name]

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _copy(
    opened: Any, file: Path, name: str, into: torch.Tensor, merge: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    header = read_header(opened, name)
    if header.shape != into.shape:
        raise CheckpointError(
            f"{file}: tensor {name!r} is {list(header.shape)}, but the configuration requires "
            f"{list(into.shape)}. Use config.json and safetensors files of the same checkpoint."
        )
    tensor = opened.get_tensor(name)
    if into.is_floating_point() and (not tensor.is_floating_point() or tensor.itemsize == 1):
        raise CheckpointError(
            f"{file}: tensor {name!r} is {header.dtype}, but its module has no scales in the"
            " format that `quantization_config` in config.json declares. Copy or download the checkpoint again."
        )
    _copy_rows(merge(tensor), into)


def _copy_rows(tensor: torch.Tensor, into: torch.Tensor) -> None:
    """Copy blocks of rows, between which other tasks run."""
    if tensor.ndim == 0:
        into.copy_(tensor)
        return
    rows = max(1, _BLOCK_BYTES // max(1, tensor[:1].nbytes))
    executor = executor_for(str(into.device))
    for source, target in zip(torch.split(tensor, rows), torch.split(into, rows), strict=True):
        target.copy_(source)
        executor.pause()


def _adjacent(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return matrices [n, inputs] as one without a copy, if they follow each other in memory."""
    if any(one.data_ptr() + one.nbytes != other.data_ptr() for one, other in pairwise(parts)):
        return None
    return torch.from_numpy(np.asarray(_Adjacent(parts))).view(parts[0].dtype).view(-1, parts[0].shape[1])


class _Adjacent:
    """The bytes of tensors that follow each other in memory. An array of them keeps all of the tensors alive."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._parts = parts
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (sum(part.nbytes for part in parts),),
            "data": (parts[0].data_ptr(), False),
        }


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for one of the names in `TORCH_DTYPES`.

    Raises:
        ConfigError: `name` is not one of them.
    """
    if name not in TORCH_DTYPES:
        raise ConfigError(f"`dtype` is {name!r}; choose one of {', '.join(TORCH_DTYPES)}.", param="dtype")
    return TORCH_DTYPES[name]
