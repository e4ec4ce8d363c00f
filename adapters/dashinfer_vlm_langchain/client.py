"""Asks an engine with deadlines and retries, from callers with and without an event loop."""

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
"""For callers without an event loop: so there is one way to keep deadlines, and to cancel."""

PAUSE_SECONDS = 0.5

FindEngine: TypeAlias = Callable[[], Awaitable["ChatEngine"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One question.

    Attributes:
        engine: finds what answers, anew for each try: one that failed is replaced by then.
        request: OpenAI's JSON.
        timeout: seconds for the whole answer, all tries together; None waits for ever.
        first_token_timeout: seconds until a stream begins; None waits as long as for the whole.
        max_retries: how often to try again what may succeed later.
    """

    engine: FindEngine
    request: Mapping[str, Any]
    timeout: float | None
    first_token_timeout: float | None
    max_retries: int


async def complete(call: Call) -> ChatCompletion:
    """The answer; raises as `Engine.chat`, and DeadlineExceeded."""
    return await with_timeout(_try(call), call.timeout)


async def stream(call: Call) -> AsyncGenerator[ChatCompletionChunk, None]:
    """The answer chunk by chunk; closing it frees what it held. Raises as `ask`."""
    limited = stream_with_timeout(_try_stream(call), seconds=call.timeout, first=call.first_token_timeout)
    async with contextlib.aclosing(limited) as chunks:
        async for chunk in chunks:
            yield chunk


async def _try(call: Call) -> ChatCompletion:
    left = call.max_retries
    while True:
        try:
            return await (await call.engine()).achat(call.request)
        except DashInferVLMError as error:
            await _pause_or_raise(error, left)
        left -= 1


async def _try_stream(call: Call) -> AsyncGenerator[ChatCompletionChunk, None]:
    left = call.max_retries
    while True:
        try:
            async with contextlib.aclosing((await call.engine()).astream(call.request)) as chunks:
                async for chunk in chunks:
                    left = 0  # what was shown cannot be taken back
                    yield chunk
                return
        except DashInferVLMError as error:
            await _pause_or_raise(error, left)
        left -= 1


async def _pause_or_raise(error: DashInferVLMError, left: int) -> None:
    """Wait as long as the error asks for, if it may succeed then and there are tries left."""
    if left < 1 or not error.retryable or isinstance(error, DeadlineExceeded):
        raise error
    await asyncio.sleep(getattr(error, "retry_after", PAUSE_SECONDS))
