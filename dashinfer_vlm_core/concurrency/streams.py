"""Several asynchronous generators as one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

_T = TypeVar("_T")


async def merge_streams(streams: Sequence[AsyncGenerator[_T, None]]) -> AsyncGenerator[tuple[int, _T], None]:
    """Yield the items of several generators as they arrive, each with the index of its generator.

    The next item of a generator is requested only after the consumer has handled the previous one. All generators are
    closed at the end.
    """
    if len(streams) == 1:  # without a task per item
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    waiting: dict[asyncio.Future[_T | None], int] = {}
    try:
        for index, stream in enumerate(streams):
            waiting[asyncio.ensure_future(_next(stream))] = index
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                if (next_item := task.result()) is not None:
                    yield index, next_item
                    waiting[asyncio.ensure_future(_next(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[_T, None]) -> _T | None:
    return await anext(stream, None)
