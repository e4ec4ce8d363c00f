"""Incremental parser of generated text into content and tool calls, in the syntax of a `ConversationFormat`."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..tokenization.conversation import HERMES, ConversationFormat
from ..tokenization.stop_strings import StopStringMatcher


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


class ToolCallParser:
    """Splits generated text into content and tool calls.

    With guided decoding, arguments are streamed while they are generated. Otherwise a call is emitted once it is
    complete and valid; text that looks like a call but is not is emitted as content, unchanged.

    Args:
        names: the names of the tools that may be called; empty if all text is content.
        guided: whether a grammar constrains the completion.
        must_call: whether the grammar allows nothing but calls.
        conversation: how the model writes tool calls.

    Attributes:
        calls: the number of calls that have started.
        complete: the number of calls that are complete.
    """

    def __init__(
        self,
        names: Collection[str],
        *,
        guided: bool,
        must_call: bool = False,
        conversation: ConversationFormat = HERMES,
    ) -> None:
        self._tags = conversation.call_begin, conversation.call_end
        name = rf'\s*{re.escape(conversation.call_begin)}\s*\{{"name": ?"([^"\\]*)"'
        self._named = re.compile(name)
        self._head = re.compile(name + r', ?"arguments": ?\{')
        self.calls: int = 0
        self.complete: int = 0
        self._names = names
        self._guided = guided
        self._must_call = must_call
        self._state: Callable[[str], list[ParserEvent]] = self._read_text
        self._begin_tag, self._end_tag = self._new_begin_tag(), self._new_end_tag()
        self._consumed = 0  # characters emitted as content or parsed as part of a call
        self._pending = ""  # the text after them
        self._arguments: list[str] = []  # pieces of the arguments of the call that is being read
        self._num_content = 0  # leading characters of `_pending` that cannot begin a call

    @property
    def may_call(self) -> bool:
        """Whether text is held back because it may begin a call."""
        return bool(self._pending)

    def feed(self, text: str) -> list[ParserEvent]:
        """Parse more text; return the events that are certain."""
        if not self._names:
            return self._emit_content(text) if text else []
        return _merge_events(event for character in text for event in self._state(character))

    def flush(self) -> list[ParserEvent]:
        """End the text; return the events for what was held back."""
        if self._state == self._read_arguments:
            rest = self._end_tag.flush()
            is_argument = rest and not _is_json("".join(self._arguments))  # a brace ends an inner object, or the call
            return [ToolCallArgumentsDelta(index=self.calls - 1, text=rest)] if is_argument else []
        if self._guided and (self._must_call or self.calls or self._state == self._read_call):
            return self._flush_truncated_call()
        if self._state == self._read_call:
            return self._parse_pending_call()
        if not self._pending or self._is_space_after_call(self._pending):
            return []
        return self._emit_content(self._pending)

    def _flush_truncated_call(self) -> list[ParserEvent]:
        """Return the call that the completion ends in, if its name is complete: its beginning is not content."""
        head = self._named.match(self._pending)
        return [self._start_call(head[1])] if head else []

    def _read_text(self, character: str) -> list[ParserEvent]:
        self._pending += character
        self._num_content += len(self._begin_tag.feed(character))
        text, events = self._pending[: self._num_content], list[ParserEvent]()
        if text and not self._is_space_after_call(text):
            events = self._emit_content(text)
        if self._begin_tag.matched:
            self._begin_tag, self._num_content, self._state = self._new_begin_tag(), 0, self._read_call
        return events

    def _read_call(self, character: str) -> list[ParserEvent]:
        self._pending += character
        if (
            self._guided
            and character == "{"
            and (head := self._head.fullmatch(self._pending))
            and head[1] in self._names
        ):
            self._consume_pending()
            self._end_tag, self._state, self._arguments = self._new_end_tag(), self._read_arguments, []
            return [self._start_call(head[1]), *self._read_arguments("{")]
        return self._parse_pending_call() if self._pending.endswith(self._tags[1]) else []

    def _read_arguments(self, character: str) -> list[ParserEvent]:
        self._consumed += 1
        text = self._end_tag.feed(character)
        self._arguments.append(text)
        if self._end_tag.matched:
            self.complete += 1
            self._state = self._read_text
        return [ToolCallArgumentsDelta(index=self.calls - 1, text=text)] if text else []

    def _parse_pending_call(self) -> list[ParserEvent]:
        """Parse the pending text as a call; emit it as content if it is not a valid one."""
        self._state = self._read_text
        begin, end = self._tags
        call = _parse_call(self._pending.partition(begin)[2].removesuffix(end))
        if call is None or call[0] not in self._names:
            return self._emit_content(self._pending)
        self._consume_pending()
        self.complete += 1
        started = self._start_call(call[0])
        return [started, ToolCallArgumentsDelta(index=started.index, text=call[1])]

    def _start_call(self, name: str) -> ToolCallStart:
        self.calls += 1
        return ToolCallStart(index=self.calls - 1, id=f"call_{uuid.uuid4().hex[:24]}", name=name)

    def _is_space_after_call(self, text: str) -> bool:
        """Whether text is only whitespace after a call, which is dropped unless content follows."""
        return self.calls > 0 and text.isspace()

    def _emit_content(self, text: str) -> list[ParserEvent]:
        event = ContentDelta(begin=self._consumed, text=text)
        self._consumed += len(text)
        self._pending, self._num_content = self._pending[len(text) :], 0
        return [event]

    def _new_begin_tag(self) -> StopStringMatcher:
        return StopStringMatcher((self._tags[0], f"\n{self._tags[0]}"))

    def _new_end_tag(self) -> StopStringMatcher:
        return StopStringMatcher(("}\n" + self._tags[1],))

    def _consume_pending(self) -> None:
        self._consumed += len(self._pending)
        self._pending, self._num_content = "", 0


def _parse_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a call; None if the text is not a call."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return (call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _merge_events(events: Iterable[ParserEvent]) -> list[ParserEvent]:
    """Merge adjacent deltas of the same type."""
    merged: list[ParserEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(last, (ContentDelta, ToolCallArgumentsDelta)) and type(last) is type(event):
            merged[-1] = replace(last, text=last.text + event.text)
        else:
            merged.append(event)
    return merged
