"""`dashinfer-vlm models`, also as `list`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from dashinfer_vlm_core.cli.terminal import show_table
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import CheckpointError, PluginError
from dashinfer_vlm_core.models.checkpoint import cached_models
from dashinfer_vlm_core.models.files import missing_weights
from dashinfer_vlm_core.models.hub import interrupted_downloads
from dashinfer_vlm_core.plugins import Registry, load_plugins

from .engines import log_warnings_only
from .fit import TUNE_STEP, Fit, FitEstimator, rate_text, size_text


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
@click.option("--fits", is_flag=True, help="List published models, with what they need of this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def models(*, folders: tuple[Path, ...], include_all: bool, fits: bool, as_json: bool) -> None:
    """List the models on this machine: registered, downloaded, in folders.

    Downloads that cannot be served are omitted, unless --all is given.
    """
    log_warnings_only()
    if fits:
        _show_fits(as_json=as_json)
        return
    rows = list(find_models(load_plugins(), folders, include_all=include_all))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return
    cells = [
        (row.name, row.origin, size_text(row.bytes), row.dtype, str(row.context or ""), row.problem) for row in rows
    ]
    show_table(("Model", "Source", "Size", "Dtype", "Context", "Problem"), cells)
    click.echo("\nOther models: dashinfer-vlm models --fits lists what fits, dashinfer-vlm pull OWNER/NAME downloads")


def find_models(registry: Registry, folders: tuple[Path, ...], *, include_all: bool) -> Iterator[ModelRow]:
    for name, folder in sorted(registry.models.items()):
        yield model_row(registry, name, "registered", folder)
    for name, folder in cached_models().items():
        row = model_row(registry, name, "downloaded", folder)
        if include_all or not row.problem or row.context:
            yield row
    for name, folder in interrupted_downloads().items():
        yield ModelRow(
            name=name,
            origin="downloaded",
            folder=str(folder),
            bytes=_size(folder),
            problem=_incomplete(name, "downloaded", []),
        )
    for parent in folders:
        for folder in [parent, *sorted(path for path in parent.iterdir() if path.is_dir())]:
            if (folder / "config.json").is_file():
                yield model_row(registry, str(folder), "folder", folder)


def model_row(registry: Registry, name: str, origin: str, folder: Path) -> ModelRow:
    """Return what is listed of a checkpoint; one that only lacks files has a context and a problem."""
    row = ModelRow(name=name, origin=origin, folder=str(folder), bytes=_size(folder))
    try:
        spec = registry.load_spec(folder)
        row = dataclasses.replace(row, dtype=spec.dtype, context=spec.max_model_len)
        missing = missing_weights(folder)
    except (CheckpointError, PluginError) as error:
        return dataclasses.replace(row, problem=error.message.split(";")[0])
    return dataclasses.replace(row, problem=_incomplete(name, origin, missing)) if missing else row


def _size(folder: Path) -> int:
    # Files in the Hugging Face cache are symbolic links; stat() follows them.
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _incomplete(name: str, origin: str, missing: list[str]) -> str:
    step = f"run: dashinfer-vlm pull {name}" if origin == "downloaded" else f"it lacks {missing[0]}"
    return f"incomplete; {step}"


def _show_fits(*, as_json: bool) -> None:
    from dashinfer_vlm_core.models.published import MODELS, hub_id

    estimator = FitEstimator(EngineConfig(device="cpu"), load_plugins())
    fits = [(estimator.fit(hub_id(name), size), size.file_bytes) for name, size in MODELS.items()]
    if as_json:
        click.echo(json.dumps([_fit_as_json(fit, files) for fit, files in fits], indent=2))
        return
    columns = ("Model", "Download", "16 bits", "int4", "Tokens/s", "with int4", "Fits")
    show_table(columns, [_fit_cells(fit, files) for fit, files in fits])
    click.echo(
        f"\n16 bits and int4: memory with --quantization none and int4, of {size_text(fits[0][0].memory)}, with caches."
        " Tokens/s: of one conversation."
    )
    if not estimator.is_measured:
        click.echo(f"Tokens/s are not known: {TUNE_STEP}")


def _fit_cells(fit: Fit, files: int) -> tuple[str, ...]:
    first, last = fit.variants[0], fit.variants[-1]
    return (
        fit.name,
        size_text(files),
        size_text(first.estimate.total),
        size_text(last.estimate.total) if last is not first else "",
        rate_text(first.tokens_per_second),
        rate_text(last.tokens_per_second) if last is not first else "",
        _fits_cell(fit),
    )


def _fits_cell(fit: Fit) -> str:
    if fit.fitting is None:
        return "no"
    return "yes" if fit.fitting is fit.variants[0] else f"with {fit.fitting.bits}"


def _fit_as_json(fit: Fit, files: int) -> dict[str, object]:
    return {"name": fit.name, "download_bytes": files, "memory_bytes": fit.memory, **fit_variants(fit)}


def fit_variants(fit: Fit) -> dict[str, object]:
    """Return needs and speed by the bits of weights, as JSON."""
    return {
        "fits": fit.fitting.bits if fit.fitting else None,
        "variants": {
            each.bits: {**dataclasses.asdict(each.estimate), "tokens_per_second": each.tokens_per_second}
            for each in fit.variants
        },
    }
