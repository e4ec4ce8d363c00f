"""A model's name -> its folder: a registered name, a folder, or a hub id."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from ..errors import CheckpointError

# What a text model needs; archives, other frameworks' weights and pickles stay on the hub.
FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


def find_model(name: str, *, registered: Mapping[str, Path], revision: str | None = None) -> Path:
    """The folder of a checkpoint, downloaded with progress bars if it is a hub id that is not in the cache.

    Raises:
        CheckpointError: no such name, folder or repository, or the download failed.
    """
    if name in registered:
        return registered[name]
    folder = Path(name).expanduser()
    if name and folder.is_dir():  # an empty name would be the current folder
        return folder
    if HUB_ID.fullmatch(name):
        return download(name, revision=revision)
    known = ", ".join(sorted(registered)) or "none"
    raise CheckpointError(
        f"There is no model {name!r}: it is no registered name (known: {known}), no folder, and no hub id such as"
        " owner/name.",
        param="model",
    )


def downloaded() -> dict[str, Path]:
    """Checkpoints in the hub's cache, by hub id: the folder of the revision that was fetched last."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return {}
    revisions = {
        repository.repo_id: max(repository.revisions, key=lambda revision: revision.last_modified)
        for repository in repositories
        if repository.repo_type == "model" and repository.revisions
    }
    folders = {name: revision.snapshot_path for name, revision in sorted(revisions.items())}
    return {name: folder for name, folder in folders.items() if (folder / "config.json").is_file()}


def model_type(folder: Path) -> str:
    """The `model_type` of a checkpoint's `config.json`: which architecture reads it.

    Raises:
        CheckpointError: the file is missing or no such JSON.
    """
    path = folder / "config.json"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["model_type"])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): is this a checkpoint folder?") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no model configuration: it has no model_type. Download it again.") from error


def download(repo_id: str, *, revision: str | None = None) -> Path:
    """Bring a checkpoint from the Hugging Face hub into its cache; files that are there already are not fetched again.

    Raises:
        CheckpointError: the hub does not have it, refuses it, or cannot be reached and the cache does not hold it
            whole.
    """
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(FILES)))
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"The hub has no model {repo_id!r}, or it is private: check its name, or log in with `hf auth login`.",
            param="model",
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"The hub cannot be reached and {repo_id!r} is not in the cache: connect, or give a folder instead.",
            param="model",
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise CheckpointError(f"Downloading {repo_id!r} failed: {error}", param="model") from error
    except httpx.TransportError as error:  # the hub's client takes only some of these as "not reached"
        raise CheckpointError(
            f"The connection to the hub broke while {repo_id!r} was fetched ({error}): try again, what has come is"
            " kept.",
            param="model",
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"Downloading {repo_id!r} failed: {error.strerror or error}. See whether the folder of the hub's cache"
            " (HF_HOME) can be written to, and has room.",
            param="model",
        ) from error
