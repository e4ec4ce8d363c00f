"""Timeouts for callers of an engine: work that exceeds its deadline is canceled, which frees its resources.

`asyncio.wait_for` is not used: before Python 3.12 it loses a cancellation that arrives together with the result, and a
stream would then continue after its client has disconnected.
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
    """Return the result of `work`, or cancel it after `seconds`; None disables the timeout.

    Raises:
        DeadlineExceeded: it took longer.
    """
    with anyio.move_on_after(seconds):
        return await work
    raise DeadlineExceeded(
        f"The response was not complete within {seconds:g} seconds. Request fewer tokens, or set a longer timeout."
    )


async def stream_with_timeout(
    items: AsyncGenerator[T, None], *, seconds: float | None, first: float | None
) -> AsyncGenerator[T, None]:
    """Yield the items of a stream, and close it at its deadline. The time that the consumer takes counts too.

    Args:
        items: the stream.
        seconds: timeout of the whole stream; None disables it.
        first: timeout of the first item; None means that only `seconds` applies.

    Raises:
        DeadlineExceeded: it took longer.
    """
    clock = asyncio.get_running_loop().time
    start = clock()
    end = start + (math.inf if seconds is None else seconds)
    limit = min(end, start + (math.inf if first is None else first))
    async with contextlib.aclosing(items):
        while (item := await _next(items, limit - clock())) is not _END:
            yield item  # type: ignore[misc]  # not _END, but the type checker cannot know
            limit = end


async def _next(items: AsyncGenerator[T, None], seconds: float) -> T | object:
    if seconds == math.inf:  # avoids the cost of a timer per token
        return await anext(items, _END)
    with anyio.move_on_after(max(seconds, 0.0)):
        return await anext(items, _END)
    raise DeadlineExceeded("The stream exceeded its timeout. Request fewer tokens, or set a longer timeout.")
