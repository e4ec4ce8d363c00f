"""Chunks of a chat completion to objects and streaming events of the Responses API, without I/O."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypeVar

import pydantic_core
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionChunk
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall, ChoiceLogprobs
from openai.types.responses import (
    Response,
    ResponseError,
    ResponseOutputItem,
    ResponseUsage,
)
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails

from ..errors import EngineError
from ..protocol.request import ChatRequest
from ..protocol.responses import ResponsesRequest
from .echoed_fields import echoed_fields
from .output_items import FunctionCallItem, ItemStatus, MessageItem, OutputItem, ReasoningItem

Event: TypeAlias = dict[str, Any]
"""An event as JSON; `type` is also the event's name."""

ItemT = TypeVar("ItemT", bound=OutputItem)
ResponseState = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

_ERROR_CODES: Mapping[str, Literal["invalid_prompt", "rate_limit_exceeded"]] = {
    "invalid_request_error": "invalid_prompt",
    "rate_limit_error": "rate_limit_exceeded",
}
"""The code of a response's error by the `type` of the error; `server_error` for others."""


def response_to_json(response: Response) -> dict[str, Any]:
    """Return a response as JSON.

    OpenAI's type declares times as floats, but its API sends integers, which clients in other languages require.
    """
    fields = response.model_dump(mode="json", exclude_unset=True, by_alias=True)
    for name in ("created_at", "completed_at"):
        if fields[name] is not None:
            fields[name] = int(fields[name])
    return fields


def event_to_json(event: Event) -> str:
    """Return an event as JSON text."""
    return pydantic_core.to_json(event).decode()


@functools.cache
def build_types() -> None:
    """Let pydantic build its validators of OpenAI's types before their first use: that takes a third of a second."""
    Response.model_rebuild()


