"""The files of a repository on the Hugging Face Hub, and where its cache has them. What a hub sends is not trusted."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import quote

from ..errors import CheckpointError
from .hub_requests import HUB_VARIABLES, Hub, get_page

# Configuration, tokenizer and safetensors only: archives, pickles and other frameworks' weights are not downloaded.
FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")
WEIGHTS = "*.safetensors"

MAX_FILES = 10_000
"""Of a repository. Published checkpoints have less than 300."""

MAX_PAGES = 100
"""Of the list of files. Pages may be empty, so that their number of files is no limit."""

MAX_TEXT_BYTES = 200 * 10**6
"""Of a file without weights, which is read as a whole. Published tokenizers have at most 35 MB."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PATH = re.compile(r"[^\x00-\x1f\x7f\\:]{1,200}")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFile:
    """A file of a repository.

    Attributes:
        path: its path in the repository, relative and without `..`.
        size: in bytes.
        digest: SHA-256 of its content, or for small files git's SHA-1; also its name in the cache.
    """

    path: str
    size: int
    digest: str

    @property
    def has_weights(self) -> bool:
        return fnmatch(self.path, WEIGHTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSnapshot:
    """A commit of a repository, in the layout of Hugging Face's cache: `snapshots` links to the content in `blobs`.

    Attributes:
        repo_id: owner and name.
        revision: the branch, tag or commit that was asked for.
        commit: its commit.
        files: those that a checkpoint consists of.
        cache: the cache folder.
        base_url: the address of its files.
        hub: the hub that has it.
    """

    repo_id: str
    revision: str
    commit: str
    files: tuple[HubFile, ...]
    cache: Path
    base_url: str
    hub: Hub

    def url(self, file: HubFile) -> str:
        return f"{self.base_url}/{quote(file.path)}"

    @property
    def repository(self) -> Path:
        return repository_folder(self.repo_id, self.cache)

    @property
    def folder(self) -> Path:
        return self.repository / "snapshots" / self.commit

    def blob(self, file: HubFile) -> Path:
        return self.repository / "blobs" / file.digest

    def partial(self, file: HubFile) -> Path:
        """Where a file is until it is complete."""
        return self.repository / "blobs" / f"{file.digest}.incomplete"

    def missing(self) -> list[HubFile]:
        """Return the files that must be downloaded, at least in part."""
        return [file for file in self.files if not (self.blob(file).is_file() or (self.folder / file.path).is_file())]

    def is_complete(self) -> bool:
        """Whether the cache has all files, where programs look for them."""
        return all((self.folder / file.path).is_file() for file in self.files)

    def bytes_to_download(self) -> int:
        """Return the number of bytes that are not on this machine."""
        return sum(file.size - min(self.bytes_on_disk(file), file.size) for file in self.missing())

    def bytes_on_disk(self, file: HubFile) -> int:
        """Return how much of a file an interrupted download left."""
        try:
            return self.partial(file).stat().st_size
        except OSError:
            return 0

    def publish(self) -> Path:
        """Link the snapshot to its files, all of which have been downloaded, and return its folder."""
        for file in self.files:
            target = self.folder / file.path
            if not target.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                _link(self.blob(file), target)
        reference = self.repository / "refs" / self.revision
        if self.revision != self.commit and not (reference.is_file() and reference.read_text() == self.commit):
            reference.parent.mkdir(parents=True, exist_ok=True)
            _write(reference, self.commit)
        return self.folder

    @contextlib.contextmanager
    def without_weights(self) -> Iterator[Path]:
        """Return a temporary folder with the files that are on this machine and have no weights."""
        with tempfile.TemporaryDirectory() as folder:
            for file in self.files:
                source = next((path for path in (self.blob(file), self.folder / file.path) if path.is_file()), None)
                if source and not file.has_weights:
                    target = Path(folder, file.path)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.symlink_to(source.resolve())
            yield Path(folder)


def list_files(repo_id: str, *, revision: str | None) -> HubSnapshot:
    """Ask the Hub which files a repository has.

    Raises:
        CheckpointError: the Hub's response is not valid.
        HubRefusal, httpx.HTTPError, OSError: it has none, see `open_response`.
    """
    from huggingface_hub import constants

    name = revision or "main"
    api = f"{constants.ENDPOINT}/api/models/{repo_id}"
    try:
        commit = str(get_page(f"{api}/revision/{quote(name, safe='')}", hub="huggingface").content["sha"])
        if not _COMMIT.fullmatch(commit) or not is_safe_path(name):
            raise invalid_list(repo_id, f"the commit {commit!r} of {name!r}")
        files = checked_files(repo_id, _listed(repo_id, f"{api}/tree/{commit}?recursive=true&expand=false"))
    except (LookupError, TypeError, AttributeError) as error:
        raise invalid_list(repo_id, f"something unexpected ({error!r})") from error
    return HubSnapshot(
        repo_id=repo_id,
        revision=name,
        commit=commit,
        files=files,
        cache=cache_folder(),
        base_url=f"{constants.ENDPOINT}/{repo_id}/resolve/{commit}",
        hub="huggingface",
    )


class ListedFile(NamedTuple):
    """What a hub states about a file, of any type."""

    path: object
    size: object
    digest: object


def _listed(repo_id: str, url: str) -> Iterator[ListedFile]:
    for _ in range(MAX_PAGES):
        entries, url = get_page(url, hub="huggingface")
        for entry in entries:
            if entry["type"] == "file":
                lfs = entry.get("lfs")
                size, digest = (lfs["size"], lfs["oid"]) if lfs else (entry["size"], entry["oid"])
                yield ListedFile(entry["path"], size, digest)
        if not url:
            return
    raise invalid_list(repo_id, f"more than {MAX_PAGES} pages of files")


def checked_files(repo_id: str, listed: Iterable[ListedFile], *, hub: Hub = "huggingface") -> tuple[HubFile, ...]:
    """Return the files of a checkpoint among those of a repository.

    Raises:
        CheckpointError: the list is too long, or has a path outside of the repository, a size or a digest that is not
            valid.
    """
    found = []
    for number, file in enumerate(listed):
        if number == MAX_FILES:
            raise invalid_list(repo_id, f"more than {MAX_FILES} files", hub=hub)
        path, size, digest = file
        if isinstance(path, str) and not any(fnmatch(path, pattern) for pattern in FILES):
            continue
        if not isinstance(path, str) or not is_safe_path(path):
            raise invalid_list(repo_id, f"a file named {path!r}", hub=hub)
        if type(size) is not int or size < 0 or not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
            raise invalid_list(repo_id, f"the size {size!r} or checksum {digest!r} of {path}", hub=hub)
        if size > MAX_TEXT_BYTES and not fnmatch(path, WEIGHTS):
            raise invalid_list(repo_id, f"{size / 1e6:,.0f} MB of {path}", hub=hub)
        found.append(HubFile(path=path, size=size, digest=digest))
    return tuple(found)


def is_safe_path(path: object) -> bool:
    """Whether a path of a repository is relative, and stays in its folder."""
    return (
        isinstance(path, str)
        and _PATH.fullmatch(path) is not None
        and not path.startswith("/")
        and str(PurePosixPath(path)) == path
        and ".." not in path.split("/")
        and path != "."
    )


def cached_snapshot(repo_id: str, *, revision: str | None) -> Path | None:
    """Return the folder of a repository in the cache at a revision, without asking the Hub; None if there is none."""
    repository = repository_folder(repo_id, cache_folder())
    name = revision or "main"
    if not is_safe_path(name):
        return None
    try:
        commit = name if _COMMIT.fullmatch(name) else (repository / "refs" / name).read_text().strip()
    except OSError:
        return None
    folder = repository / "snapshots" / commit
    return folder if _COMMIT.fullmatch(commit) and folder.is_dir() else None


def interrupted_downloads() -> dict[str, Path]:
    """Return the folders of repositories in the cache of which no snapshot is complete, by their IDs."""
    folders = sorted(cache_folder().glob("models--*--*"))
    started = [folder for folder in folders if (folder / "blobs").is_dir() and not (folder / "snapshots").is_dir()]
    return {folder.name.removeprefix("models--").replace("--", "/", 1): folder for folder in started}


def cache_folder() -> Path:
    """Return the folder of Hugging Face's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repository_folder(repo_id: str, cache: Path) -> Path:
    """Return the folder of a repository in the cache, which need not exist."""
    return cache / f"models--{repo_id.replace('/', '--')}"


def invalid_list(repo_id: str, problem: str, *, hub: Hub = "huggingface") -> CheckpointError:
    """Return the error for a response of a hub that is not valid."""
    return CheckpointError(
        f"The hub lists {problem} for {repo_id!r}, which is not valid, so nothing was downloaded. Check"
        f" {HUB_VARIABLES[hub]}, and use a repository that you trust.",
        param="model",
    )


def _link(source: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as folder:
        made = Path(folder, "link")
        made.symlink_to(os.path.relpath(source, target.parent))
        made.replace(target)


def _write(file: Path, text: str) -> None:
    with tempfile.TemporaryDirectory(prefix=".", dir=file.parent) as folder:
        made = Path(folder, "text")
        made.write_text(text)
        made.replace(file)
