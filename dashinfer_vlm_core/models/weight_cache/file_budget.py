"""The folder of converted weights: one process writes at a time, and the least recently used files are removed."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

from filelock import FileLock, Timeout

from .weight_file import InvalidFileError, Layers, WeightFile, check_private, file_size, open_file, write_file

logger: logging.Logger = logging.getLogger(__name__)

SUFFIX = ".weights"
PART = ".part"
"""The suffix of files that are being written."""

FREE_SHARE = 10
"""A tenth of the disk stays free."""

LOCK_SECONDS = 600
"""How long a thread waits for others to write gigabytes, such as the other part of its model."""

MIB = 1 << 20


class WeightFolder:
    """Files of converted weights, by their keys.

    Args:
        folder: is created when a file is written.
        budget: maximum size of all files in bytes.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self._folder = folder
        self._budget = budget

    def open(self, key: str) -> WeightFile | None:
        """Open a file; None if there is none. One that must not be used is reported, and replaced later."""
        path = self._path(key)
        try:
            check_private(self._folder.stat())
            return open_file(path, key)
        except FileNotFoundError:
            return None
        except (OSError, InvalidFileError, ValueError, KeyError, TypeError) as error:
            logger.warning("The converted weights in %s are not used: %s. They are converted again.", path, error)
            return None

    def write(self, key: str, layers: Layers) -> None:
        """Write a file, unless another process has just written it. A failure is logged: the file only saves time."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(self._folder.stat())
            before = time.time_ns()
            with FileLock(self._folder / ".lock", timeout=LOCK_SECONDS):
                if not self._is_newer(key, before):
                    self._write(key, layers)
        except Timeout:
            logger.info("Other processes write converted weights; those of this one are not stored.")
        except (OSError, InvalidFileError) as error:
            message = "The converted weights cannot be stored in %s: %s. The next start converts them again."
            logger.warning(message, self._folder, error)

    def _is_newer(self, key: str, time_ns: int) -> bool:
        path = self._path(key)
        return path.exists() and path.stat().st_mtime_ns > time_ns

    def _write(self, key: str, layers: Layers) -> None:
        for abandoned in self._folder.glob(f"*{PART}"):
            abandoned.unlink(missing_ok=True)
        size = file_size(layers)
        if reason := self._make_space(key, size):
            logger.info("The converted weights (%d MiB) are not stored: %s.", size // MIB, reason)
            return
        descriptor, part = tempfile.mkstemp(dir=self._folder, suffix=PART)  # with mode 0600
        try:
            write_file(descriptor, key, layers)
            Path(part).replace(self._path(key))
        finally:
            os.close(descriptor)
            Path(part).unlink(missing_ok=True)
        logger.info("Stored %d MiB of converted weights for the next start.", size // MIB)

    def _make_space(self, key: str, size: int) -> str:
        """Remove the files that were not used for the longest time; return why there is no space."""
        if size > self._budget:
            return f"`weight_cache_mib` is {self._budget // MIB}"
        found = [(path, path.stat()) for path in self._folder.glob(f"*{SUFFIX}")]
        found.sort(key=lambda pair: (pair[0] != self._path(key), pair[1].st_mtime_ns))  # what is replaced first
        total = sum(status.st_size for _, status in found)
        disk = shutil.disk_usage(self._folder)
        missing = max(total + size - self._budget, disk.total // FREE_SHARE - (disk.free - size))
        if missing > total:  # before files of other models are removed for nothing
            return f"less than a tenth of the disk of {self._folder} would stay free"
        while found and missing > 0:
            path, status = found.pop(0)
            path.unlink(missing_ok=True)  # a process that has mapped it keeps its memory
            missing -= status.st_size
        return ""

    def _path(self, key: str) -> Path:
        return self._folder / f"{key[:32]}{SUFFIX}"
