"""Incremental parser of generated text into content and tool calls, in the syntax of a `ConversationFormat`."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..tokenization.conversation import HERMES, ConversationFormat
from ..tokenization.stop_strings import length_held
from .call_syntax import ArgumentsReader, Tools, call_syntax


@dataclass(frozen=True, kw_only=True, slots=True)
class ContentDelta:
    """A piece of the content.

    Attributes:
        begin: the index of its first character in the text that was fed.
        text: the piece.
    """

    begin: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallStart:
    """The start of a tool call.

    Attributes:
        index: the index of the call in the completion.
        id: a unique id.
        name: the tool's name.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallArgumentsDelta:
    """A piece of the arguments of the last started call; all pieces together are a JSON object."""

    index: int
    text: str


ParserEvent: TypeAlias = ContentDelta | ToolCallStart | ToolCallArgumentsDelta

_State: TypeAlias = Literal["text", "call", "arguments"]
"""What is read: content, a call up to its arguments, or the arguments of a guided call."""


class ToolCallParser:
    """Splits generated text into content and tool calls.

    With guided decoding, arguments are streamed while they are generated. Otherwise a call is emitted once it is
    complete and valid; text that looks like a call but is not is emitted as content, unchanged.

    Args:
        tools: the tools that may be called; empty if all text is content.
        guided: whether a grammar constrains the completion.
        must_call: whether the grammar allows nothing but calls.
        conversation: how the model writes tool calls.

    Attributes:
        calls: the number of calls that have started.
        complete: the number of calls that are complete.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        guided: bool,
        must_call: bool = False,
        conversation: ConversationFormat = HERMES,
    ) -> None:
        self._call_begin = conversation.call_begin
        self._call_end = conversation.call_end
        separator = conversation.call_separator
        self._beginnings = [separator[index:] + self._call_begin for index in range(len(separator) + 1)]
        self._begin = re.compile("|".join(map(re.escape, self._beginnings)))
        self._syntax = call_syntax(conversation, tools)
        self.calls: int = 0
        self.complete: int = 0
        self._tools = tools
        self._guided = guided
        self._must_call = must_call
        self._state: _State = "text"
        self._consumed = 0  # characters emitted as content or parsed as part of a call
        self._pending = ""  # the text after them
        self._arguments: ArgumentsReader | None = None  # of the call that is being read

    @property
    def may_call(self) -> bool:
        """Whether text is held back because it may begin a call."""
        return bool(self._pending)

    def feed(self, text: str) -> list[ParserEvent]:
        """Parse more text; return the events that are certain."""
        self._pending += text
        if not self._tools:
            return self._emit_content(len(text))
        events: list[ParserEvent] = []
        state: _State | None = None
        while state != self._state:
            state = self._state
            events += self._read()
        return events

    def flush(self) -> list[ParserEvent]:
        """End the text; return the events for what was held back."""
        if self._arguments:
            return self._emit_arguments(self._arguments.flush(self._pending))
        is_call = self._state == "call"
        if self._guided and (self._must_call or self.calls or is_call):
            # The beginning of a truncated call is not content.
            head = self._syntax.named.match(self._pending)
            return [self._start_call(head[1])] if head else []
        if is_call:
            return self._parse_call(len(self._pending))
        return self._emit_content(len(self._pending))

    def _read(self) -> list[ParserEvent]:
        if self._state == "text":
            return self._read_text()
        return self._read_call() if self._state == "call" else self._read_arguments()

    def _read_text(self) -> list[ParserEvent]:
        begin = self._begin.search(self._pending)
        if begin is None:
            held = length_held(self._pending, self._beginnings)
            return self._emit_content(len(self._pending) - held)
        self._state = "call"
        return self._emit_content(begin.start())

    def _read_call(self) -> list[ParserEvent]:
        end = self._pending.find(self._call_end)
        limit = len(self._pending) if end < 0 else end
        head = self._syntax.head.match(self._pending, 0, limit) if self._guided else None
        if head and head[1] in self._tools:
            self._consume(head.end())
            self._state = "arguments"
            self._arguments = self._syntax.arguments(head[1])
            return [self._start_call(head[1])]
        return [] if end < 0 else self._parse_call(end + len(self._call_end))

    def _read_arguments(self) -> list[ParserEvent]:
        assert self._arguments is not None, "a call has begun"
        piece = self._arguments.read(self._pending)
        self._consume(piece.length)
        if piece.is_last:
            self.complete += 1
            self._state = "text"
            self._arguments = None
        return self._emit_arguments(piece.arguments)

    def _parse_call(self, length: int) -> list[ParserEvent]:
        self._state = "text"
        call = self._syntax.parse(self._pending[:length].partition(self._call_begin)[2].removesuffix(self._call_end))
        if call is None:
            return self._emit_content(length)
        self._consume(length)
        self.complete += 1
        return [self._start_call(call.name), *self._emit_arguments(call.arguments)]

    def _start_call(self, name: str) -> ToolCallStart:
        self.calls += 1
        return ToolCallStart(index=self.calls - 1, id=f"call_{uuid.uuid4().hex[:24]}", name=name)

    def _emit_arguments(self, text: str) -> list[ParserEvent]:
        return [ToolCallArgumentsDelta(index=self.calls - 1, text=text)] if text else []

    def _emit_content(self, length: int) -> list[ParserEvent]:
        text = self._pending[:length]
        if self.calls:  # white space after a call is dropped unless content follows
            text = text.rstrip()
        if not text:
            return []
        event = ContentDelta(begin=self._consumed, text=text)
        self._consume(len(text))
        return [event]

    def _consume(self, length: int) -> None:
        self._consumed += length
        self._pending = self._pending[length:]
