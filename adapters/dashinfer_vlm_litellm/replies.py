"""OpenAI's answers -> LiteLLM's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from litellm.types.utils import Choices, GenericStreamingChunk, ModelResponse, ModelResponseStream, Usage

if TYPE_CHECKING:
    from openai.types import CompletionUsage
    from openai.types.chat import ChatCompletion, ChatCompletionChunk


def whole(response: ModelResponse, completion: ChatCompletion) -> ModelResponse:
    """Fill LiteLLM's response with an answer."""
    response.id, response.created, response.model = completion.id, completion.created, completion.model
    response.choices = [Choices(**choice.model_dump(exclude_unset=True)) for choice in completion.choices]
    if completion.usage is not None:
        response.usage = Usage(**_plain(completion.usage))  # type: ignore[attr-defined]  # set so throughout LiteLLM
    return response


async def streamed(
    chunks: AsyncIterator[ChatCompletionChunk],
) -> AsyncIterator[ModelResponseStream | GenericStreamingChunk]:
    """LiteLLM's chunks.

    LiteLLM makes the chunk with the finish reason and the one with the usage by itself, and drops the usage of a stream
    that ends as OpenAI's does. It keeps both if they come together at the end, in its own older kind of chunk.
    """
    usage, reason = None, "stop"
    async for chunk in chunks:
        usage = _plain(chunk.usage) if chunk.usage is not None else usage
        reason = next((choice.finish_reason for choice in chunk.choices if choice.finish_reason), reason)
        if any(_says_something(choice.delta.model_dump(exclude_none=True)) for choice in chunk.choices):
            yield _unfinished(chunk)
    yield GenericStreamingChunk(
        text="",
        is_finished=True,
        finish_reason=reason,
        usage=usage,
        index=0,
        tool_use=None,  # type: ignore[typeddict-item]
    )


def _unfinished(chunk: ChatCompletionChunk) -> ModelResponseStream:
    data = chunk.model_dump(exclude_unset=True, exclude={"usage"})
    for choice in data["choices"]:
        choice["finish_reason"] = None
    return ModelResponseStream(**data)


def _says_something(delta: dict[str, Any]) -> bool:
    return bool(delta)


def _plain(usage: CompletionUsage) -> dict[str, Any]:
    return usage.model_dump(exclude_none=True)
