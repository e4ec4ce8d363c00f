"""`dashinfer-vlm pull`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.config.folders import expand_user
from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.models.checkpoint import HUB_ID, cached_instead, fetch, fetch_files, list_snapshot
from dashinfer_vlm_core.models.downloads import delete_damaged
from dashinfer_vlm_core.models.files import missing_weights
from dashinfer_vlm_core.models.hub_requests import Hub
from dashinfer_vlm_core.models.json_fields import CONFIG
from dashinfer_vlm_core.models.memory import ModelSize
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.progress import show_progress

from .engines import INTERRUPTED, log_warnings_only
from .fit import TUNE_STEP, FitEstimator, size_text

if TYPE_CHECKING:
    from dashinfer_vlm_core.models.hub import HubSnapshot


HUB_OPTION = click.Option(
    ["--hub"],
    type=click.Choice(get_args(Hub)),
    default="huggingface",
    show_default=True,
    help="Where to download from.",
)


@click.command(params=[HUB_OPTION])
@click.argument("model", metavar="OWNER/NAME")
@click.option(
    "--revision", metavar="NAME", help="Branch, tag or commit; defaults to `main`, on ModelScope to `master`."
)
def pull(*, model: str, revision: str | None, hub: Hub) -> None:
    """Download a model, after a check of what it needs.

    Configuration files come first: architecture, memory and space on the disk are checked before the weights are
    downloaded. An interrupted download is resumed, and all checksums are compared, also those of a model that is
    already on this machine.

    The folder of the model is printed. Other commands find a model of the Hugging Face Hub by its name; for one of
    ModelScope, pass them the folder, except for `run --hub modelscope`.

    HF_ENDPOINT and MODELSCOPE_DOMAIN name mirrors, HF_TOKEN is for models that are private or gated, HF_HUB_OFFLINE=1
    forbids downloads, and HF_HOME is the folder of the cache, which all programs of Hugging Face share.
    """
    log_warnings_only()
    config = EngineConfig(model=model, revision=revision, device="cpu")
    with interruptible(config, hub):
        click.echo(pull_model(config, hub))


def pull_model(config: EngineConfig, hub: Hub) -> Path:
    """Download a model of a hub, or verify that it is complete, and return its folder; a registered name or a folder is
    not downloaded.

    Raises:
        CheckpointError: it is not a model that can be run, or cannot be downloaded.
    """
    if not HUB_ID.fullmatch(config.model):
        return _local_folder(config.model)
    try:
        snapshot = list_snapshot(config.model, revision=config.revision, hub=hub)
    except CheckpointError as error:
        cached = cached_instead(error, config.model, revision=config.revision, hub=hub)
        if cached is None or missing_weights(cached[0]):
            raise
        folder, reason = cached
        click.echo(
            f"{config.model} is complete as of its cached revision {folder.name}. Whether there is a newer one, and the"
            f" checksums, could not be checked: {reason}",
            err=True,
        )
        return folder
    if snapshot.is_complete():
        with show_progress(f"Verifying {config.model}"):
            damaged = delete_damaged(snapshot)
        if not damaged:
            click.echo(f"{config.model} is complete.", err=True)
            return snapshot.folder
        click.echo(f"Damaged, and downloaded again: {', '.join(damaged)}", err=True)
    _show_needs(config, snapshot)
    return fetch(snapshot)


def _local_folder(model: str) -> Path:
    folder = load_plugins().models.get(model) or expand_user(model)
    if not (model and (folder / CONFIG).is_file()):  # an empty name would mean the current folder
        raise CheckpointError(
            f"{model!r} is not a model ID. Write OWNER/NAME, such as Qwen/Qwen3-VL-4B-Instruct.", param="model"
        )
    click.echo(f"{model} is already on this machine.", err=True)
    return folder


def _show_needs(config: EngineConfig, snapshot: HubSnapshot) -> None:
    """Check the configuration, and show what the model needs, before its weights are downloaded."""
    from dashinfer_vlm_core.models.task import read_pooling

    weights = [file for file in snapshot.files if file.has_weights]
    if not weights:
        raise CheckpointError(
            f"{config.model!r} has no safetensors files, so it cannot be run. GGUF files and pickled weights are not"
            " read. Use the repository of the original model.",
            param="model",
        )
    download = size_text(snapshot.bytes_to_download())  # with the files that come first
    fetch_files(snapshot, [file for file in snapshot.missing() if not file.has_weights])
    registry = load_plugins()
    with snapshot.without_weights() as folder:
        spec = registry.load_spec(folder)
        spec = replace(spec, pooling=read_pooling(spec, config.task))
        size = ModelSize.of(spec, file_bytes=sum(file.size for file in weights))
    estimator = FitEstimator(config, registry)
    fit = estimator.fit(config.model, size)
    click.echo(f"{config.model}: {download} to download; {fit.describe()}", err=True)
    for line in (fit.advice(), "" if estimator.is_measured else TUNE_STEP):
        if line:
            click.echo(line, err=True)


@contextlib.contextmanager
def interruptible(config: EngineConfig, hub: Hub) -> Iterator[None]:
    """On Ctrl-C, say what is left of a download, and exit."""
    try:
        yield
    except KeyboardInterrupt:
        options = "" if hub == "huggingface" else f" --hub {hub}"
        if config.revision:
            options += f" --revision {config.revision}"
        click.echo(
            f"\nInterrupted. `dashinfer-vlm pull {config.model}{options}` resumes the download; `dashinfer-vlm rm"
            f" {config.model}` deletes what is there.",
            err=True,
        )
        sys.exit(INTERRUPTED)
