"""Resolve a model name to its folder: a registered name, a folder, or a Hugging Face model ID."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..config.folders import expand_user
from ..errors import CheckpointError
from .downloads import Download
from .hub import HubFile, HubSnapshot, cache_folder, cached_snapshot, list_files
from .hub_requests import HUB_VARIABLES, Hub, HubRefusal
from .json_fields import CONFIG, read_fields
from .modelscope import DEFAULT_REVISION, list_modelscope_files
from .retrieval import extended_fields

HUB_NAMES: Mapping[Hub, str] = {"huggingface": "The Hugging Face Hub", "modelscope": "ModelScope"}

_OTHER_STEPS: Mapping[Hub, str] = {
    "huggingface": "use a folder, or try `dashinfer-vlm pull --hub modelscope {model}`",
    "modelscope": "or use a folder",
}
_ACCESS_STEPS: Mapping[Hub, str] = {
    "huggingface": "log in with `hf auth login`, or set HF_TOKEN to a token that may read it",
    "modelscope": "use a public model",
}
_HUBS = {"huggingface": list_files, "modelscope": list_modelscope_files}

logger: logging.Logger = logging.getLogger(__name__)

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
    folder = expand_user(name)
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


def is_hub_id(name: str, *, registered: Mapping[str, Path]) -> bool:
    """Return whether `find_model` asks the Hugging Face Hub for a model."""
    return name not in registered and not expand_user(name).exists() and HUB_ID.fullmatch(name) is not None


def cached_models() -> dict[str, Path]:
    """Return the folders of the checkpoints in the Hugging Face cache by model ID, each at its most recent revision."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(cache_folder()).repos
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
        CheckpointError: the Hub does not have it or denies access, its files are not valid, there is too little space,
            or the Hub cannot be reached and the cache does not have it.
    """
    try:
        snapshot = list_snapshot(repo_id, revision=revision)
    except CheckpointError as error:
        cached = cached_instead(error, repo_id, revision=revision)
        if cached is None:
            raise
        folder, reason = cached
        logger.warning("Using %s from the cache: the hub does not say whether it is current (%s).", repo_id, reason)
        return folder
    return fetch(snapshot)


def cached_instead(
    error: CheckpointError, repo_id: str, *, revision: str | None, hub: Hub = "huggingface"
) -> tuple[Path, str] | None:
    """Return the folder in the cache that replaces an answer of the hub, and why there is none; None without either.

    Args:
        error: that of `list_snapshot`.
        repo_id: owner and name.
        revision: the branch, tag or commit; None for the default of the hub.
        hub: the hub.
    """
    cause = error.__cause__
    if not isinstance(cause, _unavailable()):
        return None
    folder = cached_snapshot(repo_id, revision=revision or (DEFAULT_REVISION if hub == "modelscope" else None))
    return (folder, str(cause).partition("\n")[0] or type(cause).__name__) if folder else None


def list_snapshot(repo_id: str, *, revision: str | None = None, hub: Hub = "huggingface") -> HubSnapshot:
    """Return what a hub has of a repository.

    Raises:
        CheckpointError: the hub does not have it, denies access, or cannot be reached.
    """
    with _hub_errors(repo_id, hub):
        return _HUBS[hub](repo_id, revision=revision)


def fetch(snapshot: HubSnapshot) -> Path:
    """Download the files that are missing in the cache, and return the folder with all of them.

    Raises:
        CheckpointError: as for `download`.
    """
    if snapshot.is_complete():
        with contextlib.suppress(OSError):  # the cache may be read-only
            return snapshot.publish()
        return snapshot.folder
    fetch_files(snapshot, snapshot.missing())
    with _hub_errors(snapshot.repo_id, snapshot.hub):
        return snapshot.publish()


def fetch_files(snapshot: HubSnapshot, files: Sequence[HubFile]) -> None:
    """Download some files of a repository into the cache, where programs do not find them before `fetch`.

    Raises:
        CheckpointError: as for `download`.
    """
    with _hub_errors(snapshot.repo_id, snapshot.hub):
        Download(snapshot, files).run()


@contextlib.contextmanager
def _hub_errors(repo_id: str, hub: Hub) -> Iterator[None]:
    import httpx

    try:
        yield
    except HubRefusal as error:
        raise CheckpointError(_refusal(repo_id, error, hub), param="model") from error
    except (OSError, httpx.HTTPError) as error:
        raise CheckpointError(_download_problem(repo_id, error, hub), param="model") from error


def _unavailable() -> tuple[type[Exception], ...]:
    """The errors after which the cache is used."""
    import httpx
    from huggingface_hub import errors

    return (httpx.HTTPError, HubRefusal, errors.OfflineModeIsEnabled)


def _download_problem(repo_id: str, error: Exception, hub: Hub) -> str:
    import httpx
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            f"{repo_id!r} is not in the cache, and HF_HUB_OFFLINE forbids to download it. Unset HF_HUB_OFFLINE, or"
            " use a folder."
        )
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return (
            f"{HUB_NAMES[hub]} cannot be reached and {repo_id!r} is not in the cache. Check the connection"
            f" and {HUB_VARIABLES[hub]}, {_OTHER_STEPS[hub].format(model=repo_id)}."
        )
    if isinstance(error, OSError):
        return (
            f"Downloading {repo_id!r} failed: {error.strerror or error}. Check that the Hugging Face cache folder"
            f" {cache_folder()} is writable and has free space, or set HF_HOME to another folder. What was downloaded"
            " is kept, and the next attempt continues there."
        )
    return (
        f"The connection to {HUB_NAMES[hub][0].lower()}{HUB_NAMES[hub][1:]} was lost while {repo_id!r} was being"
        f" downloaded ({error}). Try again to resume the download."
    )


def _refusal(repo_id: str, error: HubRefusal, hub: Hub) -> str:
    if error.code == "GatedRepo":
        return (
            f"{repo_id!r} is gated: request access on its page, then log in with `hf auth login`, or set HF_TOKEN to a"
            " token that has access."
        )
    if error.code == "RevisionNotFound":
        return f"{repo_id!r} has no such revision. Check `revision`: a branch, a tag or a commit."
    if error.code == "EntryNotFound":
        return f"{HUB_NAMES[hub]} lists a file of {repo_id!r} that it does not have (404). Try again later."
    if error.code == "RepoNotFound" or error.status in {401, 404}:  # without a token, a missing model is a 401
        return f"{HUB_NAMES[hub]} has no model {repo_id!r}, or it is private. Check its name, or {_ACCESS_STEPS[hub]}."
    if error.status == 403:
        return f"{HUB_NAMES[hub]} denies access to {repo_id!r} (403): {_ACCESS_STEPS[hub]}."
    return f"{HUB_NAMES[hub]} responded to the request for {repo_id!r} with {error.status}. Try again later to resume."
