"""Locate a checkpoint's tensors by the names that its family uses. This module does not import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from .headers import TensorHeader

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def stored_tensors(folder: Path, renames: Iterable[tuple[str, str]] = ()) -> dict[str, tuple[Path, str]]:
    """Map the name of every tensor of a checkpoint to its file and its name in that file.

    Args:
        folder: the checkpoint's folder.
        renames: as in `ModelSpec.tensor_renames`.

    Raises:
        CheckpointError: there are no safetensors files, a shard is missing, or a file is damaged.
    """
    rules = list(renames)
    stored = {rename(name, rules): (file, name) for file in _files(folder) for name in tensor_names(file)}
    stored.pop("", None)
    return stored


def stored_headers(tensors: Mapping[str, tuple[Path, str]]) -> dict[str, TensorHeader]:
    """Read the headers of the tensors that `stored_tensors` returns.

    Raises:
        CheckpointError: a file is damaged.
    """
    names: dict[Path, list[tuple[str, str]]] = {}
    for name, (file, stored) in tensors.items():
        names.setdefault(file, []).append((name, stored))
    headers = {}
    for file, pairs in names.items():
        with open_tensors(file) as opened:
            headers.update({name: read_header(opened, stored) for name, stored in pairs})
    return headers


def read_header(opened: Any, name: str) -> TensorHeader:
    """Read the header of a tensor of a file that `open_tensors` opened."""
    tensor = opened.get_slice(name)
    return TensorHeader(tuple(tensor.get_shape()), str(tensor.get_dtype()))


@contextmanager
def open_tensors(file: Path, framework: str = "numpy") -> Iterator[Any]:
    """Open a safetensors file.

    Raises:
        CheckpointError: it cannot be read, also while it is open.
    """
    try:
        with safe_open(file, framework=framework) as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise unreadable_file_error(file, error) from error


def unreadable_file_error(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file} cannot be read: {error}. Copy or download it again.")


def rename(name: str, renames: Iterable[tuple[str, str]]) -> str:
    """Return the name of a tensor after `renames`, as in `ModelSpec.tensor_renames`."""
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        return _shards(folder)
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise CheckpointError(
            f"{folder} contains only pickled weights, which can execute code when they are loaded. If you trust them, "
            "convert them once with transformers: "
            "`AutoModelForImageTextToText.from_pretrained(folder).save_pretrained(other_folder)`."
        )
    raise CheckpointError(f"{folder} contains neither {SINGLE} nor {INDEX}. Copy or download the checkpoint again.")


def missing_weights(folder: Path) -> list[str]:
    """Return the names of files with weights that a checkpoint lacks, as after an interrupted download.

    Raises:
        CheckpointError: the index is damaged.
    """
    files = _listed_shards(folder) if (folder / INDEX).exists() else [folder / SINGLE]
    return [file.name for file in files if not file.exists()]


def _listed_shards(folder: Path) -> list[Path]:
    return [folder / name for name in sorted(set(_weight_map(folder).values()))]


def _weight_map(folder: Path) -> dict[str, str]:
    index = folder / INDEX
    try:
        listed = json.loads(index.read_text("utf-8"))["weight_map"].items()
        return {str(name): Path(file).name for name, file in listed}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}. Copy or download it again.") from error


def _shards(folder: Path) -> list[Path]:
    files = _listed_shards(folder)
    missing = ", ".join(file.name for file in files if not file.exists())
    if missing:
        raise CheckpointError(f"{folder} lacks {missing}, listed in {INDEX}. Copy or download the rest of it.")
    return files


def listed_tensors(folder: Path) -> Iterable[str]:
    """List the tensors of a checkpoint, by their names in it; none if its weights are missing, as before a download.

    Raises:
        CheckpointError: a file is damaged.
    """
    if (folder / INDEX).exists():
        return _weight_map(folder)
    return tensor_names(folder / SINGLE) if (folder / SINGLE).exists() else ()


def tensor_names(file: Path) -> list[str]:
    """List the tensors of a safetensors file, by their names in it.

    Raises:
        CheckpointError: it is damaged.
    """
    with open_tensors(file) as opened:
        return list(opened.keys())
