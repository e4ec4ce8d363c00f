"""Wait for other threads and processes. `HANG` is the timeout of a hanging test, not an expected duration."""

from __future__ import annotations

import asyncio
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


async def auntil(condition: Callable[[], object]) -> None:
    """Wait on an event loop until `condition` holds."""
    end = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {HANG:g} s"
        await asyncio.sleep(0.002)
