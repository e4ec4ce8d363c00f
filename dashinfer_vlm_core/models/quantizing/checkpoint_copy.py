"""Write a copy of a checkpoint with other tensors. One file of weights at a time is in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from safetensors.torch import save_file
from torch import Tensor

from ...errors import CheckpointError, ConfigError
from ..files import INDEX, open_tensors, stored_tensors
from ..json_fields import CONFIG, read_fields
from ..spec import ModelSpec

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
"""Files with weights, which would still be those of the original."""

FREE_BYTES = 64 << 20
"""Free disk space that remains."""

Convert: TypeAlias = Callable[[str, str, Tensor], Mapping[str, Tensor]]
"""Returns the tensors that replace one, by their stored names. The arguments are the tensor's name after
`ModelSpec.tensor_renames`, its stored name, and its values."""


def check_output_folder(folder: Path) -> None:
    """Check that a checkpoint can be written to `folder`.

    Raises:
        ConfigError: it exists, and is not an empty folder.
    """
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ConfigError(f"{folder} exists, and is not overwritten. Choose another folder, or remove it.")


def check_unquantized(spec: ModelSpec) -> None:
    """Check that the weights of a checkpoint have their original precision.

    Raises:
        CheckpointError: they are quantized.
    """
    if spec.quantization:
        raise CheckpointError(
            f"{spec.folder} has quantized weights already ({spec.quantization.name}). Use the original checkpoint."
        )


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Create a temporary folder next to `folder`, which becomes `folder` at the end, or is deleted after an error.

    Raises:
        ConfigError: `folder` exists, or cannot be written.
    """
    check_output_folder(folder)
    target = folder.absolute()
    draft = target.with_name(f".{target.name}.partial")
    try:
        draft.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            f"{draft} exists: another process is writing it, or was killed. Remove it, or choose another folder."
        ) from None
    except OSError as error:
        raise ConfigError(f"{draft} cannot be created: {error.strerror}. Choose another folder.") from error
    try:
        yield draft
        draft.replace(target)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def copy_checkpoint(
    spec: ModelSpec, folder: Path, convert: Convert, config: Mapping[str, Any], advance: Callable[[], None]
) -> None:
    """Write a checkpoint into an existing, empty folder.

    Args:
        spec: the original.
        folder: the folder.
        convert: converts each tensor.
        config: the content of `config.json`.
        advance: is called after each tensor of the original.

    Raises:
        CheckpointError: a file of the original cannot be read.
        ConfigError: the disk is full.
    """
    files: dict[Path, list[tuple[str, str]]] = {}
    for name, (file, stored) in stored_tensors(spec.folder, spec.tensor_renames).items():
        files.setdefault(file, []).append((name, stored))
    _check_free_space(folder, sum(file.stat().st_size for file in files))
    weight_map: dict[str, str] = {}
    total = 0
    for file, names in files.items():
        tensors = _converted(file, names, convert, advance)
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if (spec.folder / INDEX).exists():
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / CONFIG, config)
    _copy_other_files(spec.folder, folder)


def read_config(folder: Path) -> dict[str, Any]:
    """Read the content of `config.json`.

    Raises:
        CheckpointError: it is missing or invalid.
    """
    return dict(read_fields(folder / CONFIG).values)


def _converted(
    file: Path, names: list[tuple[str, str]], convert: Convert, advance: Callable[[], None]
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, stored in names:
        with open_tensors(file, "pt") as opened:
            tensor = opened.get_tensor(stored)
        tensors |= {part: each.contiguous() for part, each in convert(name, stored, tensor).items()}
        advance()
    return tensors


def _check_free_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size + FREE_BYTES:
        raise ConfigError(
            f"{folder.parent} has {free / 1e9:.1f} GB of free space, but up to {(size + FREE_BYTES) / 1e9:.1f} GB are"
            " needed. Choose a folder on another disk."
        )


def _copy_other_files(source: Path, target: Path) -> None:
    """Copy what was not written, also the configurations of the modules of sentence-transformers, in folders."""
    for path in sorted([*source.iterdir(), *source.glob(f"*/{CONFIG}")]):
        copy = target / path.relative_to(source)
        if path.is_file() and path.suffix not in WEIGHT_SUFFIXES and not copy.exists():
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
