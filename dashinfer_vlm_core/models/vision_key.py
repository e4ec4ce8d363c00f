"""What the embeddings of a vision encoder depend on besides the content. This module does not import torch."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from ..config import EngineConfig
from ..text_spec import TextWeightNames
from ..version import __version__
from .files import stored_tensors, unreadable_file_error
from .pooling import keeps_outputs
from .spec import ModelSpec

CHUNK_BYTES = 1 << 22


def vision_key(spec: ModelSpec, config: EngineConfig, *, kernels: str, family: str) -> bytes:
    """Return a digest of everything that the embeddings of a checkpoint depend on, valid in all processes.

    It covers the weights and the configuration of the vision encoder, the data types, the kernels, and the code. It is
    not a digest of how images are resized: the digest of an item covers its pixels after that.

    Args:
        spec: the checkpoint.
        config: the options.
        kernels: identifies the kernels of the vision encoder, see `KernelSelector.vision_identity`.
        family: identifies the model family and its version.

    Raises:
        CheckpointError: a file of the checkpoint cannot be read.
    """
    digest = hashlib.sha256()
    quantization = config.resolved_vision_quantization
    fields = (
        __version__, family, spec.model_type, kernels, config.dtype, spec.dtype, quantization, repr(spec.pixels),
        spec.text.visual_width, quantization == "int8" and keeps_outputs(spec.pooling),
    )  # fmt: skip
    digest.update(json.dumps(fields).encode())
    try:
        digest.update(hashlib.sha256((spec.folder / "config.json").read_bytes()).digest())
        for part in _vision_tensors(spec):
            digest.update(part)
    except OSError as error:
        raise unreadable_file_error(spec.folder, error) from error
    return digest.digest()


def _vision_tensors(spec: ModelSpec) -> Iterator[bytes]:
    read_header = functools.cache(_header)
    for name, (file, stored_name) in sorted(stored_tensors(spec.folder, spec.tensor_renames).items()):
        if not _is_of_text_model(name, spec.text.weights):
            entries, data = read_header(file)
            yield _tensor_digest(file, name, entries[stored_name], data)


def _is_of_text_model(name: str, names: TextWeightNames) -> bool:
    layers = names.layer.partition("{}")[0]
    return name.startswith((layers, f"{names.embedding}.", f"{names.norm}.", f"{names.head}.", f"{names.mtp}."))


def _header(file: Path) -> tuple[dict[str, dict[str, object]], int]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return json.loads(opened.read(length)), 8 + length


def _tensor_digest(file: Path, name: str, entry: dict[str, object], data: int) -> bytes:
    offsets = entry["data_offsets"]
    assert isinstance(offsets, list)
    start, end = offsets
    digest = hashlib.sha256(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
    with file.open("rb") as opened:
        opened.seek(data + start)
        remaining = end - start
        while remaining and (chunk := opened.read(min(remaining, CHUNK_BYTES))):
            digest.update(chunk)
            remaining -= len(chunk)
    return digest.digest()
