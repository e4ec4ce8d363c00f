"""Sends requests to an engine with timeouts and retries, from callers with and without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from dashinfer_vlm_core.concurrency.deadline import stream_with_timeout, with_timeout
from dashinfer_vlm_core.concurrency.loop import LoopThread
from dashinfer_vlm_core.engine.shared import PerProcess
from dashinfer_vlm_core.errors import DashInferVLMError, DeadlineExceeded

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    from dashinfer_vlm_core.engine import ChatEngine

LOOP = PerProcess(lambda: LoopThread("dashinfer-vlm-langchain"))
"""An event loop for synchronous callers, so that timeouts and cancellation have one implementation."""

RETRY_SECONDS = 0.5

GetEngine: TypeAlias = Callable[[], Awaitable["ChatEngine"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A request with its options.

    Attributes:
        engine: returns the engine. It is called for each attempt, because a failed engine may have been replaced.
        request: OpenAI's JSON.
        timeout: seconds for the complete response, over all attempts; None means no limit.
        first_token_timeout: seconds until the first chunk of a stream; None means `timeout`.
        max_retries: maximum number of retries after transient errors.
    """

    engine: GetEngine
    request: Mapping[str, Any]
    timeout: float | None
    first_token_timeout: float | None
    max_retries: int


async def complete(call: Call) -> ChatCompletion:
    """Return the completion. Raises the errors of `Engine.chat`, and DeadlineExceeded."""
    return await with_timeout(_try(call), call.timeout)


async def stream(call: Call) -> AsyncGenerator[ChatCompletionChunk, None]:
    """Stream the completion; closing the generator cancels the request. Raises the errors of `complete`."""
    limited = stream_with_timeout(_try_stream(call), seconds=call.timeout, first=call.first_token_timeout)
    async with contextlib.aclosing(limited) as chunks:
        async for chunk in chunks:
            yield chunk


async def _try(call: Call) -> ChatCompletion:
    retries = call.max_retries
    while True:
        try:
            return await (await call.engine()).achat(call.request)
        except DashInferVLMError as error:
            await _pause_or_raise(error, retries)
        retries -= 1


async def _try_stream(call: Call) -> AsyncGenerator[ChatCompletionChunk, None]:
    retries = call.max_retries
    while True:
        try:
            async with contextlib.aclosing((await call.engine()).astream(call.request)) as chunks:
                async for chunk in chunks:
                    retries = 0  # the caller has received a part of the response
                    yield chunk
                return
        except DashInferVLMError as error:
            await _pause_or_raise(error, retries)
        retries -= 1


async def _pause_or_raise(error: DashInferVLMError, retries: int) -> None:
    """Wait before the next attempt, or raise the error if it is permanent or no retries are left."""
    if retries < 1 or not error.retryable or isinstance(error, DeadlineExceeded):
        raise error
    await asyncio.sleep(getattr(error, "retry_after", RETRY_SECONDS))
