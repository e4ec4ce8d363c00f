"""A whole run: checks, limits of the device, and timings of models, as far as the time permits."""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dashinfer_vlm_core.decoders.dashinfer import HEAD_DIMS
from dashinfer_vlm_core.plugins import Registry

from .checks import CheckResult, attempt, run_checks
from .dashinfer import FAMILIES as DASHINFER_FAMILIES
from .dashinfer import ON_CPU, DashInferCheck, dashinfer_cache
from .device_limits import DeviceLimits, measure_limits
from .report import Report
from .speed_models import SPEED_MODELS, SpeedModel, write_speed_model
from .time_limit import TimeLimit
from .timings import TINY_LOAD, Load, ModelTimer, ModelTimings, free_memory

SECONDS_PER_BYTE = 8e-9
"""To write and load a model, until one was measured."""
EXTRA_MEMORY = 8 << 30
"""Memory of the device for what is not weights: the KV cache of 4 GiB, and activations."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is verified.

    Attributes:
        device: as torch names it.
        families: of the checks, keys of `tiny_models.FAMILIES`; at least one.
        models: to be timed, keys of `SPEED_MODELS`.
        seconds: the time limit.
        scratch: an existing folder, in which models are created and deleted.
        traces: a folder for traces of the profiler, created on demand; None writes none.
    """

    device: str
    families: Sequence[str]
    models: Sequence[str]
    seconds: float
    scratch: Path
    traces: Path | None = None


class Verification:
    """Runs everything, and notes what is skipped.

    Args:
        options: what is verified.
        registry: has the families, and the decoder `torch`.
        note: is called with the name of each part before it runs.
    """

    def __init__(self, options: Options, registry: Registry, note: Callable[[str], None]) -> None:
        self._options = options
        self._registry = registry
        self._note = note
        self._limit = TimeLimit(options.seconds)
        self._seconds_per_byte = SECONDS_PER_BYTE

    def run(self) -> Report:
        """Return the report. Failures are in it; none is raised."""
        options, begin = self._options, time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="dashinfer-vlm-verify-", dir=options.scratch) as name:
            scratch = Path(name)
            checks = run_checks(
                self._registry, device=options.device, families=options.families, folder=scratch, note=self._note
            )
            found = self._check_dashinfer(scratch)
            limits, fault = self._limits() if options.models else (None, "")
            decoders = ("torch", "dashinfer") if found else ("torch",)
            timings = [timed for model in options.models for timed in self._time(model, scratch, decoders)]
        return Report(
            device=options.device,
            checks=[*checks, *found],
            limits=limits,
            timings=timings,
            skipped=tuple(self._limit.skipped),
            fault=fault,
            seconds=time.perf_counter() - begin,
        )

    def _check_dashinfer(self, scratch: Path) -> list[CheckResult]:
        """Return the result of the check; none if DashInfer cannot run here."""
        family = next((name for name in self._options.families if name in DASHINFER_FAMILIES), None)
        if torch.device(self._options.device).type == "cpu" or family is None:
            self._limit.skip("DashInfer", ON_CPU if family else "it does not support the family")
            return []
        self._note(f"{family} float32: DashInfer")
        results = attempt("DashInfer", lambda: self._run_dashinfer(family, scratch))
        self._free_memory()
        return results

    def _run_dashinfer(self, family: str, scratch: Path) -> list[CheckResult]:
        check = DashInferCheck(self._registry, device=self._options.device, family=family, folder=scratch)
        if reason := check.skip_reason():
            self._limit.skip("DashInfer", reason)
            return []
        return [check.run()]

    def _limits(self) -> tuple[DeviceLimits | None, str]:
        self._note("limits of the device")
        try:
            return measure_limits(self._options.device), ""
        except Exception as error:  # noqa: BLE001 - the rest is worth its report whatever happens here
            return None, _describe(error)

    def _time(self, name: str, scratch: Path, decoders: Sequence[str]) -> list[ModelTimings]:
        """Time a model with each decoder; nothing if it is skipped."""
        model = SPEED_MODELS[name]
        title = f"model {name}"
        if not self._limit.allows(title, self._seconds_per_byte * model.nbytes):
            return []
        if "dashinfer" in decoders and model.head_dim not in HEAD_DIMS:
            self._limit.skip(
                f"{title}, decoded by DashInfer", f"its heads have a size of {model.head_dim}, not 64 or 128"
            )
            decoders = ["torch"]
        if reason := self._lacks_space(model, scratch, copies=len(decoders)):
            self._limit.skip(title, reason)
            return []
        folder = scratch / name
        try:
            return [self._time_decoder(name, folder, decoder) for decoder in decoders]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(dashinfer_cache(scratch) / "models", ignore_errors=True)

    def _time_decoder(self, name: str, folder: Path, decoder: str) -> ModelTimings:
        model = SPEED_MODELS[name]
        with_decoder = "" if decoder == "torch" else ", decoded by DashInfer"
        load = TINY_LOAD if name == "tiny" else Load()
        timings = ModelTimings(name=f"{name}{with_decoder}", title=model.title, load=load)
        try:
            if not folder.exists():
                self._make(model, folder)
            self._timer(model, folder, decoder).measure(timings)
        except Exception as error:  # noqa: BLE001 - as above
            timings.fault = _describe(error)
        finally:
            self._free_memory()
        return timings

    def _lacks_space(self, model: SpeedModel, scratch: Path, *, copies: int) -> str:
        """Return what the model, with `copies` on disk, does not fit in, and the next step; empty if it fits."""
        size = model.nbytes
        if copies * size > (free := shutil.disk_usage(scratch).free):
            return f"it takes {_gb(copies * size)}, and {scratch.parent} has {_gb(free)}: see `--folder`"
        memory = free_memory(self._options.device)
        if memory is not None and size + EXTRA_MEMORY > memory:
            return f"it needs about {_gb(size + EXTRA_MEMORY)} of memory, and {_gb(memory)} of the device are free"
        return ""

    def _make(self, model: SpeedModel, folder: Path) -> None:
        self._note(f"making {folder.name}, {_gb(model.nbytes)}")
        begin = time.perf_counter()
        folder.mkdir()
        write_speed_model(model, folder)
        if model.nbytes > 1 << 30:  # of others, the tokenizer takes most of the time
            self._seconds_per_byte = 2 * (time.perf_counter() - begin) / model.nbytes  # loading takes no longer

    def _timer(self, model: SpeedModel, folder: Path, decoder: str) -> ModelTimer:
        traces = self._options.traces
        if traces:
            traces.mkdir(parents=True, exist_ok=True)
        return ModelTimer(
            model,
            folder,
            self._registry,
            device=self._options.device,
            limit=self._limit,
            traces=traces,
            note=self._note,
            decoder=decoder,
            cache=None if decoder == "torch" else dashinfer_cache(folder.parent),
        )

    def _free_memory(self) -> None:
        """Free the device's memory for the next model."""
        gc.collect()
        if torch.device(self._options.device).type == "cuda":
            torch.cuda.empty_cache()


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
