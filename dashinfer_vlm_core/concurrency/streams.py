"""Merge asynchronous generators, or notice that one pauses."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merge_streams(
    streams: Sequence[AsyncGenerator[T, None]], *, limit: int | None = None
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield items as they arrive, each with the index of its generator, whose items are not None.

    The next item of a generator is requested only after the consumer has handled the previous one. All generators are
    closed at the end.

    Args:
        streams: the generators.
        limit: how many of them run at a time; all by default.
    """
    if len(streams) == 1:  # without a task per item
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queued = deque(range(len(streams)))
    waiting: dict[asyncio.Future[T | None], int] = {}
    try:
        while queued or waiting:
            while queued and len(waiting) < (limit or len(streams)):
                index = queued.popleft()
                waiting[asyncio.ensure_future(_next_item(streams[index]))] = index
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                if (next_item := task.result()) is not None:
                    yield index, next_item
                    waiting[asyncio.ensure_future(_next_item(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def with_pauses(items: AsyncGenerator[T, None], seconds: float) -> AsyncGenerator[T | None, None]:
    """Yield the items of a generator, which are not None, and None after each `seconds` without one. It is closed at
    the end."""
    waiting = asyncio.ensure_future(_next_item(items))
    try:
        while True:
            if not (await asyncio.wait({waiting}, timeout=seconds))[0]:
                yield None
            elif (item := waiting.result()) is None:
                return
            else:
                yield item
                waiting = asyncio.ensure_future(_next_item(items))
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await items.aclose()


async def _next_item(stream: AsyncGenerator[T, None]) -> T | None:
    return await anext(stream, None)
