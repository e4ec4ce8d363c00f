"""Resolve a model name to its folder: a registered name, a folder, or a Hugging Face model ID."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..progress import Progress
from .json_fields import CONFIG, read_fields
from .retrieval import extended_fields

# Configuration, tokenizer and safetensors only: archives, pickles and other frameworks' weights are not downloaded.
FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")
ADAPTER = "adapter_config.json"
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")

_FOLDER_STEP = (
    "Set `model` to a folder with a checkpoint as transformers saves it: config.json, tokenizer.json and safetensors"
    " files. GGUF files are not read; docs/quantization.md lists the formats."
)


def find_model(name: str, *, registered: Mapping[str, Path], revision: str | None = None) -> Path:
    """Return a checkpoint's folder; a model ID that is not in the cache is downloaded with progress bars.

    Raises:
        CheckpointError: there is no such name, folder or repository, or the download failed.
    """
    if name in registered:
        return registered[name]
    folder = Path(name).expanduser()
    if name and folder.is_dir():  # an empty name would mean the current folder
        return folder
    if folder.is_file():
        raise CheckpointError(f"{name!r} is a file. {_FOLDER_STEP}", param="model")
    if HUB_ID.fullmatch(name):
        return download(name, revision=revision)
    known = ", ".join(sorted(registered)) or "none"
    raise CheckpointError(
        f"There is no model {name!r}. Use a registered name (known: {known}), a folder, or a Hugging Face model ID such"
        " as owner/name.",
        param="model",
    )


def cached_models() -> dict[str, Path]:
    """Return the folders of the checkpoints in the Hugging Face cache by model ID, each at its most recent revision."""
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
    """Return the `model_type` of a checkpoint's `config.json`, which selects the architecture; of a retrieval model,
    that of the model that it extends.

    Raises:
        CheckpointError: the file is missing or is not a model configuration.
    """
    if not (folder / CONFIG).exists():
        step = _adapter_step(folder) if (folder / ADAPTER).is_file() else _FOLDER_STEP
        raise CheckpointError(f"{folder} has no {CONFIG}. {step}", param="model")
    config = extended_fields(read_fields(folder / CONFIG))
    if config.get("model_type") is None:
        config.fail_value("model_type", "must be the name of an architecture")
    return str(config.get("model_type"))


def _adapter_step(folder: Path) -> str:
    base = read_fields(folder / ADAPTER).get("base_model_name_or_path") or "the model that it was trained for"
    return f"It is a LoRA adapter: set `model` to {base}, and `lora` to a name and this folder."


def download(repo_id: str, *, revision: str | None = None) -> Path:
    """Download a checkpoint from the Hugging Face Hub into its cache; cached files are not downloaded again.

    Raises:
        CheckpointError: the Hub does not have it or denies access, or the Hub cannot be reached and the cache is
            incomplete.
    """
    import httpx
    from huggingface_hub import errors, snapshot_download

    try:
        with _download_progress(repo_id) as bars:
            return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(FILES), tqdm_class=bars))
    except (
        OSError,
        errors.HFValidationError,
        httpx.TransportError,
        RuntimeError,  # of hf_xet, for example on a full disk
    ) as error:
        raise CheckpointError(_download_problem(repo_id, error), param="model") from error


@contextlib.contextmanager
def _download_progress(repo_id: str) -> Iterator[type[Progress]]:
    """Yield a class for the hub's client: one bar for the bytes of all files, instead of several bars."""
    bars: list[Progress] = []  # the client does not close them

    class DownloadProgress(Progress):
        def __init__(self, *args: Any, **options: Any) -> None:
            options |= {"desc": f"Downloading {repo_id}", "disable": options.get("unit") != "B"}
            super().__init__(*args, **options)
            bars.append(self)

        def set_description(self, *args: Any, **options: Any) -> None:
            """Keep the description."""

    try:
        yield DownloadProgress
    finally:
        for bar in bars:
            bar.close()


def _download_problem(repo_id: str, error: Exception) -> str:
    from huggingface_hub import errors
    from huggingface_hub.constants import HF_HUB_CACHE

    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"The Hugging Face Hub has no model {repo_id!r}, or it is private. Check its name, or log in with"
            " `hf auth login`."
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"The Hugging Face Hub cannot be reached and {repo_id!r} is not in the cache. Check the connection, or use"
            " a folder."
        )
    if isinstance(error, errors.HfHubHTTPError | errors.HFValidationError):
        return f"Downloading {repo_id!r} failed: {error}"
    if isinstance(error, OSError | RuntimeError):
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        return (
            f"Downloading {repo_id!r} failed: {reason}. Check that the Hugging Face cache folder {HF_HUB_CACHE} is"
            " writable and has free space, or set HF_HOME to another folder."
        )
    return (
        f"The connection to the Hugging Face Hub was lost while {repo_id!r} was being downloaded ({error}). Try again"
        " to resume the download."
    )
