"""Text of the answer, piece by piece -> content and calls, which the model writes as a `ConversationFormat` says."""

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
        begin: of the text that was fed, the character that it begins at.
        text: the piece.
    """

    begin: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallStart:
    """A call begins.

    Attributes:
        index: counts the calls of the answer.
        id: a name for it that no other call has.
        name: of the tool.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallArgumentsDelta:
    """A piece of the arguments of the call that began last; all pieces together are a JSON object."""

    index: int
    text: str


ParserEvent: TypeAlias = ContentDelta | ToolCallStart | ToolCallArgumentsDelta


class ToolCallParser:
    """Finds the calls in an answer.

    Where a grammar guides the answer, arguments are passed on while they are written. Elsewhere a call is passed on
    once it is whole and known to be one; what is none is given back as text, the same to the character.

    Args:
        names: of the tools that may be called; none if the answer is text and nothing else.
        guided: whether a grammar guides the answer.
        conversation: how the model writes calls.

    Attributes:
        calls: how many have begun.
        complete: how many have ended.
    """

    def __init__(self, names: Collection[str], *, guided: bool, conversation: ConversationFormat = HERMES) -> None:
        self._tags = conversation.call_begin, conversation.call_end
        self._head = re.compile(
            rf'\s*{re.escape(conversation.call_begin)}\s*\{{"name": ?"([^"\\]*)", ?"arguments": ?\{{'
        )
        self.calls: int = 0
        self.complete: int = 0
        self._names = names
        self._guided = guided
        self._state: Callable[[str], list[ParserEvent]] = self._read_text
        self._opening, self._end = self._new_opening(), self._new_end()
        self._settled = 0  # characters that became content, or part of a call
        self._raw = ""  # those after them
        self._ready = 0  # those of `_raw` that begin no call

    def feed(self, text: str) -> list[ParserEvent]:
        """What is certain now."""
        if not self._names:
            return self._say(text) if text else []
        return _joined(event for character in text for event in self._state(character))

    def flush(self) -> list[ParserEvent]:
        """What was held back, at the end of the answer."""
        if self._state == self._read_arguments:
            rest = self._end.flush()
            return [ToolCallArgumentsDelta(index=self.calls - 1, text=rest)] if rest else []
        if self._state == self._read_call:
            return self._close()
        if not self._raw or self._is_gap(self._raw):
            return []
        return self._say(self._raw)

    def _read_text(self, character: str) -> list[ParserEvent]:
        self._raw += character
        self._ready += len(self._opening.feed(character))
        text, events = self._raw[: self._ready], list[ParserEvent]()
        if text and not self._is_gap(text):
            events = self._say(text)
        if self._opening.matched:
            self._opening, self._ready, self._state = self._new_opening(), 0, self._read_call
        return events

    def _read_call(self, character: str) -> list[ParserEvent]:
        self._raw += character
        if self._guided and character == "{" and (head := self._head.fullmatch(self._raw)) and head[1] in self._names:
            self._settle()
            self._end, self._state = self._new_end(), self._read_arguments
            return [self._begin(head[1]), *self._read_arguments("{")]
        return self._close() if self._raw.endswith(self._tags[1]) else []

    def _read_arguments(self, character: str) -> list[ParserEvent]:
        self._settled += 1
        text = self._end.feed(character)
        if self._end.matched:
            self.complete += 1
            self._state = self._read_text
        return [ToolCallArgumentsDelta(index=self.calls - 1, text=text)] if text else []

    def _close(self) -> list[ParserEvent]:
        """A call that was read to its end; text if it is none."""
        self._state = self._read_text
        begin, end = self._tags
        found = _parsed(self._raw.partition(begin)[2].removesuffix(end))
        if found is None or found[0] not in self._names:
            return self._say(self._raw)
        self._settle()
        self.complete += 1
        begun = self._begin(found[0])
        return [begun, ToolCallArgumentsDelta(index=begun.index, text=found[1])]

    def _begin(self, name: str) -> ToolCallStart:
        self.calls += 1
        return ToolCallStart(index=self.calls - 1, id=f"call_{uuid.uuid4().hex[:24]}", name=name)

    def _is_gap(self, text: str) -> bool:
        """Whether text is but the space behind a call, as long as nothing else follows."""
        return self.calls > 0 and text.isspace()

    def _say(self, text: str) -> list[ParserEvent]:
        event = ContentDelta(begin=self._settled, text=text)
        self._settled += len(text)
        self._raw, self._ready = self._raw[len(text) :], 0
        return [event]

    def _new_opening(self) -> StopStringMatcher:
        return StopStringMatcher((self._tags[0], f"\n{self._tags[0]}"))

    def _new_end(self) -> StopStringMatcher:
        return StopStringMatcher(("}\n" + self._tags[1],))

    def _settle(self) -> None:
        self._settled += len(self._raw)
        self._raw, self._ready = "", 0


def _parsed(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call; None if it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return (call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _joined(events: Iterable[ParserEvent]) -> list[ParserEvent]:
    """The events, with neighbouring pieces as one."""
    joined: list[ParserEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(last, (ContentDelta, ToolCallArgumentsDelta)) and type(last) is type(event):
            joined[-1] = replace(last, text=last.text + event.text)
        else:
            joined.append(event)
    return joined
