"""Choices of kernel sets, stored in the user's cache folder: one JSON file for each set of conditions.

A file only names one of the kernel sets that were loaded, and its figures are only displayed. A file that is damaged,
or that other users can write to, is ignored, and replaced by the next measurement.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config.folders import access_problem

logger: logging.Logger = logging.getLogger(__name__)

FOLDER = "kernel-choices"
"""Name of the folder in the cache folder."""

FORMAT = "1"
"""Version of the files' format and of the method of measurement."""

MAX_FILE_BYTES = 1 << 20
LOCK_TIMEOUT = 10.0
LOCK_INTERVAL = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """Everything that the fastest kernel set depends on; another value of any field needs another measurement.

    Attributes:
        processor: model name and features.
        threads: number of threads of a forward pass.
        torch: torch's version.
        dtype: dtype of the weights.
        workload: the part of the model, and the shapes of its linear layers.
        quantization: data type that the weights are quantized to, or `none`.
        sets: name and identity of each kernel set that can be loaded, see `KernelFactory.identity`.
    """

    processor: str
    threads: int
    torch: str
    dtype: str
    workload: str
    quantization: str
    sets: tuple[tuple[str, str], ...]

    @property
    def file_name(self) -> str:
        """The name of the file that stores the choice."""
        return f"{hashlib.sha256(json.dumps([FORMAT, _as_json(self)]).encode()).hexdigest()[:32]}.json"

    def same_machine(self, other: Conditions) -> bool:
        """Whether processor, threads and torch are those of `other`."""
        return (self.processor, self.threads, self.torch) == (other.processor, other.threads, other.torch)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredChoice:
    """A choice and the measurement that it follows from.

    Attributes:
        conditions: what it is valid for.
        model: name of the model that was measured; another one with the same shapes has the same choice.
        part: `TEXT_MODEL` or `VISION_ENCODER`.
        chosen: name of the chosen kernel set.
        scores: seconds of the reference request, by kernel set; see `Workload`.
        seconds: seconds of a forward pass by number of rows, by kernel set.
    """

    conditions: Conditions
    model: str
    part: str
    chosen: str
    scores: Mapping[str, float]
    seconds: Mapping[str, Mapping[int, float]]


class _RejectedFileError(Exception):
    """A file is not used; the message gives the reason."""


class ChoiceCache:
    """The stored choices of one cache folder.

    Args:
        folder: the engine's cache folder; None if there is none, then nothing is stored.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder / FOLDER if folder else None
        self._reported: set[Path] = set()

    def load(self, conditions: Conditions) -> StoredChoice | None:
        """Return the stored choice for these conditions, or None if there is none that can be used."""
        if self._folder is None:
            return None
        file = self._folder / conditions.file_name
        choice = self._read(file)
        if choice and choice.conditions != conditions:
            self._report(file, "it is the choice for other conditions")
            return None
        return choice

    def store(self, choice: StoredChoice) -> None:
        """Write a choice atomically, in place of an earlier one. A failure is logged: the next start measures again."""
        if self._folder is None:
            return
        text = json.dumps({"format": FORMAT, **_as_json(choice)}, indent=1)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, prefix=".", delete=False) as temporary:
                temporary.write(text)
            try:
                Path(temporary.name).replace(self._folder / choice.conditions.file_name)
            except OSError:
                Path(temporary.name).unlink()
                raise
        except OSError as error:
            logger.warning("The choice of kernels cannot be stored in %s: %s.", self._folder, error.strerror)

    def all(self) -> list[StoredChoice]:
        """Return all choices that can be used, sorted by model."""
        try:
            files = sorted(self._folder.glob("*.json")) if self._folder else []
        except OSError:
            return []
        choices = [choice for choice in map(self._read, files) if choice]
        return sorted(choices, key=lambda choice: (choice.model, choice.part))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock, so that engines that start together measure once, and not at the same time.

        Waits for at most `LOCK_TIMEOUT` seconds, several times as long as a measurement, and then continues without the
        lock, as it does where the folder cannot be locked. The last one to store its choice wins.
        """
        descriptor = None
        with contextlib.suppress(OSError):
            if self._folder:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if descriptor is not None:
                _wait_for_lock(descriptor)
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)  # which releases the lock

    def _read(self, file: Path) -> StoredChoice | None:
        """Read a file; None if it does not exist, or, with a warning, if it cannot be used."""
        try:
            text = _read_checked(file)
            return None if text is None else _parse(text)
        except OSError as error:
            self._report(file, f"it cannot be read ({error.strerror})")
        except _RejectedFileError as error:
            self._report(file, str(error))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self._report(file, f"it is damaged ({error})")
        return None

    def _report(self, file: Path, reason: str) -> None:
        """Log once that a file is not used."""
        if file not in self._reported:
            logger.warning("%s is ignored: %s. The kernel sets are measured again when they are needed.", file, reason)
            self._reported.add(file)


def _wait_for_lock(descriptor: int) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT
    while not _try_lock(descriptor) and time.monotonic() < deadline:
        time.sleep(LOCK_INTERVAL)


def _try_lock(descriptor: int) -> bool:
    """Return false if another engine holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        logger.debug("The folder of kernel choices cannot be locked: %s.", error)
    return True


def _as_json(value: Conditions | StoredChoice) -> Any:
    return json.loads(json.dumps(asdict(value)))


def _read_checked(file: Path) -> str | None:
    """Return the content of a regular file that only this user or root can write to.

    Raises:
        OSError: it cannot be read.
        _RejectedFileError: it is not such a file.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as opened:  # noqa: PTH123 - of a descriptor
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise _RejectedFileError("it is not a regular file of at most 1 MiB")
        if problem := access_problem(status):
            raise _RejectedFileError(problem)
        return opened.read(MAX_FILE_BYTES).decode()


def _parse(text: str) -> StoredChoice:
    """Parse a file.

    Raises:
        _RejectedFileError, ValueError, TypeError, KeyError, AttributeError: it is not what `ChoiceCache.store` writes.
    """
    fields = json.loads(text)
    if not isinstance(fields, dict) or fields.pop("format", None) != FORMAT:
        raise _RejectedFileError("it is damaged, or another version wrote it")
    conditions = fields.pop("conditions")
    sets = tuple((str(name), str(identity)) for name, identity in conditions.pop("sets"))
    choice = StoredChoice(
        conditions=Conditions(**conditions, sets=sets),
        model=str(fields["model"]),
        part=str(fields["part"]),
        chosen=str(fields["chosen"]),
        scores={name: _positive(score) for name, score in fields["scores"].items()},
        seconds={
            name: {int(rows): _positive(value) for rows, value in passes.items()}
            for name, passes in fields["seconds"].items()
        },
    )
    if not {choice.chosen, *choice.scores, *choice.seconds} <= {name for name, _ in sets} or not choice.scores:
        raise _RejectedFileError("it names a kernel set that was not measured")
    if choice.chosen not in choice.scores or choice.scores.keys() != choice.seconds.keys():
        raise _RejectedFileError("its figures are incomplete")
    return choice


def _positive(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number <= 0:
        raise _RejectedFileError(f"{value!r} is not a time")
    return number
