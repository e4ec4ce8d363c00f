"""What `dashinfer-vlm tune` measured, in the cache folder: one JSON file for each set of conditions.

A file only names one of the kernel sets that can run here, so its owner and mode are not checked.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ..config import EngineConfig

FOLDER = "tuned-kernels"
"""Name of the folder in the cache folder."""

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """Everything that the fastest kernel set depends on.

    Attributes:
        machine: processor, number of threads, and torch's version, see `choice.this_machine`.
        part: `TEXT_MODEL` or `VISION_ENCODER`.
        layers: the shapes of its linear layers.
        dtype: dtype of the weights.
        quantization: data type that the weights are quantized to, or `none`.
        sets: the identity of each kernel set that was measured, by name, see `KernelFactory.identity`.
    """

    machine: str
    part: str
    layers: str
    dtype: str
    quantization: str
    sets: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedKernels:
    """The fastest kernel set, and the measurement that shows it.

    Attributes:
        model: name of the model that was measured; another one with the same shapes has the same choice.
        conditions: what the measurement is valid for.
        chosen: name of the kernel set.
        scores: seconds of the reference request, by kernel set; see `Workload`.
    """

    model: str
    conditions: Conditions
    chosen: str
    scores: dict[str, float]

    def describe(self) -> str:
        """Return the times of the two fastest sets, such as `avx512 1.2 s, onednn 1.5 s for a reference request`."""
        best = sorted(self.scores.items(), key=lambda item: item[1])[:2]
        return f"{', '.join(f'{name} {seconds:.3g} s' for name, seconds in best)} for a reference request"


_CONDITIONS, _TUNED = TypeAdapter(Conditions), TypeAdapter(TunedKernels)


def store_tuned(config: EngineConfig, tuned: TunedKernels) -> Path:
    """Write a file atomically, in place of an earlier one for the same conditions, and return its path.

    Raises:
        OSError: it cannot be written.
        RuntimeError: there is no home folder.
    """
    path = _path(config, tuned.conditions)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix=".", dir=path.parent) as folder:
        written = Path(folder, path.name)
        written.write_bytes(_TUNED.dump_json(tuned, indent=1))
        written.replace(path)
    return path


def load_tuned(config: EngineConfig, conditions: Conditions) -> TunedKernels | None:
    """Return what was measured under these conditions, or None if nothing was; a damaged file is logged."""
    try:
        return _read(_path(config, conditions))
    except RuntimeError:  # no home folder
        return None


def all_tuned(config: EngineConfig) -> Iterator[TunedKernels]:
    """Yield all measurements of the cache folder, also those for other conditions."""
    try:
        files = sorted(Path(config.cache_folder, FOLDER).glob("*.json"))
    except (OSError, RuntimeError):
        return
    yield from filter(None, map(_read, files))


def _path(config: EngineConfig, conditions: Conditions) -> Path:
    digest = hashlib.sha256(_CONDITIONS.dump_json(conditions)).hexdigest()
    return Path(config.cache_folder, FOLDER, f"{digest[:32]}.json")


def _read(file: Path) -> TunedKernels | None:
    try:
        return _TUNED.validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is damaged, or another version wrote it"
        logger.warning("%s is ignored: %s. Run `dashinfer-vlm tune` to measure again.", file, problem)
        return None
