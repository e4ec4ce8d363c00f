"""A streamed completion: its text and its timing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dashinfer_vlm_core.cli.terminal import counted

if TYPE_CHECKING:
    from openai.types import CompletionUsage
    from openai.types.chat import ChatCompletionChunk

    from .engines import AnyEngine


MIN_SECONDS = 0.05
"""From the first token to the last one, for which a rate is meaningful: the same as on the server's page."""

GENERATED = ("content", "reasoning_content", "tool_calls")
"""Fields of a delta that have generated tokens."""

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(kw_only=True, slots=True)
class Completion:
    """A completion so far. Times are in seconds.

    Attributes:
        text: the text so far, without reasoning.
        finish_reason: empty until the completion ends.
        usage: the engine's token counts; None until the end, or if the engine does not report them.
        started_at: when the request was sent.
        chunk_times: when chunks with text, reasoning or tool calls arrived, each of one or more tokens.
    """

    text: str = ""
    finish_reason: str = ""
    usage: CompletionUsage | None = None
    started_at: float = field(default_factory=time.perf_counter)
    chunk_times: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.usage.completion_tokens if self.usage else len(self.chunk_times)

    @property
    def seconds_to_last_token(self) -> float | None:
        return self.chunk_times[-1] - self.started_at if self.chunk_times else None

    @property
    def seconds_to_first_token(self) -> float | None:
        return self.chunk_times[0] - self.started_at if self.chunk_times else None

    @property
    def seconds_per_token(self) -> float | None:
        """The mean time per token after the first one."""
        if not self.chunk_times or self.tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.tokens - 1)

    @property
    def tokens_per_second(self) -> float | None:
        """The rate after the first token; None if the time is too short to measure one."""
        if self.seconds_per_token is None or self.chunk_times[-1] - self.chunk_times[0] < MIN_SECONDS:
            return None
        return 1 / self.seconds_per_token

    def add_chunk(self, chunk: ChatCompletionChunk, now: float) -> str:
        """Add a chunk and return its text."""
        self.usage = chunk.usage or self.usage
        text = ""
        has_tokens = False
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            text += choice.delta.content or ""
            has_tokens |= any(getattr(choice.delta, name, None) for name in GENERATED)
        self.text += text
        if has_tokens:
            self.chunk_times.append(now)
        return text

    @property
    def warning(self) -> str:
        """What the response lacks; empty if it is complete."""
        if self.finish_reason == "length":
            return f"The response was cut after {counted(self.tokens, 'token')}. Set a higher `max_tokens`."
        return "" if self.text else "The response is empty."

    def as_text(self) -> str:
        """Summarize token counts and rates in one line."""
        parts = [counted(self.tokens, "token")]
        if self.seconds_to_first_token is not None:
            parts.append(f"first after {self.seconds_to_first_token:.2f} s")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if self.usage is not None:
            parts.append(f"prompt {counted(self.usage.prompt_tokens, 'token')}{_images(self.usage)}")
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
    engine: AnyEngine,
    request: Mapping[str, Any],
    completion: Completion,
    show: Callable[[str], None] | None,
    show_reasoning: Callable[[str], None],
) -> None:
    """Send a request, and show the response as it streams, its reasoning only if its text is shown, too.

    An interruption leaves `completion` consistent.

    Raises the errors of `ChatEngine.chat`. A KeyboardInterrupt cancels the request.
    """
    is_reasoning = False
    with closing(engine.stream({**request, **STREAMED})) as chunks:
        try:
            for chunk in chunks:
                text = completion.add_chunk(chunk, time.perf_counter())
                if show is None:
                    continue
                if reasoning := _reasoning(chunk):
                    show_reasoning(reasoning)
                    is_reasoning = True
                if text and is_reasoning:
                    show_reasoning("\n\n")
                    is_reasoning = False
                show(text)
        finally:
            if is_reasoning:
                show_reasoning("\n")


async def acomplete(engine: AnyEngine, request: Mapping[str, Any]) -> Completion:
    """Send a request, and return the response."""
    completion = Completion()
    async with aclosing(engine.astream({**request, **STREAMED})) as chunks:
        async for chunk in chunks:
            completion.add_chunk(chunk, time.perf_counter())
    return completion


def _reasoning(chunk: ChatCompletionChunk) -> str:
    # OpenAI's type lacks the field.
    return "".join(getattr(choice.delta, "reasoning_content", None) or "" for choice in chunk.choices)


def _images(usage: CompletionUsage) -> str:
    # OpenAI's type lacks the field.
    details = usage.prompt_tokens_details
    count = getattr(details, "image_tokens", None) if details else None
    return f" ({count} for images)" if count else ""
