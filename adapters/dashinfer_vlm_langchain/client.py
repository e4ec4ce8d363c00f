"""Sends requests to an engine with timeouts and retries, from callers with and without an event loop; counts tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from dashinfer_vlm_core.concurrency.deadline import stream_with_timeout, with_timeout
from dashinfer_vlm_core.concurrency.loop import LoopThread
from dashinfer_vlm_core.engine.shared import PerProcess
from dashinfer_vlm_core.errors import (
    ContextLengthExceeded,
    DashInferVLMError,
    DeadlineExceeded,
    QueueFull,
    UnsupportedParameter,
)

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    from dashinfer_vlm_core.engine import ChatEngine

LOOP = PerProcess(lambda: LoopThread("dashinfer-vlm-langchain"))
"""An event loop for synchronous callers, so that timeouts and cancellation have one implementation."""

RETRY_SECONDS = 0.5

GetEngine: TypeAlias = Callable[[], Awaitable["ChatEngine"]]


class CallOptions(BaseModel):
    """Options of a call that are not request fields.

    Attributes:
        timeout: seconds for the complete response, over all attempts; None means no limit.
        first_token_timeout: seconds until the first chunk of a stream; None means `timeout`.
        max_retries: maximum number of retries after transient errors.
        stream_usage: whether the last chunk of a stream contains the usage.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    timeout: float | None = Field(gt=0)
    first_token_timeout: float | None = Field(gt=0)
    max_retries: int = Field(ge=0)
    stream_usage: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A request with its options.

    Attributes:
        engine: returns the engine. It is called for each attempt, because a failed engine may have been replaced.
        request: OpenAI's JSON.
        options: how to send it.
    """

    engine: GetEngine
    request: Mapping[str, Any]
    options: CallOptions


@runtime_checkable
class Tokenizer(Protocol):
    """An engine that can tokenize."""

    async def atokenize(self, request: Mapping[str, Any]) -> list[int]: ...

    async def aencode(self, text: str) -> list[int]: ...


async def complete(call: Call) -> ChatCompletion:
    """Return the completion. Raises the errors of `Engine.chat`, and DeadlineExceeded."""
    return await with_timeout(_try(call), call.options.timeout)


def stream(call: Call) -> AsyncGenerator[ChatCompletionChunk, None]:
    """Stream the completion; closing the generator cancels the request. Raises the errors of `complete`."""
    options = call.options
    return stream_with_timeout(_try_stream(call), seconds=options.timeout, first=options.first_token_timeout)


async def encode(engine: GetEngine, text: str) -> list[int]:
    """Return the token IDs of a text. Raises the errors of `Engine.aencode`."""
    return await _tokenizer(await engine()).aencode(text)


async def count_tokens(engine: GetEngine, request: Mapping[str, Any]) -> int:
    """Return the number of prompt tokens of a request; more than the context length if it does not fit.

    Raises the errors of `Engine.atokenize`.
    """
    started = await engine()
    try:
        return len(await _tokenizer(started).atokenize(request))
    except ContextLengthExceeded as error:
        if error.prompt_tokens:
            return error.prompt_tokens
        status = await asyncio.to_thread(started.status)  # may send a request
        if not status.max_model_len:
            raise
        return status.max_model_len + 1


def _tokenizer(engine: ChatEngine) -> Tokenizer:
    if not isinstance(engine, Tokenizer):
        raise UnsupportedParameter(
            "The engine of this chat model cannot count tokens. Set `custom_get_token_ids`, or use an `Engine`."
        )
    return engine


async def _try(call: Call) -> ChatCompletion:
    retries = call.options.max_retries
    while True:
        try:
            return await (await call.engine()).achat(call.request)
        except DashInferVLMError as error:
            await _pause_or_raise(error, retries)
        retries -= 1


async def _try_stream(call: Call) -> AsyncGenerator[ChatCompletionChunk, None]:
    retries = call.options.max_retries
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
    if retries < 1 or not error.retryable or isinstance(error, DeadlineExceeded):
        raise error
    await asyncio.sleep(error.retry_after if isinstance(error, QueueFull) else RETRY_SECONDS)
