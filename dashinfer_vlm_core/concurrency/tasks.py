"""Concurrent requests with a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


async def run_concurrently(items: Iterable[T], work: Callable[[T], Awaitable[None]], *, max_concurrency: int) -> None:
    """Await `work` for each item. The first exception cancels all others."""
    remaining = iter(items)

    async def worker() -> None:
        for item in remaining:
            await work(item)

    tasks = [asyncio.create_task(worker()) for _ in range(max_concurrency)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