class ResponseEventBuilder:
    """Builds a response of the Responses API, streamed or not, from the chunks of a chat completion.

    Reasoning, text and each tool call become one output item. Items follow each other: one ends when the next begins.

    Args:
        id: the response's id.
        request: the request of the response.
        chat: the chat request that it became.
        stored: whether the response will be stored.

    Without streaming, and not in the background, no events are created.
    """

    def __init__(
        self,
        *,
        id: str,  # noqa: A002 - the name of OpenAI's field
        request: ResponsesRequest,
        chat: ChatRequest,
        stored: bool,
    ) -> None:
        self.id = id
        self._fields = echoed_fields(request, chat) | {"id": id, "store": stored}
        self._has_events = request.has_events
        self._wants_logprobs = request.wants_logprobs
        self._has_text = not chat.must_call
        self._created = int(time.time())
        self._model = ""
        self._state: ResponseState = "queued"
        self._events: list[Event] = []
        self._num_events = 0
        self._closed: list[ResponseOutputItem] = []
        self._open: OutputItem | None = None
        self._finish_reason: str | None = None
        self._usage: ResponseUsage | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there was a chunk."""
        return self._state != "queued"

    def queue(self, model: str) -> list[Event]:
        """Begin before the first chunk, with the name of the model; return the events of a response that waits."""
        self._model = model
        self._emit_response("created", self._response("queued"))
        self._emit_response("queued", self._response("queued"))
        return self._take_events()

    def add_chunk(self, chunk: ChatCompletionChunk) -> list[Event]:
        """Add the next chunk; return its events."""
        if self._state == "queued":
            self._state = "in_progress"
            if not self._model:
                self._created = chunk.created
                self._model = chunk.model
                self._emit_response("created", self._response("in_progress"))
            self._model = chunk.model
            self._emit_response("in_progress", self._response("in_progress"))
        if chunk.usage is not None:
            self._usage = _usage(chunk.usage)
        for choice in chunk.choices:
            self._add_delta(choice.delta, choice.logprobs)
            self._finish_reason = choice.finish_reason or self._finish_reason
        return self._take_events()

    def finish(self) -> tuple[list[Event], Response]:
        """End the response after the last chunk; return the remaining events, and the response.

        Raises:
            EngineError: the chunks ended before the completion was complete.
        """
        if self._finish_reason is None:
            raise EngineError("The stream ended before the response was complete. Try again.")
        if self._open is None and not self._closed and self._has_text:
            self._current(MessageItem)
        status: ItemStatus = "incomplete" if self._finish_reason == "length" else "completed"
        self._close_item(status)
        if status == "completed":
            response = self._response(status, completed_at=int(time.time()))
        else:
            response = self._response(status, incomplete_details=IncompleteDetails(reason="max_output_tokens"))
        self._emit_response(status, response)
        return self._take_events(), response

    def snapshot(self) -> Response:
        """Return the response so far, with its complete items."""
        return self._response(self._state)

    def cancel(self) -> tuple[list[Event], Response]:
        """End the response before it is complete; return the remaining events, and the response.

        OpenAI has no event for the status `cancelled`; of the events that end a stream, `response.incomplete` is the
        one for a partial output without an error.
        """
        self._close_item("incomplete")
        response = self._response("cancelled")
        self._emit_response("incomplete", response)
        return self._take_events(), response

    def fail(self, error: Mapping[str, Any]) -> tuple[list[Event], Response]:
        """End the response with an error; return the events that report it, and the response.

        OpenAI's clients raise an exception for an event with an `error` object, and the Open Responses specification
        requires one; OpenAI's type of the event has the same fields at the top level.

        Args:
            error: OpenAI's error object: `message`, `type`, `param` and `code`.
        """
        fields = {name: error[name] for name in ("code", "message", "param")}
        self.emit("error", **fields, error=dict(error))
        self._interrupt()
        cause = ResponseError(code=_ERROR_CODES.get(error["type"], "server_error"), message=error["message"])
        response = self._response("failed", error=cause)
        self._emit_response("failed", response)
        return self._take_events(), response

    def emit(self, event_type: str, *, item: ResponseOutputItem | None = None, **fields: Any) -> None:
        """Add an event with the next sequence number, if the response is streamed."""
        if not self._has_events:
            return
        if item:
            fields["item"] = item.model_dump(mode="json", exclude_unset=True, by_alias=True)
        self._events.append({"type": event_type, "sequence_number": self._num_events, **fields})
        self._num_events += 1

    def _emit_response(self, step: str, response: Response) -> None:
        if self._has_events:
            self.emit(f"response.{step}", response=response_to_json(response))

    def _add_delta(self, delta: ChoiceDelta, logprobs: ChoiceLogprobs | None) -> None:
        if reasoning := (delta.model_extra or {}).get("reasoning_content"):
            self._current(ReasoningItem).add(reasoning)
        if delta.content:
            entries = logprobs.content if logprobs and self._wants_logprobs else None
            self._current(MessageItem).add(delta.content, [entry.model_dump() for entry in entries or ()])
        for call in delta.tool_calls or ():
            self._add_call(call)

    def _add_call(self, delta: ChoiceDeltaToolCall) -> None:
        function = delta.function
        if delta.id is not None:
            self._close_item("completed")
            self._open = FunctionCallItem(self.emit, len(self._closed), delta.id, (function and function.name) or "")
        if isinstance(self._open, FunctionCallItem) and function and function.arguments:
            self._open.add(function.arguments)

    def _current(self, kind: type[ItemT]) -> ItemT:
        if isinstance(self._open, kind):
            return self._open
        self._close_item("completed")
        self._open = item = kind(self.emit, len(self._closed))
        return item

    def _close_item(self, status: ItemStatus) -> None:
        if self._open is not None:
            self._closed.append(self._open.close(status))
            self._open = None

    def _interrupt(self) -> None:
        if self._open is not None:
            self._closed.append(self._open.item("incomplete"))
            self._open = None

    def _take_events(self) -> list[Event]:
        events = self._events
        self._events = []
        return events

    def _response(self, status: ResponseState, **fields: Any) -> Response:
        final = {"completed_at": None, "incomplete_details": None, "error": None} | fields
        values = {**self._fields, "model": self._model, "output": list(self._closed), "usage": self._usage, **final}
        return Response(created_at=self._created, status=status, **values)


def _usage(usage: CompletionUsage) -> ResponseUsage:
    prompt = usage.prompt_tokens_details
    completion = usage.completion_tokens_details
    names = "image_tokens", "video_tokens", "pruned_tokens"
    visual = {name: getattr(prompt, name) for name in names if hasattr(prompt, name)}
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=(prompt and prompt.cached_tokens) or 0, cache_write_tokens=0, **visual
        ),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=(completion and completion.reasoning_tokens) or 0),
        total_tokens=usage.total_tokens,
    )
