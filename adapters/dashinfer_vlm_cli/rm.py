"""`dashinfer-vlm rm`."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from dashinfer_vlm_core.config.folders import expand_user
from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.models.checkpoint import HUB_ID
from dashinfer_vlm_core.models.hub import cache_folder, repository_folder
from dashinfer_vlm_core.plugins import load_plugins

from .fit import size_text


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="OWNER/NAME...")
def rm(*, models: tuple[str, ...]) -> None:
    """Delete a downloaded model.

    All of its revisions are deleted from the cache of Hugging Face, also what an interrupted download left. Other
    programs that use this cache lose it too.
    """
    folders = {model: _folder(model) for model in models}  # checked before the first one is deleted
    for model, folder in folders.items():
        size = sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise CheckpointError(
                f"{model!r} cannot be deleted: {error.strerror}: {error.filename}. Stop programs that use it, and check"
                " the owner of the folder."
            ) from error
        click.echo(f"Deleted {model}, {size_text(size)}.")


def _folder(model: str) -> Path:
    if model in load_plugins().models:
        raise CheckpointError(f"{model!r} belongs to a plugin, and is deleted with it.", param="model")
    folder = repository_folder(model, cache_folder())
    if HUB_ID.fullmatch(model) and folder.is_dir() and not folder.is_symlink():
        return folder
    if model and expand_user(model).is_dir():
        raise CheckpointError(f"{model!r} is a folder. `rm` deletes only downloads: delete it yourself.", param="model")
    raise CheckpointError(
        f"{model!r} is not in {cache_folder()}. `dashinfer-vlm list` lists the models on this machine.", param="model"
    )
