"""What `dashinfer-vlm tune` measured, in the cache folder: one JSON file for each set of conditions.

A file only names one of the kernel sets that can run here, or a number of threads, so its owner and mode are not
checked.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from ..config import EngineConfig
from ..config.folders import expand_user
from ..errors import ConfigError
from .devices import cpu_model

FOLDER = "tuned-kernels"
THREADS_FOLDER = "tuned-threads"
"""Names of the folders in the cache folder."""

Stored = TypeVar("Stored", bound=BaseModel)

logger: logging.Logger = logging.getLogger(__name__)


class Conditions(BaseModel, frozen=True):
    """What a measurement is valid for.

    Attributes:
        machine: processor and torch's version, see `choice.this_machine`.
        threads: the number of threads that compute.
        model, dtype, quantization, vision_quantization: options of the engine.
        sets: the identity of each registered kernel set by name, see `KernelFactory.identity`.
    """

    machine: str
    threads: int
    model: str
    dtype: str
    quantization: str
    vision_quantization: str
    sets: dict[str, str]


class WeightRates(NamedTuple):
    """How fast matrix products of one row read weights, in bytes per second.

    Attributes:
        wide: those with the bits of the engine's dtype.
        int8: those with 8 bits.
        int4: those with 4 bits.
    """

    wide: float
    int8: float
    int4: float


class TunedKernels(BaseModel, frozen=True):
    """The fastest kernel set, and the measurement that shows it.

    Attributes:
        conditions: what the measurement is valid for.
        chosen: name of the kernel set.
        seconds: seconds of the reference requests by kernel set.
        bandwidth: bytes of memory that are read per second.
        rates: how fast each kernel set reads weights.
    """

    conditions: Conditions
    chosen: str
    seconds: dict[str, float]
    bandwidth: float
    rates: dict[str, WeightRates]

    def describe(self) -> str:
        """Return the times of the two fastest sets, such as `avx512 1.2 s, onednn 1.5 s`."""
        best = sorted(self.seconds.items(), key=lambda item: item[1])[:2]
        return ", ".join(f"{name} {seconds:.3g} s" for name, seconds in best)


class ThreadConditions(BaseModel, frozen=True):
    """What a number of threads is valid for.

    Attributes:
        machine: the processor.
        candidates: the numbers that were measured, with the default first; they describe the CPUs.
        model, dtype, quantization, vision_quantization: options of the engine.
    """

    machine: str
    candidates: tuple[int, ...]
    model: str
    dtype: str
    quantization: str
    vision_quantization: str

    @classmethod
    def of(cls, config: EngineConfig, candidates: Sequence[int]) -> ThreadConditions:
        return cls(
            machine=cpu_model(),
            candidates=tuple(candidates),
            model=model_of(config),
            dtype=config.dtype,
            quantization=config.quantization,
            vision_quantization=config.vision_quantization,
        )


class TunedThreads(BaseModel, frozen=True):
    """The fastest number of threads, and the seconds of the reference requests by number."""

    conditions: ThreadConditions
    chosen: int
    seconds: dict[int, float]


def model_of(config: EngineConfig) -> str:
    """Return what identifies a model in conditions: its folder, or its name."""
    folder = expand_user(config.model)
    return str(folder.resolve()) if folder.is_dir() else config.model


def store_tuned(config: EngineConfig, tuned: TunedKernels | TunedThreads) -> Path:
    """Write a file atomically, in place of an earlier one for the same conditions, and return its path.

    Raises:
        OSError: it cannot be written.
    """
    path = _path(config, tuned.conditions)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as folder:
        written = Path(folder, path.name)
        written.write_text(tuned.model_dump_json(indent=1))
        written.replace(path)
    return path


def load_tuned(config: EngineConfig, conditions: Conditions) -> TunedKernels | None:
    """Return what was measured under these conditions, or None if nothing was; a damaged file is logged."""
    try:
        return _read(_path(config, conditions), TunedKernels)
    except ConfigError:  # the home folder is unknown
        return None


def load_threads(config: EngineConfig, conditions: ThreadConditions) -> int | None:
    """Return the number of threads that was the fastest under these conditions, or None if nothing was measured."""
    try:
        tuned = _read(_path(config, conditions), TunedThreads)
    except ConfigError:  # the home folder is unknown
        return None
    return tuned.chosen if tuned else None


def all_tuned(config: EngineConfig) -> Iterator[TunedKernels]:
    """Yield all measurements of the cache folder, also those for other conditions."""
    files = sorted(Path(config.cache_folder, FOLDER).glob("*.json"))
    yield from filter(None, (_read(file, TunedKernels) for file in files))


def fastest_tuned(config: EngineConfig, machine: str) -> TunedKernels | None:
    """Return the measurement of a machine with the highest memory bandwidth; None if there is none."""
    measured = [item for item in all_tuned(config) if item.conditions.machine == machine]
    return max(measured, key=lambda item: item.bandwidth, default=None)


def _path(config: EngineConfig, conditions: Conditions | ThreadConditions) -> Path:
    digest = hashlib.sha256(conditions.model_dump_json().encode()).hexdigest()
    folder = FOLDER if isinstance(conditions, Conditions) else THREADS_FOLDER
    return Path(config.cache_folder, folder, f"{digest[:32]}.json")


def _read(file: Path, kind: type[Stored]) -> Stored | None:
    try:
        return kind.model_validate_json(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is damaged, or another version wrote it"
        logger.warning("%s is ignored: %s. Run `dashinfer-vlm tune` to measure again.", file, problem)
        return None
