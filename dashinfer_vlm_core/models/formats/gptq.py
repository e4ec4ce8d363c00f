"""GPTQ (arXiv:2210.17323) as AutoGPTQ and GPTQModel write it: 4 or 8 bits, optionally with `desc_act` (act-order)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .interface import ModuleReader, StoredBits, StoredMatrix, StoredWeight
from .options import UNQUANTIZED_STEP, check_value, group_count, read_group

if TYPE_CHECKING:
    import torch

    from ..headers import TensorHeader
    from ..json_fields import JsonFields
    from ..module_tensors import ModuleTensors


class GptqFormat:
    """See `CheckpointFormat`."""

    name = "gptq"

    def create_reader(self, config: JsonFields) -> ModuleReader:
        bits = check_value(config, "bits", (4, 8))
        if config.flag("is_marlin_format"):
            config.fail("is_marlin_format", "is true: only Marlin's kernels can read this layout", UNQUANTIZED_STEP)
        field = "checkpoint_format" if config.get("checkpoint_format") is not None else "format"
        layout = check_value(config, field, ("gptq", "gptq_v2"), default="gptq")
        check_value(config, "pack_dtype", ("int32",), default="int32")
        _check_overrides(config)
        return GptqReader(
            bits=8 if bits == 8 else 4,
            group=read_group(config, default=128),
            zero_offset=0 if layout == "gptq_v2" else 1,
            symmetric=config.get("sym") is not False,
            ordered=config.flag("desc_act"),
        )


def _check_overrides(config: JsonFields) -> None:
    if config.get("dynamic") is None:
        return
    for pattern, options in config.section("dynamic").values.items():
        if not pattern.startswith("-:") and options:
            problem = f"changes the quantization of {pattern!r}; only exclusions ('-:...') are supported"
            config.fail("dynamic", problem, UNQUANTIZED_STEP)


@dataclass(frozen=True, kw_only=True, slots=True)
class GptqReader:
    """See `ModuleReader`.

    Attributes:
        bits: 4 or 8.
        group: number of inputs of a group; -1: all.
        zero_offset: what is added to stored zero points; the first version of the format stores them minus one.
        symmetric: whether all zero points are half of the range.
        ordered: whether groups consist of inputs with similar activations.
    """

    bits: int
    group: int
    zero_offset: int
    symmetric: bool
    ordered: bool
    name: str = GptqFormat.name
    markers: tuple[str, ...] = ("qweight",)

    @property
    def stored_bits(self) -> StoredBits:
        if self.bits == 4:
            return "int4"
        return "int8" if self.group == -1 and self.symmetric else "none"

    def describe(self, headers: Mapping[str, TensorHeader]) -> StoredMatrix:
        return StoredMatrix(32 // self.bits * headers["qweight"].numel, self.stored_bits)

    def read(self, tensors: ModuleTensors, shape: tuple[int, int], dtype: torch.dtype) -> StoredWeight:
        from .packing import load_order, quantized_weight, unpack_rows

        outputs, inputs = shape
        per_int32 = 32 // self.bits
        group, groups = group_count(self.group, inputs)
        codes = unpack_rows(tensors.load("qweight", ("int32",), (-(-inputs // per_int32), outputs)).T, self.bits)
        scales = tensors.load("scales", tensors.FLOATS, (groups, outputs))
        stored = unpack_rows(tensors.load("qzeros", ("int32",), (groups, -(-outputs // per_int32))), self.bits)
        zeros = stored[:, :outputs].T.short() + self.zero_offset
        # `g_idx` is optional without `desc_act`.
        order = load_order(tensors, "g_idx", group, shape) if self.ordered or "g_idx" in tensors else None
        codes = codes[:, :inputs] if order is None else codes[:, order]
        return quantized_weight(codes, scales.T, zeros, group, bits=self.bits, order=order)
