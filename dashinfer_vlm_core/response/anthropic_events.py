"""Chat completions to messages and streaming events of Anthropic's API, without I/O."""

from __future__ import annotations

from typing import Any, TypeAlias

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta

from ..errors import EngineError
from .tool_arguments import read_arguments

Event: TypeAlias = dict[str, Any]
"""An event as JSON; `type` is also the event's name."""

SIGNATURE = "unsigned"
"""The signature of thinking blocks: clients require one, and nothing verifies it."""

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


def to_message(completion: ChatCompletion, *, id: str, shows_thinking: bool = True) -> dict[str, Any]:  # noqa: A002
    """Return a completion with one choice as a message.

    Thinking and text precede tool calls. The input of a call that was truncated has what can be parsed.
    """
    (choice,) = completion.choices
    content = _content(choice.message, shows_thinking=shows_thinking)
    return _message(id, completion.model, completion.usage) | {"content": content} | _stop(choice)


class MessageEventBuilder:
    """Builds the events of a message from the chunks of a chat completion, the first and last of which have the usage.

    Thinking, text and each tool call become one block. Blocks follow each other: one ends when the next begins.

    Args:
        id: the message's id.
        shows_thinking: whether thinking blocks contain the reasoning.
    """

    def __init__(self, *, id: str, shows_thinking: bool = True) -> None:  # noqa: A002 - the name of Anthropic's field
        self._id = id
        self._shows_thinking = shows_thinking
        self._events: list[Event] = []
        self._started = False
        self._index = -1
        self._open = ""  # the type of the block that has begun and not ended
        self._stop: dict[str, Any] | None = None
        self._usage: CompletionUsage | None = None

    def add_chunk(self, chunk: ChatCompletionChunk) -> list[Event]:
        """Add the next chunk; return its events."""
        self._usage = chunk.usage or self._usage
        if not self._started:
            self._started = True
            self._emit("message_start", message=_message(self._id, chunk.model, self._usage))
        for choice in chunk.choices:
            self._add_delta(choice.delta)
            if choice.finish_reason:
                self._stop = _stop(choice)
        return self._take_events()

    def finish(self) -> list[Event]:
        """End the message after the last chunk; return the remaining events.

        Raises:
            EngineError: the chunks ended before the completion was complete.
        """
        if self._stop is None:
            raise EngineError("The stream ended before the message was complete. Try again.")
        self._close_block()
        self._emit("message_delta", delta=self._stop, usage=_usage(self._usage))
        self._emit("message_stop")
        return self._take_events()

    def _add_delta(self, delta: ChoiceDelta) -> None:
        if reasoning := (delta.model_extra or {}).get("reasoning_content"):  # `getattr` is slow without it
            self._open_block("thinking", thinking="", signature="")
            if self._shows_thinking:
                self._emit_delta("thinking_delta", thinking=reasoning)
        if delta.content:
            self._open_block("text", text="")
            self._emit_delta("text_delta", text=delta.content)
        for call in delta.tool_calls or ():
            if call.id is not None:
                self._close_block()
                self._open_block("tool_use", id=call.id, name=call.function and call.function.name, input={})
            if call.function and call.function.arguments:
                self._emit_delta("input_json_delta", partial_json=call.function.arguments)

    def _open_block(self, kind: str, **fields: Any) -> None:
        if self._open == kind:
            return
        self._close_block()
        self._index += 1
        self._open = kind
        self._emit("content_block_start", index=self._index, content_block={"type": kind, **fields})

    def _close_block(self) -> None:
        if self._open == "thinking":
            self._emit_delta("signature_delta", signature=SIGNATURE)
        if self._open:
            self._emit("content_block_stop", index=self._index)
            self._open = ""

    def _emit_delta(self, kind: str, **fields: Any) -> None:
        self._emit("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _emit(self, event_type: str, **fields: Any) -> None:
        self._events.append({"type": event_type, **fields})

    def _take_events(self) -> list[Event]:
        events = self._events
        self._events = []
        return events


def _message(message_id: str, model: str, usage: CompletionUsage | None) -> dict[str, Any]:
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(usage),
    }


def _content(message: ChatCompletionMessage, *, shows_thinking: bool) -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = []
    if reasoning := (message.model_extra or {}).get("reasoning_content"):
        thinking = reasoning if shows_thinking else ""
        content.append({"type": "thinking", "thinking": thinking, "signature": SIGNATURE})
    if message.content:
        content.append({"type": "text", "text": message.content})
    for call in message.tool_calls or ():
        if call.type == "function":
            arguments = read_arguments(call.function.arguments)
            content.append({"type": "tool_use", "id": call.id, "name": call.function.name, "input": arguments})
    return content


def _stop(choice: Choice | ChunkChoice) -> dict[str, Any]:
    # A client runs tools only if that is the reason.
    stop_string = None if choice.finish_reason == "tool_calls" else (choice.model_extra or {}).get("stop_reason")
    reason = "stop_sequence" if stop_string else _STOP_REASONS.get(choice.finish_reason or "", "end_turn")
    return {"stop_reason": reason, "stop_sequence": stop_string}


def _usage(usage: CompletionUsage | None) -> dict[str, Any]:
    """Convert the usage: Anthropic's `input_tokens` are those that were not read from a cache."""
    if usage is None:  # of an engine that sends it only at the end
        return {"input_tokens": 0, "output_tokens": 0}
    details = usage.prompt_tokens_details
    cached = (details and details.cached_tokens) or 0
    fields: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
    if usage.completion_tokens_details:
        fields["output_tokens_details"] = {"thinking_tokens": usage.completion_tokens_details.reasoning_tokens or 0}
    return fields
