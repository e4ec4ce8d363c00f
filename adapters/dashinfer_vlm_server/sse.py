"""Streamed responses as server-sent events, or as lines of JSON."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import AsyncContentStream

from dashinfer_vlm_core.errors import DashInferVLMError

from .request_body import cancel_on_disconnect
from .request_context import RequestContext, get_request_context

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")
_END = object()

DONE = "data: [DONE]\n\n"

COMMENT_SECONDS = 5.0
"""Time between two comments before the first item; proxies close connections that are idle for 30 seconds or more."""

HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # disables buffering in nginx
}

# JSON allows these characters, but clients that use str.splitlines, such as httpx, would split the event at them.
_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


class Discarded(Exception):
    """What is being sent was released. The connection is closed before the response is complete."""


class EventStream(StreamingResponse, Generic[T]):
    """A stream of items as an HTTP response.

    The headers are sent with the first item, so an earlier error is an ordinary HTTP error. A later error is sent in
    the stream, which then ends without `[DONE]`, as OpenAI's does. When the client disconnects, `items` is closed.

    While there are comments on what the first item waits for, the headers are sent after `COMMENT_SECONDS`, and then
    these, which clients ignore: they keep proxies from closing the connection.

    Args:
        items: what is sent.
        encode: formats an item as an event.
        encode_error: formats an error after the first item as one or several events.
        done: what ends a stream without an error.
        comment: returns what the first item waits for, on one line; empty if it is not known to take long.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        items: AsyncGenerator[T, None],
        *,
        encode: Callable[[T], str | bytes],
        encode_error: Callable[[Exception], str],
        done: str = DONE,
        comment: Callable[[], str] = str,
    ) -> None:
        super().__init__(content=(), headers=HEADERS)
        self._items = items
        self._encode = encode
        self._encode_error = encode_error
        self._done = done
        self._comment = comment

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = get_request_context(scope)
        try:
            await cancel_on_disconnect(receive, self._send(send, context))
        except ClientDisconnect as error:  # no client is left to receive an error
            context.fail(error)
        except Discarded:
            pass

    async def _send(self, send: Send, context: RequestContext) -> None:
        async with contextlib.aclosing(self._items) as items:
            first = asyncio.ensure_future(anext(items, _END))
            try:
                while not (await asyncio.wait({first}, timeout=COMMENT_SECONDS))[0] and not self._comment():
                    pass
                if first.done():
                    first.result()
                self.body_iterator: AsyncContentStream = self._events(first, items, context)
                await self.stream_response(send)
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                del first  # its exception refers to this frame: the cycle would keep the request

    async def _events(
        self, first: asyncio.Future[T | object], rest: AsyncIterator[T], context: RequestContext
    ) -> AsyncGenerator[str | bytes, None]:
        try:
            while not first.done():
                if comment := self._comment():
                    yield f": {comment}\n\n"
                await asyncio.wait({first}, timeout=COMMENT_SECONDS)
            item = first.result()
            if item is not _END:
                yield self._encode(item)  # type: ignore[arg-type]  # not _END, but the type checker cannot know
            async for item in rest:
                yield self._encode(item)
        except Discarded:  # within an event, to which an error cannot be appended
            raise
        except Exception as error:  # the status has been sent, so the error goes into the stream
            if not isinstance(error, (DashInferVLMError, HTTPException)):
                logger.exception("Stream failed.")
            context.fail(error)
            yield self._encode_error(error)
        else:
            if self._done:
                yield self._done
        finally:
            del first  # as in `_send`


class LineStream(EventStream[T]):
    """A stream of lines of JSON. It has no comments, so that nothing is sent before the first item."""

    media_type = "application/x-ndjson"


def format_event(data: str) -> str:
    """Format JSON text as an event."""
    return f"data: {_escape_line_breaks(data)}\n\n"


def format_line(data: str) -> str:
    """Format JSON text as a line."""
    return f"{_escape_line_breaks(data)}\n"


def _escape_line_breaks(data: str) -> str:
    return data if data.isascii() else data.translate(_LINE_BREAKS)
