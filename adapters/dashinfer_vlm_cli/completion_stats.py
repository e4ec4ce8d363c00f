"""One answer, as it is written: its text piece by piece, and how long that took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai.types import CompletionUsage
    from openai.types.chat import ChatCompletionChunk

    from .engines import AnyEngine


@dataclass(kw_only=True, slots=True)
class Completion:
    """What came of a request so far.

    Attributes:
        text: all of it.
        finish: why it ended; empty while it has not.
        usage: the engine's count of tokens; None until the end, or where it does not count.
        pieces: chunks with text in them, which are tokens or more.
        started, first, last: when it was asked, and when the first and the last piece came, in seconds.
        gaps: seconds between pieces.
    """

    text: str = ""
    finish: str = ""
    usage: CompletionUsage | None = None
    pieces: int = 0
    started: float
    first: float | None = None
    last: float | None = None
    gaps: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.usage.completion_tokens if self.usage else self.pieces

    @property
    def seconds_to_first(self) -> float | None:
        return None if self.first is None else self.first - self.started

    @property
    def seconds_per_token(self) -> float | None:
        """Of the tokens behind the first."""
        if self.first is None or self.last is None or self.tokens < 2:
            return None
        return (self.last - self.first) / (self.tokens - 1)

    @property
    def tokens_per_second(self) -> float | None:
        return 1 / self.seconds_per_token if self.seconds_per_token else None

    def take(self, chunk: ChatCompletionChunk, now: float) -> str:
        """Note what a chunk brings; the text in it."""
        self.usage = chunk.usage or self.usage
        self.finish = next((choice.finish_reason for choice in chunk.choices if choice.finish_reason), self.finish)
        text = "".join(choice.delta.content or "" for choice in chunk.choices)
        if text:
            self._note_time(now)
            self.text += text
        return text

    def _note_time(self, now: float) -> None:
        if self.last is not None:
            self.gaps.append(now - self.last)
        self.first = now if self.first is None else self.first
        self.last = now
        self.pieces += 1

    def as_text(self) -> str:
        """A line for people."""
        parts = [f"{self.tokens} tokens"]
        if self.seconds_to_first is not None:
            parts.append(f"first after {self.seconds_to_first:.2f} s")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.usage is not None:
            parts.append(f"prompt {self.usage.prompt_tokens} tokens{_images(self.usage)}")
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        return {
            "answer": self.text,
            "finish_reason": self.finish or None,
            "usage": self.usage.model_dump(exclude_none=True) if self.usage else None,
            "seconds_to_first_token": self.seconds_to_first,
            "tokens_per_second": self.tokens_per_second,
        }


def complete(
    engine: AnyEngine, request: Mapping[str, Any], show: Callable[[str], None], *, into: Completion | None = None
) -> Completion:
    """Ask, and show the answer as it comes. What `into` holds stays true when this is interrupted.

    Raises as `ChatEngine.chat`; a KeyboardInterrupt cancels the request.
    """
    answer = into or Completion(started=time.perf_counter())
    streamed = {**request, "stream": True, "stream_options": {"include_usage": True}}
    with closing(engine.stream(streamed)) as chunks:
        for chunk in chunks:
            show(answer.take(chunk, time.perf_counter()))
    return answer


def _images(usage: CompletionUsage) -> str:
    """Tokens of pictures and videos, where the engine tells; OpenAI's type does not know the field."""
    details = usage.prompt_tokens_details
    count = getattr(details, "image_tokens", None) if details else None
    return f" ({count} of pictures)" if count else ""
