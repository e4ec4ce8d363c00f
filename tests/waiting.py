"""Waiting for what another thread or process does. `HANG` ends a test that hangs; nothing is expected to be faster."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG = 120.0
"""Seconds. Waits of this length are reached only where something is broken, also on a machine that is busy."""


def until(condition: Callable[[], object], seconds: float = HANG) -> None:
    """Wait until `condition` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {seconds:g} s"
        time.sleep(0.002)
