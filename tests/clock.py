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

        What has arrived before is processed first, and what is due then has run when this returns.
        """
        asyncio.run_coroutine_threadsafe(self.askip(seconds), self).result(timeout=HANG)

    async def askip(self, seconds: float) -> None:
        """As `skip`, on the loop itself."""
        await self._settle()
        self._skipped += seconds
        await self._settle()

    async def _settle(self) -> None:
        """Run what is ready, and what that makes ready; each iteration polls the sockets as well."""
        for _ in range(20):
            await asyncio.sleep(0)


def skippable_loop() -> SkippableLoop:
    """The running loop, in coroutines that `run` runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippableLoop)
    return loop


def run(main: Coroutine[Any, Any, T], loop: SkippableLoop | None = None) -> T:
    """As `asyncio.run`, on a loop whose clock can be moved."""
    loop = loop or SkippableLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
