"""What a run finds, by name: checks, timings, and what was skipped. A part that raises has failed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple


class Check(NamedTuple):
    """What a check measured, and what it must be."""

    passed: bool
    figure: str
    criterion: str

    def also(self, passed: bool, figure: str, criterion: str) -> Check:
        """Add a second condition."""
        return Check(self.passed and passed, f"{self.figure}; {figure}", f"{self.criterion}; {criterion}")


class Timing(NamedTuple):
    """How long a part takes.

    Attributes:
        seconds: of one execution.
        items: what one execution processes, in `unit`.
        work: bytes that one execution reads (`copy`), or its floating-point operations (`product`).
        limit: the rate of the device that bounds it.
        idle_share: the share of the time in which the device is idle; None if it was not measured.
    """

    seconds: float
    items: int
    unit: Literal["tokens", "images"]
    work: float
    limit: Literal["copy", "product"]
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
