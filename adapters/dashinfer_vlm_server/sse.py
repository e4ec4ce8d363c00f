"""Streamed responses: chunks as server-sent events."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.responses import AsyncContentStream

from dashinfer_vlm_core.errors import DashInferVLMError

from .errors import error_body
from .request_body import cancel_on_disconnect
from .request_context import RequestContext, get_request_context

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionChunk
    from starlette.types import Receive, Scope, Send

logger: logging.Logger = logging.getLogger(__name__)

DONE = "data: [DONE]\n\n"

HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # disables buffering in nginx
}

# JSON allows these characters, but clients that use str.splitlines, such as httpx, would split the event at them.
_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


class EventStream(StreamingResponse):
    """A stream of chunks as an HTTP response.

    The headers are sent with the first chunk, so an earlier error is an ordinary HTTP error. A later error is sent as
    one event with an `error`, and the stream ends without `[DONE]`, as OpenAI's does. When the client disconnects,
    `chunks` is closed.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[ChatCompletionChunk, None]) -> None:
        super().__init__(content=(), headers=HEADERS)
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = get_request_context(scope)
        try:
            await cancel_on_disconnect(receive, self._send(send, context))
        except ClientDisconnect as error:  # no client is left to receive an error
            context.fail(error)

    async def _send(self, send: Send, context: RequestContext) -> None:
        async with contextlib.aclosing(self._chunks) as chunks:
            self.body_iterator: AsyncContentStream = _events(await anext(chunks), chunks, context)
            await self.stream_response(send)


async def _events(
    first: ChatCompletionChunk, rest: AsyncIterator[ChatCompletionChunk], context: RequestContext
) -> AsyncGenerator[str, None]:
    yield _chunk_event(first)
    try:
        async for chunk in rest:
            yield _chunk_event(chunk)
    except Exception as error:  # the status has been sent, so the error goes into the stream
        if not isinstance(error, DashInferVLMError):
            logger.exception("Stream failed.")
        context.fail(error)
        yield _event(json.dumps(error_body(error)))
    else:
        yield DONE


def _chunk_event(chunk: ChatCompletionChunk) -> str:
    return _event(chunk.model_dump_json(exclude_unset=True).translate(_LINE_BREAKS))


def _event(data: str) -> str:
    return f"data: {data}\n\n"
