"""Convert OpenAI completions to LiteLLM responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, cast

from litellm.types.utils import Choices, GenericStreamingChunk, ModelResponse, ModelResponseStream, Usage

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk


def model_response(response: ModelResponse, completion: ChatCompletion) -> ModelResponse:
    """Copy a completion into LiteLLM's response object."""
    response.id = completion.id
    response.created = completion.created
    response.model = completion.model
    response.choices = [Choices(**choice.model_dump(exclude_unset=True)) for choice in completion.choices]
    if completion.usage is not None:
        response.usage = Usage(**completion.usage.model_dump(exclude_none=True))  # type: ignore[attr-defined]  # LiteLLM sets it in the same way
    return response


async def stream_chunks(
    chunks: AsyncIterator[ChatCompletionChunk],
) -> AsyncIterator[ModelResponseStream | GenericStreamingChunk]:
    """Convert chunks to LiteLLM's.

    LiteLLM creates the chunks with the finish reason and the usage itself, and drops the usage of a stream that ends
    like OpenAI's. It keeps both if they arrive together in a final GenericStreamingChunk, its older chunk type. Both
    concern the first choice; the finish reasons of others are sent next to an empty delta of the first one, because
    LiteLLM inspects only that.
    """
    usage: dict[str, Any] | None = None
    reason = "stop"
    async for chunk in chunks:
        data = chunk.model_dump(exclude_unset=True)
        usage = data.pop("usage", None) or usage
        reasons = {choice["index"]: choice.get("finish_reason") for choice in data["choices"]}
        finished = {index: found for index, found in reasons.items() if found}
        reason = finished.pop(0, reason)
        for choice in data["choices"]:
            choice["finish_reason"] = None
        if any(_has_content(choice["delta"]) for choice in data["choices"]):
            yield ModelResponseStream(**data)
        for index, other in finished.items():
            choices = [{"index": 0, "delta": {}}, {"index": index, "delta": {}, "finish_reason": other}]
            yield ModelResponseStream(**{**data, "choices": choices})
    last = {"text": "", "is_finished": True, "finish_reason": reason, "usage": usage, "index": 0, "tool_use": None}
    yield cast("GenericStreamingChunk", last)


def _has_content(delta: dict[str, Any]) -> bool:
    return any(value is not None for value in delta.values())
