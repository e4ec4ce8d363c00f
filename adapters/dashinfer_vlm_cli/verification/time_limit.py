"""The time limit of a run: what does not fit is skipped and named in the report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MARGIN = 1.2
"""An estimated time is multiplied by this."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A part of a run that was left out.

    Attributes:
        name: what was skipped.
        reason: why, and how to run it.
    """

    name: str
    reason: str


class TimeLimit:
    """Decides what is skipped.

    Args:
        seconds: for the whole run, from now on.
        clock: returns seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._end = clock() + seconds
        self.skipped: list[Skipped] = []

    @property
    def remaining(self) -> float:
        """Seconds that are left; negative after the end."""
        return self._end - self._clock()

    def allows(self, name: str, seconds: float = 0.0) -> bool:
        """Return whether a part that takes about `seconds` fits; otherwise, list it as skipped."""
        needed = MARGIN * seconds
        if needed < self.remaining:
            return True
        estimate = f" and it takes about {needed:.0f} s" if needed else ""
        self.skip(
            name, f"{max(0.0, self.remaining):.0f} s of {self._seconds:.0f} s were left{estimate}: see `--minutes`"
        )
        return False

    def skip(self, name: str, reason: str) -> None:
        """List a part as skipped."""
        self.skipped.append(Skipped(name=name, reason=reason))
