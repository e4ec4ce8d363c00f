"""Download the files of a `HubSnapshot`: several at once, resumed where an earlier attempt ended, and verified.

`snapshot_download` of the Hub's client discards unfinished files, names files in the cache as the hub says, and waits
for its threads on Ctrl-C.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, ClassVar

from ..errors import CheckpointError
from ..progress import LOG_FORMAT, Progress
from .hub import HubFile, HubSnapshot
from .hub_requests import HUB_VARIABLES, HubRefusal, open_response

logger: logging.Logger = logging.getLogger(__name__)

AT_ONCE = 4
"""Files that are downloaded at the same time."""

RETRIED = {408, 429, 500, 502, 503, 504}
"""Statuses of responses after which another attempt may succeed."""

RETRY_SECONDS = (1, 2, 4, 8)
"""Pauses between attempts to receive the rest of a file."""

BLOCK = 1 << 20
JOIN_SECONDS = 0.2
"""Ctrl-C is noticed between two attempts to join a thread."""


class TransferProgress(Progress):
    """Also shows the rate where there is no bar."""

    log_text: ClassVar[str] = LOG_FORMAT + ", {rate_fmt}"


class _Stopped(Exception):
    """Another file failed, or the user stops the download."""


class Download:
    """Downloads files of a snapshot into the cache. Whatever ends it, each file is complete, resumable or absent.

    Args:
        snapshot: the repository's files.
        files: those to download.
    """

    def __init__(self, snapshot: HubSnapshot, files: Sequence[HubFile]) -> None:
        self._snapshot = snapshot
        self._files = files
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._errors: list[Exception] = []

    def run(self) -> None:
        """Download what is missing.

        Raises:
            CheckpointError: the disk has too little space, a file is longer than stated, or its checksum is wrong.
            HubRefusal, httpx.HTTPError, OSError: a file cannot be received, see `open_response`, or written.
        """
        if not self._files:
            return
        check_space(self._snapshot, self._files)
        (self._snapshot.repository / "blobs").mkdir(parents=True, exist_ok=True)
        waiting: SimpleQueue[HubFile] = SimpleQueue()
        for file in self._files:
            waiting.put(file)
        present = sum(map(self._snapshot.bytes_on_disk, self._files))
        total = sum(file.size for file in self._files)
        options = {"desc": f"Downloading {self._snapshot.repo_id}", "unit": "B", "unit_scale": True}
        with TransferProgress(total=total, initial=present, **options) as progress:
            self._work(lambda: self._fetch_all(waiting, progress))

    def _work(self, work: Callable[[], None]) -> None:
        # Daemons: a thread that waits for a slow hub does not delay the end of the process.
        threads = [
            threading.Thread(target=work, name="dashinfer-vlm-download", daemon=True)
            for _ in range(min(AT_ONCE, len(self._files)))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive() and not self._errors:
                    thread.join(JOIN_SECONDS)
        finally:
            self._stop.set()
        if self._errors:
            raise self._errors[0]

    def _fetch_all(self, waiting: SimpleQueue[HubFile], progress: Progress) -> None:
        while not self._stop.is_set():
            try:
                self._fetch(waiting.get_nowait(), progress)
            except (Empty, _Stopped):  # noqa: PERF203 - a file takes seconds
                return
            except Exception as error:  # noqa: BLE001 - `run` raises it
                self._errors.append(error)
                return

    def _fetch(self, file: HubFile, progress: Progress) -> None:
        partial, blob = self._snapshot.partial(file), self._snapshot.blob(file)
        with _open_locked(partial) as stream:
            if blob.is_file():
                partial.unlink(missing_ok=True)
                return
            if stream.tell() > file.size:
                stream.truncate(0)
                stream.seek(0)
            try:
                self._complete(file, stream, progress)
            except CheckpointError:  # what was received is not the file
                partial.unlink()
                raise
            partial.replace(blob)

    def _complete(self, file: HubFile, stream: IO[bytes], progress: Progress) -> None:
        if stream.tell() < file.size:
            self._transfer(file, stream, progress)
        if digest_of(self._snapshot.partial(file), file, self._stop) != file.digest:
            option = "" if self._snapshot.hub == "huggingface" else f" --hub {self._snapshot.hub}"
            raise CheckpointError(
                f"The checksum of {file.path} is wrong: it was damaged on the way, or the hub has another file. It was"
                f" deleted. Run `dashinfer-vlm pull {self._snapshot.repo_id}{option}` to download it again.",
                param="model",
            )

    def _transfer(self, file: HubFile, stream: IO[bytes], progress: Progress) -> None:
        pauses = iter(RETRY_SECONDS)
        while True:
            received = stream.tell()
            if (error := self._try_to_receive(file, stream, progress)) is None:
                return
            if stream.tell() > received:
                pauses = iter(RETRY_SECONDS)
            seconds = next(pauses, None)
            if seconds is None:
                raise error
            logger.warning("%s: %s. Trying again in %d s.", file.path, error, seconds)
            if self._stop.wait(seconds):
                raise _Stopped

    def _try_to_receive(self, file: HubFile, stream: IO[bytes], progress: Progress) -> Exception | None:
        """Return the error if another attempt may succeed."""
        import httpx

        try:
            self._receive(file, stream, progress)
        except httpx.TransportError as error:
            return error
        except HubRefusal as error:
            if error.status not in RETRIED:
                raise
            return error
        return None

    def _receive(self, file: HubFile, stream: IO[bytes], progress: Progress) -> None:
        import httpx

        url, first = self._snapshot.url(file), stream.tell()
        with open_response(url, hub=self._snapshot.hub, first_byte=first) as response:
            if first and not response.headers.get("Content-Range", "").startswith(f"bytes {first}-"):
                stream.truncate(0)  # the hub does not send parts of files
                stream.seek(0)
                self._advance(progress, -first)
            for block in response.iter_bytes():
                if self._stop.is_set():
                    raise _Stopped
                if stream.tell() + len(block) > file.size:
                    raise CheckpointError(
                        f"The hub sends more than the {file.size} bytes that it states for {file.path}. Check"
                        f" {HUB_VARIABLES[self._snapshot.hub]}, and use a repository that you trust.",
                        param="model",
                    )
                stream.write(block)
                stream.flush()  # whatever ends the process, what was received is kept
                self._advance(progress, len(block))
        if stream.tell() < file.size:
            raise httpx.RemoteProtocolError("the connection ended before the file")

    def _advance(self, progress: Progress, count: int) -> None:
        with self._lock:
            progress.update(count)


@contextlib.contextmanager
def _open_locked(path: Path) -> Iterator[IO[bytes]]:
    """Open a file at its end. A process that downloads the same one may write, rename or delete it until then."""
    while True:
        with path.open("ab") as stream:
            with contextlib.suppress(OSError):  # file systems without locks
                fcntl.flock(stream, fcntl.LOCK_EX)
            if _is_at(path, stream):
                stream.seek(0, os.SEEK_END)
                yield stream
                return


def _is_at(path: Path, stream: IO[bytes]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    except FileNotFoundError:
        return False


def digest_of(path: Path, file: HubFile, stop: threading.Event | None = None) -> str:
    """Return the digest of a file's content, of the kind that the Hub states for it."""
    if len(file.digest) == hashlib.sha256().digest_size * 2:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            if stop and stop.is_set():
                raise _Stopped
            digest.update(block)
    return digest.hexdigest()


def delete_damaged(snapshot: HubSnapshot) -> list[str]:
    """Compare all files in the cache with their checksums; delete those that differ, and return their paths."""
    damaged = []
    for file in snapshot.files:
        path = snapshot.folder / file.path
        if path.is_file() and (path.stat().st_size != file.size or digest_of(path, file) != file.digest):
            # Not what they link to, which may be a file of the user.
            snapshot.blob(file).unlink(missing_ok=True)
            path.unlink()
            damaged.append(file.path)
    return damaged


def check_space(snapshot: HubSnapshot, files: Sequence[HubFile]) -> None:
    """Check that the disk has enough space for the rest of some files.

    Raises:
        CheckpointError: it has not.
    """
    needed = sum(file.size - min(file.size, snapshot.bytes_on_disk(file)) for file in files)
    folder = next(path for path in (snapshot.cache, *snapshot.cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{snapshot.repo_id!r} needs {needed / 1e9:.1f} GB more on the disk, but {snapshot.cache} has only"
            f" {free / 1e9:.1f} GB free. Delete files or other models (`dashinfer-vlm rm`), or set HF_HOME to a folder"
            " on another disk.",
            param="model",
        )
