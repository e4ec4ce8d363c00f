"""Concurrent requests with a limit, and a progress bar."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

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


@contextlib.contextmanager
def progress(total: int, *, unit: str) -> Iterator[Callable[[], None]]:
    """Show a progress bar on standard error if it is a terminal, and yield a function that advances it by one."""
    with tqdm(total=total, unit=unit, disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar:
        yield lambda: bar.update() and None
