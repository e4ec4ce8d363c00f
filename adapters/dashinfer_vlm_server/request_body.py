"""Read and parse request bodies under limits, and detect disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from .json_body import parse_object

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.types import Receive

    from .body_memory import BodyMemory
    from .settings import Settings

T = TypeVar("T")

INLINE_PARSE_BYTES = 64 * 1024
"""Bodies up to this size are parsed on the event loop, in about a millisecond; larger ones in a thread."""

MIN_BYTES_PER_SECOND = 16 * 1024
"""How fast a body must be received on average. The limit between two chunks alone could keep its memory for months."""

EXCLUSIVE_PARSE_BYTES = 1024 * 1024
"""Bodies above this size are parsed one after the other: each running thread delays the event loop by up to 5 ms."""


async def read_request(
    request: Request,
    parse: Callable[[object], T],
    *,
    settings: Settings,
    memory: BodyMemory,
    parse_slot: asyncio.Semaphore,
) -> T:
    """Read the body of a request and parse it.

    The content type is ignored here: `CrossOriginMiddleware` checks it where that is necessary.

    Args:
        request: a request whose body has not been read.
        parse: converts the JSON object; called in a thread if the body is large.
        settings: `max_body_bytes` and `max_body_pause`.
        memory: the memory of the body.
        parse_slot: limits how many bodies above `EXCLUSIVE_PARSE_BYTES` are parsed at the same time.

    Raises:
        HTTPException: 413, the body exceeds `max_body_bytes` and the rest was not stored. 408, no data was received for
            `max_body_pause` seconds, or the body was received too slowly.
        QueueFull: there is no memory for the body.
        RequestError: the body is not a JSON object, or `parse` rejects it.
        ClientDisconnect: the client disconnected before the request was complete.
    """
    body = await _read_body(request, settings.max_body_bytes, settings.max_body_pause, memory)
    return await parse_body(body, parse, parse_slot)


async def parse_body(body: bytearray, parse: Callable[[object], T], parse_slot: asyncio.Semaphore) -> T:
    """Parse a body, in a thread if it is large. Its memory is released.

    Raises:
        RequestError: the body is not a JSON object, or `parse` rejects it.
    """
    if len(body) <= INLINE_PARSE_BYTES:
        return parse(parse_object(body))
    async with parse_slot if len(body) > EXCLUSIVE_PARSE_BYTES else contextlib.nullcontext():
        return await asyncio.to_thread(_parse_large, body, parse)


def _parse_large(body: bytearray, parse: Callable[[object], T]) -> T:
    """Parse a large body, and release its memory, which also takes milliseconds, in the same thread."""
    value = parse_object(body)
    body.clear()
    return parse(value)


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it when the client disconnects. The body of the request must have been read.

    Raises:
        ClientDisconnect: the client disconnected first.
    """
    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({work_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            return work_task.result()
        raise ClientDisconnect
    finally:
        work_task.cancel()
        disconnect_task.cancel()
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)
        del work_task, disconnect_task  # their exceptions refer to this frame: the cycle would keep the request


async def _read_body(request: Request, max_bytes: int, max_pause: float, memory: BodyMemory) -> bytearray:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    chunks = request.stream()
    clock = asyncio.get_running_loop().time
    deadline = clock() + max_pause
    with memory.receiving() as reserve:
        while (chunk := await _next_chunk(chunks, max_pause, deadline - clock())) is not None:
            if len(body) + len(chunk) > max_bytes:
                raise _too_large(max_bytes)
            received_at = clock()
            await reserve(len(chunk))
            deadline += clock() - received_at + len(chunk) / MIN_BYTES_PER_SECOND
            body += chunk
    return body


async def _next_chunk(chunks: AsyncGenerator[bytes, None], max_pause: float, time_left: float) -> bytes | None:
    try:
        # `asyncio.wait_for` can lose a cancellation, see `deadline.py`.
        with anyio.fail_after(min(max_pause, time_left)):
            return await anext(chunks, None)
    except TimeoutError:
        message = (
            f"The body was received too slowly: no data for {max_pause:g} seconds, or less than {MIN_BYTES_PER_SECOND}"
            " bytes per second. Send the request again."
        )
        raise HTTPException(408, message, headers={"Connection": "close"}) from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(max_bytes: int) -> HTTPException:
    message = f"The body exceeds {max_bytes} bytes. Send smaller images, or https URLs instead of data: URLs."
    return HTTPException(413, message)
