"""Find the format of a checkpoint's weights, and what they take in memory. This module does not import torch."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from ..headers import TensorHeader, module_of
from ..json_fields import CONFIG, JsonFields, read_fields
from .interface import CheckpointFormat, ModuleReader, StoredBits, WeightMemory

FIELD = "quantization_config"
OLDER_FIELD = "compression_config"
"""The name of `FIELD` in checkpoints of the first versions of compressed-tensors."""


def find_reader(folder: Path, formats: Mapping[str, CheckpointFormat]) -> ModuleReader | None:
    """Return the reader for the quantized weights of the checkpoint in `folder`; None if `config.json` declares none.

    Raises:
        CheckpointError: `config.json` is missing or invalid, none of `formats` has the name of its `quant_method`, or
            the format does not support its options.
    """
    config = read_fields(folder / CONFIG)
    parents = [config] if config.get("text_config") is None else [config, config.section("text_config")]
    declared = [
        (parent, field) for parent in parents for field in (FIELD, OLDER_FIELD) if parent.get(field) is not None
    ]
    if not declared:
        return None
    parent, field = declared[0]
    fields = parent.section(field)
    return _format(fields, formats).create_reader(fields)


def _format(fields: JsonFields, formats: Mapping[str, CheckpointFormat]) -> CheckpointFormat:
    # The first versions of compressed-tensors did not write `quant_method`.
    name = fields.get("quant_method") or ("compressed-tensors" if fields.get("config_groups") is not None else None)
    if not isinstance(name, str) or name not in formats:
        fields.fail(
            "quant_method",
            f"is {name!r}, which is not supported" if name else "is missing",
            f"Supported are {', '.join(sorted(formats))}: use a checkpoint in one of these formats, or the unquantized"
            " checkpoint with `--quantization int4` or `int8`.",
        )
    return formats[name]


def quantized_modules(names: Iterable[str], reader: ModuleReader) -> frozenset[str]:
    """Return the modules that have one of the reader's markers among the tensors `names`."""
    split = (module_of(name) for name in names)
    return frozenset(module for module, tensor in split if tensor in reader.markers)


def weight_memory(
    headers: Mapping[str, TensorHeader], reader: ModuleReader, *, supported: Container[StoredBits], itemsize: int
) -> WeightMemory:
    """Return what becomes of the quantized weights of a checkpoint.

    Args:
        headers: those of all tensors, by name.
        reader: the checkpoint's.
        supported: the bits that the kernels keep.
        itemsize: size of a dequantized weight in bytes.
    """
    quantized = quantized_modules(headers, reader)
    modules: dict[str, dict[str, TensorHeader]] = {module: {} for module in quantized}
    for name, header in headers.items():
        module, tensor = module_of(name)
        if module in quantized and tensor != "bias":
            modules[module][tensor] = header
    stored = [(reader.describe(part), sum(header.nbytes for header in part.values())) for part in modules.values()]
    kept = [size for matrix, size in stored if matrix.bits in supported]
    widened = [(matrix.weights, size) for matrix, size in stored if matrix.bits not in supported]
    return WeightMemory(
        format=reader.name,
        kept=len(kept),
        kept_bytes=sum(kept),
        widened=len(widened),
        widened_bytes=sum(size for _, size in widened),
        memory_bytes=itemsize * sum(weights for weights, _ in widened),
    )
