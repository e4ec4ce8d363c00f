"""A store in a folder: one file per embedding, which several processes on a machine can use at once.

Files are written under another name and renamed, so that a file is complete or missing. They are not synchronized with
the disk: what a power failure damages is recognized by its digest. The total size is in a file that is locked during
writes. If it is wrong, for example since files were deleted, it is corrected when the folder is full and at each start.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from ..config import MIB
from ..config.folders import access_problem, write_error
from ..errors import ConfigError
from .interface import EmbeddingStore, Read
from .settings import EmbeddingStoreOptions

SUFFIX = ".embedding"
TEMPORARY_SUFFIX = ".tmp"
SIZE_FILE = "size"

BLOCK = 4096
"""Files occupy multiples of this on disk."""

FILL = 0.9
"""Share of the maximum size that is left after files were deleted, so that not every write has to delete some."""

LOCK_TIMEOUT = 5.0
LOCK_INTERVAL = 0.01

STALE_SECONDS = 3600.0
"""Age of a temporary file whose process has died."""

THREADS = 2

_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a named pipe must not block
_CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

T = TypeVar("T")


class _Entry(NamedTuple):
    """A file of the folder; `used` is the time of its last use, in seconds since the epoch."""

    used: float
    size: int
    path: Path


class FileStore:
    """A bounded store in a folder that only this user (or root) can write to. The oldest files by last use are deleted.

    Args:
        folder: an existing folder.
        max_bytes: maximum size of all files, in whole blocks.
        ttl: seconds after the last use of a value when it expires.
    """

    def __init__(self, folder: Path, *, max_bytes: int, ttl: float) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._ttl = ttl
        # Separate threads: a file system that hangs must not occupy those of the engine.
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="dashinfer-vlm-embedding-store")
        with self._locked() as size_file:
            self._write_total(size_file, self._delete_expired())

    async def get(self, reads: Sequence[Read]) -> list[bytes | None]:
        return await self._run(lambda: [self._read(read) for read in reads])

    async def put(self, key: str, value: bytes) -> None:
        await self._run(lambda: self._write(key, value))

    async def describe(self) -> str:
        entries = await self._run(self._entries)
        size = sum(entry.size for entry in entries)
        count = sum(entry.path.name.endswith(SUFFIX) for entry in entries)
        return f"{self._folder}: {count} embeddings, {size / MIB:.1f} of {self._max_bytes / MIB:g} MiB"

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{SUFFIX}"

    def _read(self, read: Read) -> bytes | None:
        """Return the content of a file, and mark it as used; empty if other users may have written it."""
        try:
            descriptor = os.open(self._path(read.key), _OPEN_FILE)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            if error.errno == errno.ELOOP:  # a symbolic link
                return b""
            raise
        with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 - of a descriptor
            status = os.fstat(descriptor)
            if status.st_mtime < time.time() - self._ttl:
                return None
            if not stat.S_ISREG(status.st_mode) or access_problem(status):
                return b""
            with contextlib.suppress(OSError):  # on a read-only file system, the oldest files are deleted first
                os.utime(descriptor)
            return file.read(read.size + 1)

    def _write(self, key: str, value: bytes) -> None:
        """Write a file atomically, after deleting others if the folder is full.

        Raises:
            OSError: the folder cannot be written to, or is full.
        """
        temporary = self._folder / f".{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        try:
            with open(os.open(temporary, _CREATE_FILE, 0o600), "wb") as file:  # noqa: PTH123 - of a descriptor
                file.write(value)
            with self._locked() as size_file:
                self._insert(size_file, temporary, self._path(key), _disk_size(len(value)))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _insert(self, size_file: int, temporary: Path, path: Path, size: int) -> None:
        total = self._read_total(size_file)
        if total is None or total + size - _stored_size(path) > self._max_bytes:
            total = self._free_space(size, keep=temporary)
        # Before the file is renamed: after a crash, the total is too large rather than too small.
        self._write_total(size_file, total + size - _stored_size(path))
        temporary.replace(path)

    def _free_space(self, size: int, *, keep: Path) -> int:
        """Delete expired files, and then those with the oldest last use, and return the remaining size."""
        total = self._delete_expired(keep)
        target = max(0, int(FILL * self._max_bytes) - size)
        values = (entry for entry in sorted(self._entries(keep)) if entry.path.suffix == SUFFIX)
        while total > target and (entry := next(values, None)):
            entry.path.unlink(missing_ok=True)
            total -= entry.size
        return total

    def _delete_expired(self, keep: Path | None = None) -> int:
        """Delete expired files and those of dead processes, and return the size of the others."""
        now, total = time.time(), 0
        for entry in self._entries(keep):
            if entry.used < now - (STALE_SECONDS if entry.path.suffix == TEMPORARY_SUFFIX else self._ttl):
                entry.path.unlink(missing_ok=True)
            else:
                total += entry.size
        return total

    def _entries(self, keep: Path | None = None) -> list[_Entry]:
        """Return the values and temporary files of the folder, except one."""
        found = []
        with os.scandir(self._folder) as files:
            for file in files:
                if file.name.endswith((SUFFIX, TEMPORARY_SUFFIX)) and (keep is None or file.name != keep.name):
                    with contextlib.suppress(FileNotFoundError):
                        status = file.stat(follow_symlinks=False)
                        found.append(_Entry(status.st_mtime, _disk_size(status.st_size), Path(file.path)))
        return found

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock of the folder, and yield a descriptor of the file with the total size.

        Raises:
            OSError: the lock was not free within `LOCK_TIMEOUT`.
        """
        descriptor = os.open(self._folder / SIZE_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + LOCK_TIMEOUT
            while not _try_lock(descriptor):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process holds the lock of {self._folder}")
                time.sleep(LOCK_INTERVAL)
            yield descriptor
        finally:
            os.close(descriptor)  # which releases the lock

    @staticmethod
    def _read_total(size_file: int) -> int | None:
        """Return the total size that the last writer left; None if the file is damaged."""
        text = os.pread(size_file, 32, 0)
        return int(text) if text.isdigit() else None

    @staticmethod
    def _write_total(size_file: int, total: int) -> None:
        text = b"%020d" % total
        os.pwrite(size_file, text, 0)
        os.ftruncate(size_file, len(text))


def open_file_store(url: str, options: EmbeddingStoreOptions) -> EmbeddingStore:
    """Open the store in the folder of a `file:` URL; create the folder if it does not exist.

    Raises:
        ConfigError: the URL is invalid, the folder cannot be used, or it is too small for one embedding.
    """
    folder = _folder(url)
    if options.embedding_store_mib < options.embedding_store_max_value_mib:
        raise ConfigError(
            f"`embedding_store_mib` is {options.embedding_store_mib}, but one embedding may have"
            f" {options.embedding_store_max_value_mib} MiB. Increase it, or lower `embedding_store_max_value_mib`.",
            param="embedding_store_mib",
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = write_error(folder) or access_problem(folder.stat())
        if not problem:
            max_bytes, ttl = options.embedding_store_mib * MIB, options.embedding_store_ttl
            return FileStore(folder, max_bytes=max_bytes, ttl=ttl)
    except OSError as error:
        problem = error.strerror or str(error)
    raise ConfigError(
        f"`embedding_store`: the folder {folder} cannot be used: {problem}. Name a folder that only this user can write"
        " to.",
        param="embedding_store",
    )


def _folder(url: str) -> Path:
    parts = urlsplit(url)
    folder = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or folder in (Path(), Path("/")):
        message = f"`embedding_store` must name a folder, such as file:///var/cache/embeddings, got {url!r}."
        raise ConfigError(message, param="embedding_store")
    return folder


def _disk_size(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _stored_size(path: Path) -> int:
    """Return the size of a file on disk; 0 if it does not exist."""
    try:
        return _disk_size(path.lstat().st_size)
    except FileNotFoundError:
        return 0


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
