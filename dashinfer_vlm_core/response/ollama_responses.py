"""Chunks of chat completions to responses of Ollama's API, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeAlias

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionChunk, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion_chunk import Choice, ChoiceDeltaToolCall
from openai.types.chat.chat_completion_token_logprob import TopLogprob

from ..errors import EngineError
from .tool_arguments import read_arguments

Form: TypeAlias = Literal["chat", "generate"]
"""Whether the text is in a message, as of /api/chat, or in `response`, as of /api/generate."""

Line: TypeAlias = dict[str, Any]
"""A line of a stream, or a complete response, as JSON."""

_DONE_REASONS: Mapping[str | None, str] = {"length": "length"}
"""Reasons other than `stop`, which a response with tool calls has, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """How long a response took, in nanoseconds.

    Attributes:
        load: until the model was loaded.
        prompt: from then to the first token.
        total: from the request to the end.
    """

    load: int
    prompt: int
    total: int


@dataclass(kw_only=True, slots=True, eq=False)
class _Content:
    """A part of a response, or all of it."""

    text: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.thinking or self.calls or self.logprobs)

    def add(self, other: _Content) -> None:
        self.text += other.text
        self.thinking += other.thinking
        self.calls += other.calls
        self.logprobs += other.logprobs


@dataclass(slots=True, eq=False)
class _Call:
    """A tool call whose arguments are not complete."""

    id: str
    name: str
    arguments: str = ""


class OllamaResponseBuilder:
    """Builds the lines of a stream, or the complete response, from the chunks of a chat completion with one choice.

    A tool call is sent when it is complete. One that was truncated has the arguments that can be parsed.

    Args:
        form: where the text is.
        model: the name that the request has.
        created: when the response began, in UTC.
    """

    def __init__(self, form: Form, model: str, *, created: datetime) -> None:
        self._form = form
        self._model = model
        self._created = format_time(created)
        self._sent = _Content()
        self._call: _Call | None = None
        self._finish_reason: str | None = None
        self._usage: CompletionUsage | None = None

    def add_chunk(self, chunk: ChatCompletionChunk) -> Line | None:
        """Add the next chunk; return its line, or None if it has no text."""
        self._usage = chunk.usage or self._usage
        content = _Content()
        for choice in chunk.choices:
            self._add_choice(choice, content)
        if not content:
            return None
        self._sent.add(content)
        return self._line(content, done=False)

    def finish(self, durations: Durations) -> Line:
        """Return the last line of a stream.

        Raises:
            EngineError: the chunks ended before the completion was complete.
        """
        return self._last(_Content(), durations)

    def complete(self, durations: Durations) -> Line:
        """Return the complete response. Raises like `finish`."""
        return self._last(self._sent, durations)

    def without_content(self, reason: Literal["load", "unload"]) -> Line:
        """Return the response to a request that loaded or unloaded the model."""
        return self._line(_Content(), done=True) | {"done_reason": reason}

    def _add_choice(self, choice: Choice, content: _Content) -> None:
        delta = choice.delta
        content.thinking += (delta.model_extra or {}).get("reasoning_content") or ""
        if delta.content:
            self._end_call(content)
            content.text += delta.content
        for call in delta.tool_calls or ():
            self._add_call(call, content)
        if choice.logprobs:
            content.logprobs += [_logprob(entry) for entry in choice.logprobs.content or ()]
        if choice.finish_reason:
            self._end_call(content)
            self._finish_reason = choice.finish_reason

    def _add_call(self, delta: ChoiceDeltaToolCall, content: _Content) -> None:
        function = delta.function
        if delta.id is not None:
            self._end_call(content)
            self._call = _Call(delta.id, (function and function.name) or "")
        if self._call and function:
            self._call.arguments += function.arguments or ""

    def _end_call(self, content: _Content) -> None:
        if self._call is None:
            return
        arguments = read_arguments(self._call.arguments)
        index = len(self._sent.calls) + len(content.calls)
        function = {"index": index, "name": self._call.name, "arguments": arguments}
        content.calls.append({"id": self._call.id, "function": function})
        self._call = None

    def _last(self, content: _Content, durations: Durations) -> Line:
        if self._finish_reason is None:
            raise EngineError("The stream ended before the response was complete. Try again.")
        return self._line(content, done=True) | {
            "done_reason": _DONE_REASONS.get(self._finish_reason, "stop"),
            "total_duration": durations.total,
            "load_duration": durations.load,
            "prompt_eval_count": self._usage.prompt_tokens if self._usage else 0,
            "prompt_eval_duration": durations.prompt,
            "eval_count": self._usage.completion_tokens if self._usage else 0,
            "eval_duration": durations.total - durations.load - durations.prompt,
        }

    def _line(self, content: _Content, *, done: bool) -> Line:
        extra: Line = {"thinking": content.thinking, "tool_calls": content.calls}
        given = {name: value for name, value in extra.items() if value}
        line: Line = {"model": self._model, "created_at": self._created}
        if self._form == "chat":
            line["message"] = {"role": "assistant", "content": content.text, **given}
        else:
            line |= {"response": content.text, **given}
        line["done"] = done
        return {**line, "logprobs": content.logprobs} if content.logprobs else line


def format_time(time: datetime) -> str:
    """Format a time in UTC as Ollama does."""
    return time.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _logprob(entry: ChatCompletionTokenLogprob) -> dict[str, Any]:
    top = [_token_logprob(alternative) for alternative in entry.top_logprobs]
    return {**_token_logprob(entry), "top_logprobs": top} if top else _token_logprob(entry)


def _token_logprob(entry: ChatCompletionTokenLogprob | TopLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": entry.bytes}
