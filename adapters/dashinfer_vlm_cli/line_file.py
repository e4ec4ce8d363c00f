"""Files of JSON lines, appended so that an interrupted run can resume."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dashinfer_vlm_core.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


class LineFile:
    """A file to which one process at a time appends complete lines.

    An incomplete last line is dropped, so that its work is done again.

    Args:
        path: the file; it is created if it does not exist.
        prefix: the beginning of each line, which distinguishes an incomplete last line from an unrelated file.
        read: called with each complete line and its location; raises ConfigError for a line of an unrelated file.
        overwrite: whether to discard existing lines instead of appending to them.

    Raises:
        ConfigError: the file cannot be written, another process is writing it, or `read` raised it. It is not modified.
    """

    def __init__(
        self, path: Path, *, prefix: bytes, read: Callable[[bytes, str], None], overwrite: bool = False
    ) -> None:
        self.path = path
        self._file = _open_locked(path)
        try:
            incomplete = _read(path, prefix, read)
            if overwrite or incomplete:
                os.ftruncate(self._file, 0 if overwrite else path.stat().st_size - incomplete)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line.

        Raises:
            ConfigError: the disk is full, or not available.
        """
        text = json.dumps(line, ensure_ascii=False)
        data = text.encode(errors="backslashreplace") + b"\n"  # of lone surrogates, which JSON escapes in the same way
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise write_error(self.path, error) from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a pipe, for example, cannot be synced
            os.fsync(self._file)
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_error(path: Path, error: OSError) -> ConfigError:
    """Return the error for a file that cannot be written during a run."""
    return ConfigError(f"{path} cannot be written: {error.strerror}. Run the command again to resume.")


def read_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, offset and bytes of each line that is not blank.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, offset, line
                offset += len(line)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def _open_locked(path: Path) -> int:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Choose another file.") from error
    problem = "" if path.is_file() else "is not a regular file. Choose another file."
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        problem = "is being written by another process. Wait for it to finish, or choose another file."
    if problem:
        os.close(file)
        raise ConfigError(f"{path} {problem}")
    return file


def _read(path: Path, prefix: bytes, read: Callable[[bytes, str], None]) -> int:
    """Return the number of bytes of an incomplete last line."""
    for number, _, line in read_lines(path):
        if not line.endswith(b"\n") and line.startswith(prefix[: len(line)]):
            return len(line)
        read(line, f"{path}, line {number}")
    return 0
