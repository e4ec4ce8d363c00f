"""A folder of compiled libraries, which are executed: they are checked before they are loaded.

Owner and mode keep other users out. The digest in a file's name finds damage, such as a truncated file, which would end
the process with SIGBUS. It does not keep anyone out: every process that can write a file can compute its digest.

Files are opened relative to the descriptor of the folder that was checked, and a library is loaded from the descriptor
that was checked. A user who can write to a parent folder can therefore not exchange them between check and use.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dashinfer_vlm_core.config.folders import access_problem

logger: logging.Logger = logging.getLogger(__name__)

DIGEST_LENGTH = 32
"""Length of the hexadecimal digest in a file's name: the first half of the SHA-256 digest of its content."""

CHUNK_SIZE = 1 << 20
DESCRIPTORS = Path("/proc/self/fd")

_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a named pipe must not block
_CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class FolderError(Exception):
    """Other users can write to the folder, or have created it.

    Attributes:
        reason: what is wrong with it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RejectedLibraryError(Exception):
    """A file is not a whole library that this user or root wrote; the message gives the reason."""


class CheckedLibrary(NamedTuple):
    """A library whose owner, mode and content have been checked.

    Attributes:
        descriptor: a descriptor of its file. The owner of this object closes it or passes it to `load`.
        path: its path.
    """

    descriptor: int
    path: Path

    def load(self) -> ctypes.CDLL:
        """Load the file that was checked, through its descriptor if the system has /proc, and otherwise by path.

        The descriptor stays open as long as the process runs. The dynamic loader identifies a library by its path: if
        the number were used again, it would return this library in place of the next one.

        Raises:
            OSError: the dynamic loader rejects it.
        """
        by_descriptor = DESCRIPTORS / str(self.descriptor)
        try:
            return ctypes.CDLL(str(by_descriptor if by_descriptor.exists() else self.path))
        except OSError:
            os.close(self.descriptor)
            raise


class LibraryCache:
    """An open folder of libraries that only this user (or root) can write to.

    A library is found by its stem, which identifies how it was compiled: `STEM-DIGEST.so`.
    """

    def __init__(self, folder: Path, descriptor: int) -> None:
        self._folder = folder
        self._descriptor = descriptor

    @classmethod
    @contextlib.contextmanager
    def open(cls, folder: Path) -> Iterator[LibraryCache]:
        """Open an existing folder.

        Raises:
            FolderError: it belongs to another user, or other users can write to it.
            OSError: it cannot be opened.
        """
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if problem := access_problem(os.fstat(descriptor)):
                raise FolderError(problem)
            yield cls(folder, descriptor)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def locked(self, stem: str) -> Iterator[None]:
        """Hold the lock of a library against other threads and processes, so that it is compiled once.

        The lock is a file `.STEM.lock`, which exists while someone holds it or waits for it. On a file system without
        locks, processes may compile at the same time. Each library is still written atomically.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                stack.enter_context(self._locked_file(f".{stem}.lock"))
            yield

    @contextlib.contextmanager
    def _locked_file(self, name: str) -> Iterator[None]:
        descriptor = self._open_locked(name)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._descriptor)  # those that wait for this file notice that it was removed
            os.close(descriptor)

    def _open_locked(self, name: str) -> int:
        """Create a file if it does not exist, lock it, and return its descriptor."""
        while True:
            descriptor = os.open(name, _LOCK_FILE, 0o600, dir_fd=self._descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if self._is_named(descriptor, name):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _is_named(self, descriptor: int, name: str) -> bool:
        """Whether the folder still has this file under this name."""
        try:
            found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(descriptor))

    def find(self, stem: str) -> CheckedLibrary | None:
        """Return the library of this stem, or None if there is none that can be trusted."""
        for name in self._names(stem):
            with contextlib.suppress(RejectedLibraryError):
                return self._open_checked(name)
        return None

    def remove_rejected(self, stem: str) -> None:
        """Remove the files of this stem that cannot be trusted, with a warning for each. Call it with the lock held."""
        for name in self._names(stem):
            if problem := self._problem(name):
                logger.warning("%s is not loaded: %s. The kernels are compiled again.", self._folder / name, problem)
                with contextlib.suppress(OSError):  # the new file replaces it, or has another name
                    os.unlink(name, dir_fd=self._descriptor)

    def store(self, stem: str, content: bytes) -> CheckedLibrary:
        """Write a library atomically and durably.

        Raises:
            OSError: the folder cannot be written to.
            RejectedLibraryError: the file that was written cannot be read back.
        """
        name = f"{stem}-{_digest(content)}.so"
        temporary = f".{name}.{secrets.token_hex(8)}"
        try:
            with open(os.open(temporary, _CREATE_FILE, 0o600, dir_fd=self._descriptor), "wb") as file:  # noqa: PTH123 - of a descriptor
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._descriptor)
            raise
        with contextlib.suppress(OSError):  # some file systems cannot do this for folders
            os.fsync(self._descriptor)
        return self._open_checked(name)

    def check_writable(self) -> None:
        """Check that a file can be created, before a library is compiled.

        Raises:
            OSError: none can.
        """
        name = f".{secrets.token_hex(8)}"
        os.close(os.open(name, _CREATE_FILE, 0o600, dir_fd=self._descriptor))
        os.unlink(name, dir_fd=self._descriptor)

    def _names(self, stem: str) -> list[str]:
        names = os.listdir(self._descriptor)  # noqa: PTH208 - of a descriptor
        return sorted(name for name in names if name.startswith(f"{stem}-") and name.endswith(".so"))

    def _problem(self, name: str) -> str:
        """Return why a file is not loaded; empty if it can be."""
        try:
            os.close(self._open_checked(name).descriptor)
        except RejectedLibraryError as error:
            return str(error)
        return ""

    def _open_checked(self, name: str) -> CheckedLibrary:
        try:
            descriptor = os.open(name, _OPEN_FILE, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise RejectedLibraryError("it is a symbolic link") from error
            raise RejectedLibraryError(f"it cannot be opened ({error.strerror})") from error
        try:
            _check_file(descriptor, name)
        except BaseException:
            os.close(descriptor)
            raise
        return CheckedLibrary(descriptor, self._folder / name)


def _check_file(descriptor: int, name: str) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise RejectedLibraryError("it is not a regular file")
    if problem := access_problem(status):
        raise RejectedLibraryError(problem)
    try:
        digest = _digest_of_file(descriptor)
    except OSError as error:
        raise RejectedLibraryError(f"it cannot be read ({error.strerror})") from error
    if not name.endswith(f"-{digest}.so"):
        raise RejectedLibraryError("it is damaged: its content does not match the digest in its name")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGEST_LENGTH]


def _digest_of_file(descriptor: int) -> str:
    digest = hashlib.sha256()
    while chunk := os.read(descriptor, CHUNK_SIZE):
        digest.update(chunk)
    return digest.hexdigest()[:DIGEST_LENGTH]
