"""The stored tensors of one quantized module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from ..errors import CheckpointError
from .files import read_header
from .headers import TensorHeader, module_of


class ModuleTensors:
    """The stored tensors of one module, for a `ModuleReader`.

    Attributes:
        FLOATS: names of the dtypes of scales.
        device: where tensors are loaded.
    """

    FLOATS: ClassVar[tuple[str, ...]] = ("float16", "bfloat16", "float32")

    def __init__(
        self,
        with_file: Callable[[str, Callable[[Any, Path, str], Any]], Any],
        stored: Mapping[str, tuple[Path, str]],
        module: str,
        device: str,
    ) -> None:
        """Use `Weights.matrix` instead."""
        self._with_file = with_file
        self._stored = stored
        self._module = module
        self.device = device

    def __contains__(self, name: str) -> bool:
        return self._name(name) in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Raises:
            CheckpointError: it is missing, or its file is damaged.
        """
        return self._header(name).shape

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor as safetensors names it, such as `I32` or `F8_E4M3`.

        Raises:
            CheckpointError: as for `shape`.
        """
        return self._header(name).dtype

    def load(
        self, name: str, dtypes: Sequence[str], shape: Sequence[int], *, device: str | None = None
    ) -> torch.Tensor:
        """Load a tensor.

        Args:
            name: its name within the module.
            dtypes: torch's names of the expected dtypes.
            shape: the expected shape.
            device: the device; `self.device` by default.

        Raises:
            CheckpointError: it is missing or has another dtype or shape, or its file is damaged.
        """
        found = self.shape(name)
        if found != tuple(shape):
            self.fail(name, f"is {list(found)}, but config.json requires {list(shape)}")
        tensor: torch.Tensor = self._with_file(self._name(name), lambda opened, _, stored: opened.get_tensor(stored))
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in dtypes:
            self.fail(name, f"is {dtype}, expected {' or '.join(dtypes)}")
        return tensor.to(device or self.device)

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raise a `CheckpointError` that names a tensor and its file."""
        file, stored = self._stored[self._name(name)]
        raise CheckpointError(
            f"{file}: tensor {stored!r} {problem}. Use config.json and safetensors files of the same checkpoint."
        )

    def _name(self, name: str) -> str:
        return f"{self._module}.{name}"

    def _header(self, name: str) -> TensorHeader:
        if name not in self:
            file = next(file for other, (file, _) in self._stored.items() if module_of(other)[0] == self._module)
            raise CheckpointError(
                f"{file}: module {self._module!r} has no tensor {name!r}. Copy or download the checkpoint again."
            )
        header: TensorHeader = self._with_file(self._name(name), lambda opened, _, stored: read_header(opened, stored))
        return header
