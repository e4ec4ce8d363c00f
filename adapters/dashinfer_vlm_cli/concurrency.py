"""Many requests at once, and no more than a number of them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


async def run_concurrently(items: Iterable[T], work: Callable[[T], Awaitable[None]], *, at_once: int) -> None:
    """Do `work` for each item; the first that raises ends all."""
    left = iter(items)

    async def worker() -> None:
        for item in left:
            await work(item)

    tasks = [asyncio.create_task(worker()) for _ in range(at_once)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def progress(total: int, *, unit: str) -> Iterator[Callable[[], None]]:
    """A bar on standard error, if that is a terminal; what the block gets is called when one more is done."""
    with tqdm(total=total, unit=unit, disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar:
        yield lambda: bar.update() and None
