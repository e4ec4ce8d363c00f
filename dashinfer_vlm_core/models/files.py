"""Where a checkpoint's tensors are stored, by the names that its family uses; no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def stored_tensors(folder: Path, renames: Iterable[tuple[str, str]] = ()) -> dict[str, tuple[Path, str]]:
    """Name -> (file, name in it) of every tensor of the checkpoint in `folder`.

    Args:
        folder: of the checkpoint.
        renames: as in `ModelSpec.tensor_renames`.

    Raises:
        CheckpointError: there are no safetensors, a shard is missing, or a file is damaged.
    """
    rules = [(re.compile(pattern), replacement) for pattern, replacement in renames]
    return {_renamed(name, rules): (file, name) for file in _files(folder) for name in _names(file)}


def damaged(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file} cannot be read: {error}. Copy or download it again.")


def _renamed(name: str, rules: Iterable[tuple[re.Pattern[str], str]]) -> str:
    for pattern, replacement in rules:
        name = pattern.sub(replacement, name)
    return name


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        return _shards(folder)
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise CheckpointError(
            f"{folder} holds weights as pickles only, which can run code when they are read. Convert them once, where "
            "you trust them, by transformers: "
            "`AutoModelForImageTextToText.from_pretrained(folder).save_pretrained(other_folder)`."
        )
    raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}. Copy or download the checkpoint again.")


def _shards(folder: Path) -> list[Path]:
    """The files that the index lists, all of them there."""
    index = folder / INDEX
    try:
        listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = [folder / Path(name).name for name in sorted(listed)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}. Copy or download it again.") from error
    missing = ", ".join(file.name for file in files if not file.exists())
    if missing:
        raise CheckpointError(f"{folder} lacks {missing}, listed in {INDEX}. Copy or download the rest of it.")
    return files


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="numpy") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise damaged(file, error) from error
