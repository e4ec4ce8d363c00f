"""Incremental parser of generated text into reasoning and everything after it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from ..tokenization.conversation import ConversationFormat
from ..tokenization.stop_strings import StopStringMatcher


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningDelta:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """A piece of the text after the reasoning.

    Attributes:
        begin: the index of its first character in the text that was fed.
        text: the piece.
    """

    begin: int
    text: str


ReasoningEvent: TypeAlias = ReasoningDelta | TextDelta


class _State(Enum):
    BEFORE = "before reasoning, or before text without reasoning"
    REASONING = "in reasoning"
    AFTER = "between reasoning and text"
    TEXT = "in text"


class ReasoningParser:
    """Splits generated text into reasoning, which one pair of tags encloses, and the text after it.

    White space around the tags belongs to neither. Text that does not begin with the first tag has no reasoning. If the
    last tag is missing, because the completion was too short, everything is reasoning.

    Args:
        conversation: how the model writes reasoning.
        started: whether the prompt ends with the first tag, so that the completion begins with reasoning.
    """

    def __init__(self, conversation: ConversationFormat, *, started: bool) -> None:
        self._begin_tag = conversation.reasoning_begin
        self._end_tag = StopStringMatcher((conversation.reasoning_end,))
        self._state = _State.REASONING if started else _State.BEFORE
        self._held = ""  # possible beginning of the first tag, or white space that may precede the last one
        self._is_first_piece = True  # of the reasoning
        self._position = 0  # characters fed

    @property
    def reasoning(self) -> bool:
        """Whether the reasoning has started and not ended."""
        return self._state is _State.REASONING

    def feed(self, text: str) -> list[ReasoningEvent]:
        """Parse more text; return the events that are certain."""
        if self._state is _State.TEXT:
            begin, self._position = self._position, self._position + len(text)
            return [TextDelta(begin=begin, text=text)] if text else []
        return _merge_events([event for character in text for event in self._feed_character(character)])

    def flush(self) -> list[ReasoningEvent]:
        """End the text; return the events for what was held back."""
        if self._state is _State.BEFORE:
            return self._start_text()
        if self._state is _State.REASONING:
            return self._reason(self._end_tag.flush())
        return []

    def _feed_character(self, character: str) -> list[ReasoningEvent]:
        self._position += 1
        if self._state is _State.BEFORE:
            return self._read_beginning(character)
        if self._state is _State.REASONING:
            text = self._end_tag.feed(character)
            if self._end_tag.matched:
                self._state, self._held = _State.AFTER, ""
            return self._reason(text)
        if self._state is _State.AFTER and character.isspace():
            return []
        self._state = _State.TEXT
        return [TextDelta(begin=self._position - 1, text=character)]

    def _read_beginning(self, character: str) -> list[ReasoningEvent]:
        self._held += character
        beginning = self._held.lstrip()
        if beginning == self._begin_tag:
            self._state, self._held = _State.REASONING, ""
            return []
        return [] if self._begin_tag.startswith(beginning) else self._start_text()

    def _start_text(self) -> list[ReasoningEvent]:
        text, self._held, self._state = self._held, "", _State.TEXT
        return [TextDelta(begin=self._position - len(text), text=text)] if text else []

    def _reason(self, text: str) -> list[ReasoningEvent]:
        """Emit reasoning without the white space at its beginning, and hold back the white space at its end."""
        text = self._held + text
        if self._is_first_piece:
            text = text.lstrip()
        piece = text.rstrip()
        self._held = text[len(piece) :] if self._state is _State.REASONING else ""
        self._is_first_piece = self._is_first_piece and not piece
        return [ReasoningDelta(text=piece)] if piece else []


def _merge_events(events: list[ReasoningEvent]) -> list[ReasoningEvent]:
    """Merge adjacent deltas of the same type."""
    merged: list[ReasoningEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(last, ReasoningDelta) and isinstance(event, ReasoningDelta):
            merged[-1] = ReasoningDelta(text=last.text + event.text)
        elif isinstance(last, TextDelta) and isinstance(event, TextDelta):
            merged[-1] = TextDelta(begin=last.begin, text=last.text + event.text)
        else:
            merged.append(event)
    return merged
