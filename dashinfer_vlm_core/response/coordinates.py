"""Coordinates in the content and the tool calls of a response, converted while they are generated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..models.coordinates import CoordinateStream, ImageCoordinates
from ..structured_output.tool_parser import ContentDelta, ParserEvent, ToolCallArgumentsDelta, ToolCallStart


class CoordinateConverter:
    """Converts the text of a parser's events to coordinates of the original image.

    `begin` of a content delta is still an index in the text of the model.
    """

    def __init__(self, image: ImageCoordinates) -> None:
        self._image = image
        self._stream = CoordinateStream(image)
        self._last: ContentDelta | ToolCallArgumentsDelta | None = None

    def feed(self, events: Iterable[ParserEvent]) -> list[ParserEvent]:
        """Return the events whose text is final. The text of the content, and of each call, is converted separately."""
        converted: list[ParserEvent] = []
        for event in events:
            if isinstance(event, ToolCallStart) or type(event) is not type(self._last):
                converted += self.flush()
            if isinstance(event, ToolCallStart):
                converted.append(event)
                continue
            self._last = event
            converted += self._with_text(self._stream.feed(event.text))
        return converted

    def flush(self) -> list[ParserEvent]:
        """Return the event for the text that was held back."""
        return self._with_text(self._stream.flush())

    def _with_text(self, text: str) -> list[ParserEvent]:
        return [replace(self._last, text=text)] if text and self._last else []
