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
from dashinfer_vlm_core.models.checkpoint import downloaded
from dashinfer_vlm_core.plugins import Registry, load_plugins

from .engines import quiet


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """A checkpoint that is on this machine.

    Attributes:
        name: what `--model` takes.
        origin: how it came here.
        folder: where its files are.
        bytes: what they take on the disk.
        dtype: number type of its weights; empty if it cannot be read.
        context: tokens of prompt and answer together; 0 if it cannot be read.
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
              help="Look for checkpoints in this folder and the folders in it; repeat it for more.")  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="Also list downloads that cannot be served here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def models(*, folders: tuple[Path, ...], everything: bool, as_json: bool) -> None:
    """List the models that are here: registered, downloaded, in folders.

    What the hub's cache holds of other kinds of models is left out, unless --all asks for it.
    """
    quiet()
    rows = list(find_models(load_plugins(), folders, everything=everything))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return
    cells = [(row.name, row.origin, _size(row.bytes), row.dtype, str(row.context or ""), row.problem) for row in rows]
    show_table(("Model", "From", "Size", "Numbers", "Context", "Problem"), cells)
    click.echo("\nOthers are downloaded on first use: dashinfer-vlm serve --model OWNER/NAME")


def find_models(registry: Registry, folders: tuple[Path, ...], *, everything: bool) -> Iterator[ModelRow]:
    for name, folder in sorted(registry.models.items()):
        yield _row(registry, name, "registered", folder)
    for name, folder in downloaded().items():
        row = _row(registry, name, "downloaded", folder)
        if everything or not row.problem:
            yield row
    for parent in folders:
        for folder in [parent, *sorted(path for path in parent.iterdir() if path.is_dir())]:
            if (folder / "config.json").is_file():
                yield _row(registry, str(folder), "folder", folder)


def _row(registry: Registry, name: str, origin: str, folder: Path) -> ModelRow:
    # Files of the hub's cache are links to their contents.
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    row = ModelRow(name=name, origin=origin, folder=str(folder), bytes=size)
    try:
        spec = registry.family_of(folder).load_spec(folder)
    except (CheckpointError, PluginError) as error:
        return dataclasses.replace(row, problem=error.message.split(";")[0])
    return dataclasses.replace(row, dtype=spec.dtype, context=spec.max_model_len)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
