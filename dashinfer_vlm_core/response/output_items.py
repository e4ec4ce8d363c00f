"""The output items of a response of the Responses API while they are generated, and their events."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeAlias

from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputItem,
    ResponseOutputMessage,
    ResponseReasoningItem,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]

Emit: TypeAlias = Callable[..., None]
"""Adds an event of a type with fields: `ResponseEventBuilder.emit`."""


class OutputItem(ABC):
    """An output item that has begun and not ended."""

    prefix: ClassVar[str]

    def __init__(self, emit: Emit, index: int) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self._emit_event = emit
        self._place: dict[str, Any] = {"item_id": self.id, "output_index": index}
        self._pieces: list[str] = []
        emit("response.output_item.added", item=self.item("in_progress"), output_index=index)

    @property
    def _text(self) -> str:
        return "".join(self._pieces)

    def close(self, status: ItemStatus) -> ResponseOutputItem:
        """End the item; return it."""
        item = self.item(status)
        self._emit_done()
        self._emit_event("response.output_item.done", item=item, output_index=self._place["output_index"])
        return item

    @abstractmethod
    def item(self, status: ItemStatus) -> ResponseOutputItem:
        """Return the item so far; without content while it is in progress."""

    @abstractmethod
    def _emit_done(self) -> None: ...

    def _emit(self, event_type: str, **fields: Any) -> None:
        self._emit_event(event_type, **self._place, **fields)


class _TextItem(OutputItem):
    """An item whose content is one part."""

    def __init__(self, emit: Emit, index: int) -> None:
        super().__init__(emit, index)
        self._place["content_index"] = 0
        self._emit("response.content_part.added", part=self._part())

    def item(self, status: ItemStatus) -> ResponseOutputItem:
        return self._item([] if status == "in_progress" else [self._part()], status)

    @abstractmethod
    def _item(self, content: list[Any], status: ItemStatus) -> ResponseOutputItem: ...

    @abstractmethod
    def _part(self) -> dict[str, Any]:
        """Return the content part so far."""


class MessageItem(_TextItem):
    """The text of the assistant."""

    prefix: ClassVar[str] = "msg"

    def __init__(self, emit: Emit, index: int) -> None:
        self._logprobs: list[dict[str, Any]] = []
        super().__init__(emit, index)

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> None:
        self._pieces.append(text)
        self._logprobs += logprobs
        self._emit("response.output_text.delta", delta=text, logprobs=logprobs)

    def _emit_done(self) -> None:
        self._emit("response.output_text.done", text=self._text, logprobs=self._logprobs)
        self._emit("response.content_part.done", part=self._part())

    def _item(self, content: list[Any], status: ItemStatus) -> ResponseOutputMessage:
        return ResponseOutputMessage(id=self.id, content=content, role="assistant", status=status, type="message")

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": list(self._logprobs)}


class ReasoningItem(_TextItem):
    """The reasoning. It is not summarized."""

    prefix: ClassVar[str] = "rs"

    def add(self, text: str) -> None:
        self._pieces.append(text)
        self._emit("response.reasoning_text.delta", delta=text)

    def _emit_done(self) -> None:
        self._emit("response.reasoning_text.done", text=self._text)
        self._emit("response.content_part.done", part=self._part())

    def _item(self, content: list[Any], status: ItemStatus) -> ResponseReasoningItem:
        return ResponseReasoningItem(id=self.id, summary=[], type="reasoning", content=content, status=status)

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self._text}


class FunctionCallItem(OutputItem):
    """A call of a function."""

    prefix: ClassVar[str] = "fc"

    def __init__(self, emit: Emit, index: int, call_id: str, name: str) -> None:
        self._call_id = call_id
        self._name = name
        super().__init__(emit, index)

    def add(self, arguments: str) -> None:
        self._pieces.append(arguments)
        self._emit("response.function_call_arguments.delta", delta=arguments)

    def _emit_done(self) -> None:
        self._emit("response.function_call_arguments.done", arguments=self._text, name=self._name)

    def item(self, status: ItemStatus) -> ResponseFunctionToolCall:
        return ResponseFunctionToolCall(
            id=self.id,
            arguments=self._text,
            call_id=self._call_id,
            name=self._name,
            status=status,
            type="function_call",
        )
