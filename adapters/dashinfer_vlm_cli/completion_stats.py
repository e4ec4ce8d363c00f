"""A streamed completion: its text and its timing."""

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
    """A completion so far. Times are in seconds.

    Attributes:
        text: the text so far.
        finish_reason: empty until the completion ends.
        usage: the engine's token counts; None until the end, or if the engine does not report them.
        num_chunks: chunks with text, each of one or more tokens.
        started_at: when the request was sent.
        first_chunk_at, last_chunk_at: when the first and the last chunk with text arrived.
        gaps: intervals between chunks.
    """

    text: str = ""
    finish_reason: str = ""
    usage: CompletionUsage | None = None
    num_chunks: int = 0
    started_at: float
    first_chunk_at: float | None = None
    last_chunk_at: float | None = None
    gaps: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.usage.completion_tokens if self.usage else self.num_chunks

    @property
    def seconds_to_first_token(self) -> float | None:
        return None if self.first_chunk_at is None else self.first_chunk_at - self.started_at

    @property
    def seconds_per_token(self) -> float | None:
        """The mean time per token after the first one."""
        if self.first_chunk_at is None or self.last_chunk_at is None or self.tokens < 2:
            return None
        return (self.last_chunk_at - self.first_chunk_at) / (self.tokens - 1)

    @property
    def tokens_per_second(self) -> float | None:
        return 1 / self.seconds_per_token if self.seconds_per_token else None

    def add_chunk(self, chunk: ChatCompletionChunk, now: float) -> str:
        """Add a chunk and return its text."""
        self.usage = chunk.usage or self.usage
        self.finish_reason = next(
            (choice.finish_reason for choice in chunk.choices if choice.finish_reason), self.finish_reason
        )
        text = "".join(choice.delta.content or "" for choice in chunk.choices)
        if text:
            self._record_time(now)
            self.text += text
        return text

    def _record_time(self, now: float) -> None:
        if self.last_chunk_at is not None:
            self.gaps.append(now - self.last_chunk_at)
        self.first_chunk_at = now if self.first_chunk_at is None else self.first_chunk_at
        self.last_chunk_at = now
        self.num_chunks += 1

    def as_text(self) -> str:
        """Summarize token counts and rates in one line."""
        parts = [f"{self.tokens} tokens"]
        if self.seconds_to_first_token is not None:
            parts.append(f"first after {self.seconds_to_first_token:.2f} s")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.usage is not None:
            parts.append(f"prompt {self.usage.prompt_tokens} tokens{_images(self.usage)}")
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        return {
            "response": self.text,
            "finish_reason": self.finish_reason or None,
            "usage": self.usage.model_dump(exclude_none=True) if self.usage else None,
            "seconds_to_first_token": self.seconds_to_first_token,
            "tokens_per_second": self.tokens_per_second,
        }


def complete(
    engine: AnyEngine, request: Mapping[str, Any], show: Callable[[str], None], *, into: Completion | None = None
) -> Completion:
    """Send a request, show the response as it streams, and return it. An interruption leaves `into` consistent.

    Raises the errors of `ChatEngine.chat`. A KeyboardInterrupt cancels the request.
    """
    completion = into or Completion(started_at=time.perf_counter())
    streamed = {**request, "stream": True, "stream_options": {"include_usage": True}}
    with closing(engine.stream(streamed)) as chunks:
        for chunk in chunks:
            show(completion.add_chunk(chunk, time.perf_counter()))
    return completion


def _images(usage: CompletionUsage) -> str:
    """Describe the number of image tokens if the engine reports it. OpenAI's type lacks the field."""
    details = usage.prompt_tokens_details
    count = getattr(details, "image_tokens", None) if details else None
    return f" ({count} for images)" if count else ""
