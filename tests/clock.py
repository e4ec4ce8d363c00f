"""An event loop whose clock a test moves forward.

A timeout under test is set to minutes, so that it cannot pass by chance on a slow machine, and the test skips it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from tests.waiting import HANG

T = TypeVar("T")


class SkippableLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock that `skip` moves forward; otherwise it runs in real time."""

    _skipped = 0.0

    def time(self) -> float:
        return super().time() + self._skipped

    def skip(self, seconds: float) -> None:
        """Move the clock forward, for threads other than the loop's.

        Data received earlier is processed first; everything due by then has run when this returns.
        """
        asyncio.run_coroutine_threadsafe(self.askip(seconds), self).result(timeout=HANG)

    async def askip(self, seconds: float) -> None:
        """Like `skip`, called on the loop itself."""
        await self._settle()
        self._skipped += seconds
        await self._settle()

    async def _settle(self) -> None:
        """Run the ready callbacks and those that they schedule; each iteration polls the sockets as well."""
        for _ in range(20):
            await asyncio.sleep(0)


def skippable_loop() -> SkippableLoop:
    """Return the running loop, in coroutines started by `run`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippableLoop)
    return loop


def run(main: Coroutine[Any, Any, T], loop: SkippableLoop | None = None) -> T:
    """Like `asyncio.run`, on a loop whose clock can be moved."""
    loop = loop or SkippableLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


class ManualClock:
    """A clock in seconds that only `advance` moves; called as `time.monotonic` is."""

    def __init__(self) -> None:
        self._now = 1000.0

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
