"""The folder of converted weights: one process writes at a time, and the least recently used files are removed."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from filelock import AcquireReturnProxy, FileLock, Timeout

from ...concurrency.storing import Canceled
from ...config import MIB, EngineConfig
from .weight_file import InvalidFileError, Layers, WeightFile, check_private, file_size, open_file, write_file

logger: logging.Logger = logging.getLogger(__name__)

FOLDER = "weights"
"""The name of the folder in the cache folder."""

SUFFIX = ".weights"
PART = ".part"
"""The suffix of files that are being written."""

FREE_SHARE = 10
"""A tenth of the disk stays free."""

LOCK_SECONDS = 600
"""How long a thread waits for others to write gigabytes, such as the other part of its model."""

_FILES_IN_USE: WeakValueDictionary[tuple[Path, int], EngineConfig] = WeakValueDictionary()
"""What exists as long as a model is loaded, by the files that it wrote or read, and its own `id`."""


class _File(NamedTuple):
    path: Path
    size: int
    used_ns: int


def _files_in_use() -> set[Path]:
    return {path for path, _ in list(_FILES_IN_USE)}


class WeightFolder:
    """Files of converted weights, by their keys.

    Files of loaded models are not removed: otherwise, two parts of one model that exceed the limit would remove each
    other at each start.

    Args:
        config: that of the model; `weight_cache_mib` limits the size of all files. The folder is created in the cache
            folder when a file is written.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._folder = config.cache_folder / FOLDER
        self._budget = config.weight_cache_mib * MIB

    def open(self, key: str) -> WeightFile | None:
        """Open a file; None if there is none. One that must not be used is reported, and replaced later."""
        path = self._path(key)
        try:
            check_private(self._folder.stat())
            opened = open_file(path, key)
        except FileNotFoundError:
            return None
        except (OSError, InvalidFileError, ValueError, KeyError, TypeError) as error:
            logger.warning("The converted weights in %s are not used: %s. They are converted again.", path, error)
            return None
        self._use(path)
        return opened

    def shrink(self) -> None:
        """Remove the least recently used files if the limit was lowered."""
        try:
            files = self._files()
            excess = sum(file.size for file in files) - self._budget
            if excess > 0:
                check_private(self._folder.stat())
                with FileLock(self._folder / ".lock", timeout=0):  # a process that writes removes them itself
                    used = _files_in_use()
                    self._remove([file for file in files if file.path not in used], excess)
        except (OSError, InvalidFileError) as error:  # `Timeout` is an OSError
            logger.debug("Converted weights beyond `weight_cache_mib` are not removed: %s.", error)

    def write(self, key: str, layers: Layers, check: Callable[[], None]) -> None:
        """Write a file, unless another process has written these layers. A failure is logged: the file only saves time.

        Args:
            key: its key.
            layers: the layers.
            check: is called often, and raises `Canceled` to end the writing.
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(self._folder.stat())
            with self._acquire(check):
                written = self.open(key)
                if written is None or not layers.keys() <= written.layers.keys():
                    self._write(key, layers, check)
                self._use(self._path(key))
        except Timeout:
            logger.info("Other processes write converted weights; those of this one are not stored.")
        except Canceled:
            logger.info("The model is unloaded; its converted weights are not stored.")
        except (OSError, InvalidFileError) as error:
            message = "The converted weights cannot be stored in %s: %s. The next start converts them again."
            logger.warning(message, self._folder, error)

    def _use(self, path: Path) -> None:
        _FILES_IN_USE[path, id(self._config)] = self._config

    def _acquire(self, check: Callable[[], None]) -> AcquireReturnProxy:
        lock = FileLock(self._folder / ".lock")
        end = time.monotonic() + LOCK_SECONDS
        while True:
            check()
            try:
                return lock.acquire(timeout=1)
            except Timeout:
                if time.monotonic() > end:
                    raise

    def _write(self, key: str, layers: Layers, check: Callable[[], None]) -> None:
        for abandoned in self._folder.glob(f"*{PART}"):
            abandoned.unlink(missing_ok=True)
        size = file_size(layers)
        if not self._make_space(key, size):
            return
        descriptor, part = tempfile.mkstemp(dir=self._folder, suffix=PART)  # with mode 0600
        try:
            write_file(descriptor, key, layers, check)
            Path(part).replace(self._path(key))
        finally:
            os.close(descriptor)
            Path(part).unlink(missing_ok=True)
        logger.info("Stored %d MiB of converted weights for the next start.", size // MIB)

    def _make_space(self, key: str, size: int) -> bool:
        """Remove files that are not in use; return False, and log why, if there is still not enough space."""
        path = self._path(key)
        files = self._files()
        used = _files_in_use() - {path}
        removable = [file for file in files if file.path not in used]
        removable.sort(key=lambda file: file.path != path)  # what is replaced first
        total = sum(file.size for file in files)
        most = sum(file.size for file in removable)
        if total - most + size > self._budget:
            least = -(-(total - most + size) // MIB)
            message = "Each start converts %d MiB of weights: set `weight_cache_mib` to at least %d to store them too."
            logger.warning(message, size // MIB, least)
            self._remove(removable, total - self._budget)
            return False
        disk = shutil.disk_usage(self._folder)
        missing = max(total + size - self._budget, disk.total // FREE_SHARE - (disk.free - size))
        if missing > most:  # before files of other models are removed for nothing
            message = (
                "The converted weights (%d MiB) are not stored: less than a tenth of the disk of %s would stay free."
            )
            logger.info(message, size // MIB, self._folder)
            return False
        self._remove(removable, missing)
        return True

    def _files(self) -> list[_File]:
        """Return all files, those first that were not used for the longest time."""
        found = [(path, path.stat()) for path in self._folder.glob(f"*{SUFFIX}")]
        files = [_File(path, status.st_size, status.st_mtime_ns) for path, status in found]
        return sorted(files, key=lambda file: file.used_ns)

    def _remove(self, files: Sequence[_File], size: int) -> None:
        """Remove the first ones, at least `size` bytes."""
        for file in files:
            if size <= 0:
                return
            file.path.unlink(missing_ok=True)  # a process that has mapped it keeps its memory
            size -= file.size

    def _path(self, key: str) -> Path:
        return self._folder / f"{key[:32]}{SUFFIX}"
