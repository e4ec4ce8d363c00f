"""`dashinfer-vlm models`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from dashinfer_vlm_core.cli.terminal import show_table
from dashinfer_vlm_core.errors import CheckpointError, PluginError
from dashinfer_vlm_core.models.checkpoint import cached_models
from dashinfer_vlm_core.plugins import Registry, load_plugins

from .engines import log_warnings_only


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """A checkpoint on this machine.

    Attributes:
        name: the value for `--model`.
        origin: `registered`, `downloaded` or `folder`.
        folder: the checkpoint folder.
        bytes: its size on disk.
        dtype: data type of the weights; empty if it cannot be read.
        context: maximum number of prompt and completion tokens; 0 if it cannot be read.
        problem: why it cannot be served; empty if it can.
    """

    name: str
    origin: str
    folder: str
    bytes: int
    dtype: str = ""
    context: int = 0
    problem: str = ""


@click.command()
@click.option("--folder", "folders", multiple=True, metavar="PATH",
              type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Also list checkpoints in this folder and its subfolders; repeatable.")  # fmt: skip
@click.option("--all", "include_all", is_flag=True, help="Also list downloads that cannot be served.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def models(*, folders: tuple[Path, ...], include_all: bool, as_json: bool) -> None:
    """List the models on this machine: registered, downloaded, in folders.

    Downloads that cannot be served are omitted, unless --all is given.
    """
    log_warnings_only()
    rows = list(find_models(load_plugins(), folders, include_all=include_all))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return
    cells = [(row.name, row.origin, _size(row.bytes), row.dtype, str(row.context or ""), row.problem) for row in rows]
    show_table(("Model", "Source", "Size", "Dtype", "Context", "Problem"), cells)
    click.echo("\nOther models are downloaded on first use: dashinfer-vlm serve --model OWNER/NAME")


def find_models(registry: Registry, folders: tuple[Path, ...], *, include_all: bool) -> Iterator[ModelRow]:
    for name, folder in sorted(registry.models.items()):
        yield _row(registry, name, "registered", folder)
    for name, folder in cached_models().items():
        row = _row(registry, name, "downloaded", folder)
        if include_all or not row.problem:
            yield row
    for parent in folders:
        for folder in [parent, *sorted(path for path in parent.iterdir() if path.is_dir())]:
            if (folder / "config.json").is_file():
                yield _row(registry, str(folder), "folder", folder)


def _row(registry: Registry, name: str, origin: str, folder: Path) -> ModelRow:
    # Files in the Hugging Face cache are symbolic links; stat() follows them.
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    row = ModelRow(name=name, origin=origin, folder=str(folder), bytes=size)
    try:
        spec = registry.load_spec(folder)
    except (CheckpointError, PluginError) as error:
        return dataclasses.replace(row, problem=error.message.split(";")[0])
    return dataclasses.replace(row, dtype=spec.dtype, context=spec.max_model_len)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
