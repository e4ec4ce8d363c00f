"""Convert OpenAI completions to LangChain results."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, cast

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall, ToolCall
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

if TYPE_CHECKING:
    from openai.types import CompletionUsage
    from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
    from openai.types.chat.chat_completion import Choice
    from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
    from openai.types.chat.chat_completion_chunk import ChoiceDelta

PROVIDER = "dashinfer_vlm"


def chat_result(completion: ChatCompletion) -> ChatResult:
    """Convert a completion. If it has several choices, the first message contains the usage of all."""
    metadata = _metadata(completion)
    generations = [_generation(choice, metadata) for choice in completion.choices]
    if completion.usage is not None:
        cast("AIMessage", generations[0].message).usage_metadata = usage(completion.usage)
    return ChatResult(generations=generations, llm_output=metadata)


async def chat_chunks(chunks: AsyncIterator[ChatCompletionChunk]) -> AsyncIterator[ChatGenerationChunk]:
    """Convert a stream. The last chunk contains model, finish reason and usage, because LangChain adds up chunks."""
    last: dict[str, Any] = {}
    usage_metadata: UsageMetadata | None = None
    async for chunk in chunks:
        usage_metadata = usage(chunk.usage) if chunk.usage else usage_metadata
        for choice in chunk.choices:
            if choice.finish_reason:
                last = _metadata(chunk) | {"finish_reason": choice.finish_reason}
            if choice.delta.content or _reasoning(choice.delta) or choice.delta.tool_calls or choice.logprobs:
                yield _delta(choice)
    message = AIMessageChunk(content="", response_metadata=last, usage_metadata=usage_metadata, chunk_position="last")
    yield ChatGenerationChunk(message=message)


def usage(counts: CompletionUsage) -> UsageMetadata:
    """Convert token counts, including those of images and videos."""
    details = counts.prompt_tokens_details
    input_details = {
        "cache_read": details and details.cached_tokens,
        "image": getattr(details, "image_tokens", None),
        "video": getattr(details, "video_tokens", None),
    }
    metadata = UsageMetadata(
        input_tokens=counts.prompt_tokens,
        output_tokens=counts.completion_tokens,
        total_tokens=counts.total_tokens,
        input_token_details=cast("InputTokenDetails", {key: n for key, n in input_details.items() if n is not None}),
    )
    output_details = counts.completion_tokens_details
    if output_details is not None and output_details.reasoning_tokens is not None:
        metadata["output_token_details"] = OutputTokenDetails(reasoning=output_details.reasoning_tokens)
    return metadata


def _metadata(response: ChatCompletion | ChatCompletionChunk) -> dict[str, Any]:
    return {"id": response.id, "model_name": response.model, "model_provider": PROVIDER}


def _generation(choice: Choice, metadata: dict[str, Any]) -> ChatGeneration:
    calls, invalid = _calls(choice.message)
    metadata = metadata | {"finish_reason": choice.finish_reason}
    if choice.logprobs is not None:
        metadata["logprobs"] = choice.logprobs.model_dump(exclude_unset=True)
    message = AIMessage(
        content=choice.message.content or "",
        additional_kwargs=_reasoning(choice.message),
        tool_calls=calls,
        invalid_tool_calls=invalid,
        response_metadata=metadata,
    )
    return ChatGeneration(message=message, generation_info={"finish_reason": choice.finish_reason})


def _calls(message: ChatCompletionMessage) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    calls: list[ToolCall] = []
    invalid: list[InvalidToolCall] = []
    for call in message.tool_calls or ():
        raw = call.model_dump()
        try:
            calls.append(cast("ToolCall", parse_tool_call(raw)))
        except OutputParserException as error:
            invalid.append(make_invalid_tool_call(raw, str(error)))
    return calls, invalid


def _reasoning(part: ChatCompletionMessage | ChoiceDelta) -> dict[str, Any]:
    """Return the reasoning under the key from which LangChain creates content blocks of type reasoning."""
    text = getattr(part, "reasoning_content", None)
    return {"reasoning_content": text} if text else {}


def _delta(choice: ChunkChoice) -> ChatGenerationChunk:
    calls = [
        tool_call_chunk(
            name=call.function.name if call.function else None,
            args=call.function.arguments if call.function else None,
            id=call.id,
            index=call.index,
        )
        for call in choice.delta.tool_calls or ()
    ]
    logprobs = {"logprobs": choice.logprobs.model_dump(exclude_unset=True)} if choice.logprobs else {}
    message = AIMessageChunk(
        content=choice.delta.content or "",
        additional_kwargs=_reasoning(choice.delta),
        tool_call_chunks=calls,
        response_metadata=logprobs,
    )
    return ChatGenerationChunk(message=message, generation_info=logprobs or None)
