"""AWQ (arXiv:2306.00978) in the GEMM layout of AutoAWQ: 4 bits, a scale and a zero point per group of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .interface import ModuleReader, StoredBits, StoredMatrix, StoredWeight
from .options import check_value, group_count, read_group

if TYPE_CHECKING:
    import torch

    from ..headers import TensorHeader
    from ..json_fields import JsonFields
    from ..module_tensors import ModuleTensors


class AwqFormat:
    """See `CheckpointFormat`."""

    name = "awq"

    def create_reader(self, config: JsonFields) -> ModuleReader:
        check_value(config, "bits", (4,), default=4)
        layout = config.get("version") or config.get("format") or "gemm"
        if str(layout).lower() != "gemm" or config.get("backend") == "llm-awq":
            config.fail(
                "version", f"is {layout!r}", "Only the layout 'gemm' of AutoAWQ is supported: use a checkpoint with it."
            )
        return AwqReader(group=read_group(config, default=128))


@dataclass(frozen=True, kw_only=True, slots=True)
class AwqReader:
    """See `ModuleReader`.

    Attributes:
        group: number of inputs of a group; -1: all.
    """

    group: int
    name: str = AwqFormat.name
    markers: tuple[str, ...] = ("qweight",)
    stored_bits: StoredBits = "int4"

    def describe(self, headers: Mapping[str, TensorHeader]) -> StoredMatrix:
        return StoredMatrix(8 * headers["qweight"].numel, "int4")

    def read(self, tensors: ModuleTensors, shape: tuple[int, int], dtype: torch.dtype) -> StoredWeight:
        from .packing import quantized_weight, unpack_awq

        outputs, inputs = shape
        group, groups = group_count(self.group, inputs)
        codes = unpack_awq(tensors.load("qweight", ("int32",), (inputs, -(-outputs // 8))))
        scales = tensors.load("scales", tensors.FLOATS, (groups, outputs))
        zeros = unpack_awq(tensors.load("qzeros", ("int32",), (groups, -(-outputs // 8))))
        return quantized_weight(codes[:outputs], scales.T, zeros[:outputs], group, bits=4)
