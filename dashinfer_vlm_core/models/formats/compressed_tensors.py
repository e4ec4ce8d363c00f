"""compressed-tensors, as llm-compressor writes it: integers of 4 or 8 bits, packed or not, and FP8 (e4m3)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .fp8 import read_block, read_fp8
from .interface import ModuleReader, StoredBits, StoredMatrix, StoredWeight
from .options import UNQUANTIZED_STEP, check_value, group_count, read_group

if TYPE_CHECKING:
    import torch

    from ..headers import TensorHeader
    from ..json_fields import JsonFields
    from ..module_tensors import ModuleTensors

logger: logging.Logger = logging.getLogger(__name__)

LAYOUTS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


class CompressedTensorsFormat:
    """See `CheckpointFormat`. Activations are not quantized, whatever `input_activations` is."""

    name = "compressed-tensors"

    def create_reader(self, config: JsonFields) -> ModuleReader:
        check_value(config, "format", LAYOUTS)
        for field in ("sparsity_config", "transform_config"):
            options = config.get(field)
            if options and not (isinstance(options, dict) and options.get("format") == "dense"):
                config.fail(field, "is not supported: it changes more than the precision of weights", UNQUANTIZED_STEP)
        if config.get("kv_cache_scheme") is not None:
            logger.info("%s: `kv_cache_scheme` is not applied; use `kv_cache_dtype`.", config.file)
        groups = config.section("config_groups")
        return CompressedTensorsReader(schemes=tuple(_scheme(groups.section(name)) for name in groups.values))


def _scheme(group: JsonFields) -> Scheme:
    check_value(group, "format", LAYOUTS, default=LAYOUTS[0])
    weights = group.section("weights")
    kind = check_value(weights, "type", ("int", "float"), default="int")
    bits = check_value(weights, "num_bits", (4, 8) if kind == "int" else (8,))
    size = weights.get("group_size")
    strategies = ("group", "channel", "tensor") if kind == "int" else ("channel", "tensor", "block")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = check_value(weights, "strategy", strategies, default=default)
    return Scheme(
        is_float=kind == "float",
        bits=8 if bits == 8 else 4,
        group=read_group(weights) if strategy == "group" else -1,
        block=read_block(weights, "block_structure") if strategy == "block" else None,
        symmetric=weights.get("symmetric") is not False,
        ordered=weights.get("actorder") in ("group", "dynamic", True),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How the weights of some modules are quantized.

    Attributes:
        is_float: FP8 instead of integers.
        bits: 4 or 8.
        group: number of inputs of a group of integers; -1: all.
        block: see `read_block`.
        symmetric: whether there are no zero points.
        ordered: whether groups consist of inputs with similar activations.
    """

    is_float: bool
    bits: int
    group: int
    block: tuple[int, int] | None
    symmetric: bool
    ordered: bool

    @property
    def stored_bits(self) -> StoredBits:
        if self.is_float:
            return "none"
        if self.bits == 4:
            return "int4"
        return "int8" if self.group == -1 and self.symmetric else "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedTensorsReader:
    """See `ModuleReader`.

    Modules are not matched to schemes by name: the lists of `targets` and `ignore` are written with different prefixes
    than those of the tensors. A module has the first scheme that fits the shapes of its tensors.
    """

    schemes: tuple[Scheme, ...]
    name: str = CompressedTensorsFormat.name
    markers: tuple[str, ...] = ("weight_packed", "weight_scale")

    @property
    def stored_bits(self) -> StoredBits:
        found = {scheme.stored_bits for scheme in self.schemes}
        return "int4" if "int4" in found else "int8" if "int8" in found else "none"

    def describe(self, headers: Mapping[str, TensorHeader]) -> StoredMatrix:
        packed, scales = headers.get("weight_packed"), headers.get("weight_scale")
        stored = packed or headers.get("weight")
        if stored is None or scales is None:  # damaged; `read` reports it
            return StoredMatrix(0, "none")
        columns = stored.shape[-1]
        is_float = stored.dtype.startswith("F8")
        scheme = self._find(columns, scales.shape, is_float=is_float, is_packed=packed is not None)
        if scheme is None:
            return StoredMatrix(0, "none")
        return StoredMatrix(stored.numel * (32 // scheme.bits if packed else 1), scheme.stored_bits)

    def read(self, tensors: ModuleTensors, shape: tuple[int, int], dtype: torch.dtype) -> StoredWeight:
        from .packing import load_order, quantized_weight

        is_packed = "weight_packed" in tensors
        name = "weight_packed" if is_packed else "weight"
        is_float = tensors.dtype(name).startswith("F8")
        stored = tensors.shape("weight_scale")
        columns = tensors.shape(name)[-1]
        scheme = self._find(columns, stored, is_float=is_float, is_packed=is_packed, inputs=shape[1])
        if scheme is None:
            tensors.fail("weight_scale", f"is {list(stored)}, which no group of `config_groups` in config.json has")
        if scheme.is_float:
            return read_fp8(tensors, shape, dtype, scales="weight_scale", block=scheme.block)
        group, groups = group_count(scheme.group, shape[1])
        expected = stored if math.prod(stored) == 1 else (shape[0], groups)[: len(stored)]
        scales = tensors.load("weight_scale", tensors.FLOATS, expected).reshape(-1, groups).expand(shape[0], groups)
        codes = _read_codes(tensors, scheme, shape)
        order = None
        if scheme.ordered:
            order = load_order(tensors, "weight_g_idx", group, shape)
            codes = codes if order is None else codes[:, order]
        zeros = _read_zeros(tensors, scheme, shape[0], groups)
        return quantized_weight(codes, scales, zeros, group, bits=scheme.bits, order=order)

    def _find(
        self, columns: int, scales: tuple[int, ...], *, is_float: bool, is_packed: bool, inputs: int | None = None
    ) -> Scheme | None:
        for scheme in self.schemes:
            width = inputs or (columns * 32 // scheme.bits if is_packed else columns)
            if scheme.is_float or is_float:
                fits = scheme.is_float and is_float
            else:
                groups = group_count(scheme.group, width)[1]
                fits = groups == (scales[-1] if len(scales) > 1 else 1)
                fits = fits and columns == (-(-width * scheme.bits // 32) if is_packed else width)
            if fits:
                return scheme
        return None


def _read_codes(tensors: ModuleTensors, scheme: Scheme, shape: tuple[int, int]) -> torch.Tensor:
    """Return unsigned codes, uint8 [outputs, inputs]. Stored ones are signed, or half of the range is added."""
    from .packing import signed_to_unsigned, unpack_rows

    outputs, inputs = shape
    if "weight_packed" not in tensors:
        return signed_to_unsigned(tensors.load("weight", ("int8",), shape), scheme.bits)
    stored_shape = tuple(tensors.load("weight_shape", ("int32", "int64"), (2,)).tolist())
    if stored_shape != shape:
        tensors.fail("weight_shape", f"is {list(stored_shape)}, but the configuration requires {list(shape)}")
    packed = tensors.load("weight_packed", ("int32",), (outputs, -(-inputs * scheme.bits // 32)))
    return unpack_rows(packed, scheme.bits)[:, :inputs]


def _read_zeros(tensors: ModuleTensors, scheme: Scheme, outputs: int, groups: int) -> torch.Tensor:
    """Return zero points for unsigned codes, integers [outputs, groups]. They are packed along the outputs if they are
    int32."""
    import torch

    from .packing import unpack_rows

    name = "weight_zero_point"
    half = 1 << (scheme.bits - 1)
    if scheme.symmetric and name not in tensors:
        return torch.full((outputs, groups), half, device=tensors.device)
    if name in tensors and tensors.dtype(name) == "I32":
        packed = tensors.load(name, ("int32",), (-(-outputs * scheme.bits // 32), groups))
        return unpack_rows(packed.T, scheme.bits)[:, :outputs].T
    return tensors.load(name, ("int8",), (outputs, groups)).short() + half
