"""Incremental parser of generated text into reasoning and everything after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..structured_output.tool_parser import ContentDelta
from ..tokenization.conversation import ConversationFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningDelta:
    """A piece of the reasoning."""

    text: str


ReasoningEvent: TypeAlias = ReasoningDelta | ContentDelta

_State: TypeAlias = Literal["before", "reasoning", "after", "text"]
"""Where the text ends so far: before reasoning or text without it, in it, between it and the text, or in the text."""


class ReasoningParser:
    """Splits generated text into reasoning, which one pair of tags encloses, and the text after it.

    White space around the tags belongs to neither. Text that does not begin with the first tag has no reasoning. If the
    last tag is missing, because the completion was too short, everything is reasoning.

    Args:
        conversation: how the model writes reasoning.
        started: whether the prompt ends with the first tag, so that the completion begins with reasoning.
        enabled: whether there can be reasoning; otherwise, all is text, unchanged.
    """

    def __init__(self, conversation: ConversationFormat, *, started: bool, enabled: bool = True) -> None:
        self._begin_tag = conversation.reasoning_begin
        self._end_tag = conversation.reasoning_end
        self._state: _State = "before" if enabled else "text"
        if started:
            self._state = "reasoning"
        self._pending = ""  # the text fed for which there is no event yet
        self._is_first_piece = True  # of the reasoning
        self._position = 0  # characters fed

    @property
    def reasoning(self) -> bool:
        """Whether the reasoning has started and not ended."""
        return self._state == "reasoning"

    def feed(self, text: str) -> list[ReasoningEvent]:
        """Parse more text; return the events that are certain."""
        self._pending += text
        self._position += len(text)
        events: list[ReasoningEvent] = []
        if self._state == "before":
            self._read_beginning()
        if self._state == "reasoning":
            events += self._read_reasoning()
        if self._state == "after" and (content := self._pending.lstrip()):
            self._pending = content
            self._state = "text"
        return [*events, *self._take_text()] if self._state == "text" else events

    def flush(self) -> list[ReasoningEvent]:
        """End the text; return the events for what was held back."""
        if self._state == "before":
            return self._take_text()
        return self._reason(self._pending) if self._state == "reasoning" else []

    def _read_beginning(self) -> None:
        beginning = self._pending.lstrip()
        if beginning.startswith(self._begin_tag):
            self._pending = beginning.removeprefix(self._begin_tag)
            self._state = "reasoning"
        elif not self._begin_tag.startswith(beginning):
            self._state = "text"

    def _read_reasoning(self) -> list[ReasoningEvent]:
        reasoning, tag, rest = self._pending.partition(self._end_tag)
        if tag:
            self._state = "after"
            self._pending = rest
            return self._reason(reasoning)
        lengths = range(len(self._end_tag) - 1, -1, -1)
        held = next(length for length in lengths if reasoning.endswith(self._end_tag[:length]))
        piece = reasoning[: len(reasoning) - held].rstrip()
        self._pending = reasoning[len(piece) :]
        return self._reason(piece)

    def _reason(self, text: str) -> list[ReasoningEvent]:
        piece = text.rstrip()
        if self._is_first_piece:
            piece = piece.lstrip()
        self._is_first_piece = self._is_first_piece and not piece
        return [ReasoningDelta(text=piece)] if piece else []

    def _take_text(self) -> list[ReasoningEvent]:
        text = self._pending
        self._pending = ""
        return [ContentDelta(begin=self._position - len(text), text=text)] if text else []
