"""Deadlines for whoever asks an engine: what is not there in time is cancelled, and frees what it held.

Not by `asyncio.wait_for`: before Python 3.12 it loses a cancellation that comes together with the result, and a stream
would run on after its reader has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

import anyio

from ..errors import DeadlineExceeded

T = TypeVar("T")
_END = object()


async def with_timeout(work: Awaitable[T], seconds: float | None) -> T:
    """The result of `work`, which is cancelled if it takes longer; None waits for ever.

    Raises:
        DeadlineExceeded: it took longer.
    """
    try:
        with anyio.fail_after(seconds):
            return await work
    except TimeoutError:
        raise DeadlineExceeded(
            f"The answer was not complete within {seconds:g} seconds: ask for fewer tokens, or allow it more time."
        ) from None


async def stream_with_timeout(
    items: AsyncGenerator[T, None], *, seconds: float | None, first: float | None
) -> AsyncGenerator[T, None]:
    """The items of a stream, which is closed if it takes longer; what its reader takes is counted too.

    Args:
        items: the stream.
        seconds: for all of it; None waits for ever.
        first: for the first item; None waits as long as for all.

    Raises:
        DeadlineExceeded: it took longer.
    """
    clock = asyncio.get_running_loop().time
    start = clock()
    end = start + (math.inf if seconds is None else seconds)
    limit = min(end, start + (math.inf if first is None else first))
    async with contextlib.aclosing(items):
        while (item := await _next(items, limit - clock())) is not _END:
            yield item  # type: ignore[misc]  # it is an item: _END was told apart by identity
            limit = end


async def _next(items: AsyncGenerator[T, None], seconds: float) -> T | object:
    """The next item, or `_END`."""
    if seconds == math.inf:  # a timer for each token of an answer would count
        return await anext(items, _END)
    try:
        with anyio.fail_after(max(seconds, 0.0)):
            return await anext(items, _END)
    except TimeoutError:
        raise DeadlineExceeded(
            "The stream was cut off at its deadline: ask for fewer tokens, or allow it more time."
        ) from None
