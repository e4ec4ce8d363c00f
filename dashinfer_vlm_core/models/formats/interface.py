"""What a format of quantized checkpoints implements. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch

    from ...kernels.quantization import QuantizedWeight
    from ..headers import TensorHeader
    from ..json_fields import JsonFields
    from ..module_tensors import ModuleTensors

StoredBits: TypeAlias = Literal["int4", "int8", "none"]
"""What kernels have to support to keep weights in their stored bits; `none`: they are always dequantized."""

StoredWeight: TypeAlias = "QuantizedWeight | torch.Tensor"
"""Weights of a module: quantized, or [outputs, inputs] if their format has no `QuantizedWeight`."""


class CheckpointFormat(Protocol):
    """A format of quantized checkpoints; plugins register it in the `register_checkpoint_formats` hook.

    Attributes:
        name: `quant_method` in `quantization_config` of `config.json`.
    """

    name: str

    def create_reader(self, config: JsonFields) -> ModuleReader:
        """Return the reader of a checkpoint with this `quantization_config`. Must not import torch.

        Raises:
            CheckpointError: `config` is invalid or requires an unsupported feature; the message names the field.
        """


class ModuleReader(Protocol):
    """Reads the quantized modules of one checkpoint. Implementations are immutable, and compare by value.

    Attributes:
        name: the name of the format, for logs and messages.
        markers: names of tensors. A module that has one of them is quantized, whatever the configuration lists.
        stored_bits: the bits of most modules.
    """

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]: ...

    @property
    def stored_bits(self) -> StoredBits: ...

    def describe(self, headers: Mapping[str, TensorHeader]) -> StoredMatrix:
        """Describe a quantized module from the headers of its tensors, by their names within the module."""

    def read(self, tensors: ModuleTensors, shape: tuple[int, int], dtype: torch.dtype) -> StoredWeight:
        """Read the weights of a quantized module, without rounding them again.

        Args:
            tensors: the module's stored tensors.
            shape: numbers of outputs and inputs.
            dtype: the dtype of the result if its format has no `QuantizedWeight`.

        Returns:
            The quantized weights on the device of `tensors`, or a new tensor [outputs, inputs].

        Raises:
            CheckpointError: a tensor is missing, damaged or inconsistent; the message names the tensor and its file.
        """


@runtime_checkable
class ExpertsReader(Protocol):
    """A `ModuleReader` that also reads the weights of all experts of a layer that are stored as one tensor."""

    def read_experts(self, tensors: ModuleTensors, into: torch.Tensor, *, transposed: bool) -> None:
        """Dequantize weights.

        Args:
            tensors: the stored tensors.
            into: [experts, outputs, inputs], which gets the weights in its dtype.
            transposed: whether the weights are stored as [experts, inputs, outputs], and their scales accordingly.

        Raises:
            CheckpointError: as for `ModuleReader.read`.
        """


class StoredMatrix(NamedTuple):
    """The stored weights of one module.

    Attributes:
        weights: number of weights.
        bits: what kernels have to support to keep them.
    """

    weights: int
    bits: StoredBits


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightMemory:
    """What becomes of a checkpoint's quantized weights on this machine.

    Attributes:
        format: name of the format.
        kept: number of modules that stay in their stored bits.
        kept_bytes: their size in the checkpoint, with scales and zero points.
        widened: number of modules that are dequantized.
        widened_bytes: their size in the checkpoint.
        memory_bytes: the size of their weights after that.
    """

    format: str
    kept: int
    kept_bytes: int
    widened: int
    widened_bytes: int
    memory_bytes: int

    def describe(self, dtype: str, kernels: str) -> str:
        """Return a sentence part for users: what is kept and what is widened to `dtype`, and the memory."""
        parts = []
        if self.kept:
            parts.append(f"{self.kept} matrices keep their stored bits, {_size(self.kept_bytes)}")
        if self.widened:
            parts.append(
                f"{self.widened} matrices are widened to {dtype}, {_size(self.memory_bytes)} instead of"
                f" {_size(self.widened_bytes)}, since the kernels {kernels!r} cannot multiply them as they are"
            )
        return "; ".join(parts) or "no matrix is quantized"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
