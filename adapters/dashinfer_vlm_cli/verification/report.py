"""What a run finds, by name, and the report of it."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Awaitable, Callable, Iterable
from importlib.metadata import version
from typing import Literal, NamedTuple

import torch

from dashinfer_vlm_core import __version__
from dashinfer_vlm_core.kernels.devices import cpu_model

LIBRARIES = ("torch", "transformers", "numpy", "safetensors", "tokenizers")
UNITS = {"copy": ("GB/s", 1e9), "product": ("TFLOP/s", 1e12)}


class Check(NamedTuple):
    """What a check measured, and what it must be."""

    passed: bool
    figure: str
    criterion: str

    def also(self, passed: bool, figure: str, criterion: str) -> Check:
        """Add a second condition."""
        return Check(self.passed and passed, f"{self.figure}; {figure}", f"{self.criterion}; {criterion}")


class Timing(NamedTuple):
    """One execution of a part, and the share of the time in which the device is idle, if it was measured."""

    seconds: float
    items: int
    unit: Literal["tokens", "images"]
    work: float  # bytes that it reads (`copy`), or its floating-point operations (`product`)
    limit: Literal["copy", "product"]  # the rate of the device that bounds it
    idle_share: float | None = None


class Results:
    """Runs parts on a device and collects what they find, within a time limit that begins now.

    Only timings that do not fit into `limit` seconds are skipped. `note` is called with the name of each part.
    """

    def __init__(
        self, device: str, limit: float, note: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.device = device
        self.note = note
        self._limit = limit
        self._clock = clock
        self._begin = clock()
        self.checks: dict[str, Check] = {}
        self.limits: dict[str, float] = {}
        self.timings: dict[str, Timing] = {}
        self.skipped: dict[str, str] = {}

    @property
    def failed(self) -> list[str]:
        return [name for name, check in self.checks.items() if not check.passed]

    @property
    def seconds(self) -> float:
        return self._clock() - self._begin

    def share(self, timing: Timing) -> float | None:
        """Return the share of the device's limit that a part reaches; None if that was not measured."""
        return timing.work / timing.seconds / self.limits[timing.limit] if self.limits else None

    async def check(self, name: str, work: Awaitable[Check | None]) -> None:
        """Run a check, or a group of parts, which returns None."""
        self.note(name)
        try:
            found = await work
        except Exception as error:  # noqa: BLE001 - whatever a device raises belongs in the report
            found = Check(False, f"{type(error).__name__}: {error}"[:300], "runs")
        if found:
            self.checks[name] = found

    async def time(self, name: str, work: Callable[[], Awaitable[Timing]]) -> None:
        """Run a measurement within the rest of the time."""
        if self.allows(name):
            await self.check(name, self._time(name, work))

    async def _time(self, name: str, work: Callable[[], Awaitable[Timing]]) -> None:
        try:
            self.timings[name] = await asyncio.wait_for(work(), max(0.0, self._limit - self.seconds))
        except asyncio.TimeoutError:
            self.skipped[name] = "it was stopped at the time limit: see `--minutes`"

    def allows(self, name: str, seconds: float = 0.0) -> bool:
        """Return whether a part that takes about `seconds` fits; otherwise, list it as skipped."""
        remaining = self._limit - self.seconds
        if seconds < remaining:
            return True
        estimate = f" and it takes about {seconds:.0f} s" if seconds else ""
        self.skipped[name] = f"{max(0.0, remaining):.0f} s of {self._limit:.0f} s were left{estimate}: see `--minutes`"
        return False


def as_markdown(results: Results) -> str:
    """Return the whole report; it ends with the verdict."""
    lines = [f"# Verification on `{results.device}`", "", *(f"* {line}" for line in _machine(results))]
    checks = (
        f"{name} | {'passed' if check.passed else '**FAILED**'} | {_cell(check.figure)} | {check.criterion}"
        for name, check in results.checks.items()
    )
    lines += ["", "## Checks", "", *_table("check | result | measured | criterion", checks)]
    if limits := results.limits:
        copy = f"{limits['copy'] / 1e9:,.0f} GB/s"
        product = f"{limits['product'] / 1e12:,.1f} TFLOP/s"
        lines += ["", "## Timings", "", f"A copy in memory reads and writes {copy}, bfloat16 products take {product}."]
        rows = (_timing_row(name, timing, results.share(timing)) for name, timing in results.timings.items())
        lines += ["", *_table("part | ms | rate | used | of the limit | device idle", rows)]
    if results.skipped:
        lines += ["", "## Skipped", "", *(f"* {name}: {_cell(reason)}." for name, reason in results.skipped.items())]
    passed = f"All {len(results.checks)} checks passed on {results.device}, {len(results.skipped)} parts skipped."
    verdict = f"FAILED on {results.device}: {'; '.join(results.failed)}." if results.failed else passed
    return "\n".join([*lines, "", f"**{verdict}**"])


def _machine(results: Results) -> list[str]:
    lines = [
        f"dashinfer-vlm-adapters {__version__}, Python {platform.python_version()}, {platform.platform()}",
        ", ".join(f"{name} {version(name)}" for name in LIBRARIES),
        f"{cpu_model()}, {torch.get_num_threads()} threads of PyTorch",
        f"{results.seconds:.0f} s in total",
    ]
    if torch.device(results.device).type == "cuda":
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        lines.append(f"{torch.cuda.get_device_properties(results.device)}, CUDA {torch.version.cuda}, cuDNN {cudnn}")
    return lines


def _table(columns: str, rows: Iterable[str]) -> list[str]:
    return [f"| {columns} |", f"|{'---|' * len(columns.split(' | '))}", *(f"| {row} |" for row in rows)]


def _timing_row(name: str, timing: Timing, share: float | None) -> str:
    unit, scale = UNITS[timing.limit]
    rate = f"{timing.items / timing.seconds:,.1f} {timing.unit}/s"
    used = f"{timing.work / timing.seconds / scale:,.2f} {unit}"
    shares = f"{_percent(share)} | {_percent(timing.idle_share)}"
    return f"{name} | {1000 * timing.seconds:.2f} | {rate} | {used} | {shares}"


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{100 * share:.1f} %"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
