"""The load: users who ask one after the other, over OpenAI's streaming API or of an engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

from dashinfer_vlm_core.engine import ChatEngine

if TYPE_CHECKING:
    from typing_extensions import Self

PATIENCE = 600.0
"""Seconds without a byte after which an engine counts as hung."""

Body = dict[str, Any]
Content = str | list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Talk:
    """One conversation.

    Attributes:
        turns: what the user says, turn by turn; the answers in between are the engine's own.
        tokens: of each answer.
    """

    turns: tuple[Content, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event of a stream says: text, and, in one of the events, how many tokens there were."""

    text: str
    completion_tokens: int | None = None
    prompt_tokens: int | None = None


class Target(Protocol):
    """Something that answers chat completions."""

    def ask(self, body: Body) -> AsyncGenerator[Piece, None]:
        """The pieces of the answer as they come."""


@dataclass(kw_only=True)
class Sample:
    """One answer, as its reader saw it. Times are those of `time.perf_counter`.

    Attributes:
        asked: tokens asked for.
        sent: when the request was sent.
        arrivals: when each piece of text came.
        tokens: of the answer, by the engine's own count, or one per piece where it does not count.
        fault: what went wrong.
    """

    asked: int
    sent: float
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    fault: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.arrivals[0] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds for each further token."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces of text."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


class HTTPTarget:
    """A server at `base`, such as `http://127.0.0.1:8000/v1`. Its connections are closed when the context ends.

    By aiohttp, which parses in C: what the reader of a stream computes is taken from the engine on the same cores.
    """

    def __init__(self, base: str) -> None:
        self._base = base
        self._model = ""

    async def __aenter__(self) -> Self:
        patience = aiohttp.ClientTimeout(total=None, sock_read=PATIENCE)
        self._client = aiohttp.ClientSession(timeout=patience, connector=aiohttp.TCPConnector(limit=0))
        async with self._client.get(f"{self._base}/models", raise_for_status=True) as answer:
            self._model = (await answer.json())["data"][0]["id"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def ask(self, body: Body) -> AsyncGenerator[Piece, None]:
        url = f"{self._base}/chat/completions"
        async with self._client.post(url, json={**body, "model": self._model}) as response:
            if not response.ok:
                raise RuntimeError(f"HTTP {response.status}: {(await response.read())[:300]!r}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield _piece(json.loads(line[6:]))


class EngineTarget:
    """An engine in this process."""

    def __init__(self, engine: ChatEngine) -> None:
        self._engine = engine

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def ask(self, body: Body) -> AsyncGenerator[Piece, None]:
        async with contextlib.aclosing(self._engine.astream(body)) as chunks:
            async for chunk in chunks:
                text = chunk.choices[0].delta.content if chunk.choices else None
                usage = chunk.usage
                counts = (usage.completion_tokens, usage.prompt_tokens) if usage else (None, None)
                yield Piece(text or "", *counts)


def _piece(event: dict[str, Any]) -> Piece:
    if "error" in event:
        raise RuntimeError(f"the stream broke: {event['error']}")
    text = event["choices"][0]["delta"].get("content") if event["choices"] else None
    usage = event.get("usage") or {}
    return Piece(text or "", usage.get("completion_tokens"), usage.get("prompt_tokens"))


async def load(
    target: Target, talks: Iterable[Talk], *, users: int, first: Callable[[], None] = lambda: None
) -> list[Sample]:
    """All talks, led by `users` users, each of whom begins another one when the last has ended.

    Args:
        target: who answers.
        talks: what to say.
        users: how many talk at once.
        first: called at the first text of each answer.
    """
    waiting, samples = deque(talks), list[Sample]()

    async def user() -> None:
        while waiting:
            samples.extend(await _lead(target, waiting.popleft(), users, first))

    await asyncio.gather(*(user() for _ in range(users)))
    return samples


async def _lead(target: Target, talk: Talk, users: int, first: Callable[[], None]) -> list[Sample]:
    messages, samples = list[dict[str, Any]](), list[Sample]()
    for content in talk.turns:
        messages.append({"role": "user", "content": content})
        sample, text = await _ask(target, request_body(messages, talk.tokens, users), first)
        samples.append(sample)
        if sample.fault:
            break
        messages.append({"role": "assistant", "content": text})
    return samples


def request_body(messages: list[dict[str, Any]], tokens: int, users: int) -> Body:
    """A streaming request for exactly `tokens` tokens."""
    return {
        "messages": messages,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "metadata": {"users": str(users)},  # for peers that have one way for a single user and another for many
    }


async def _ask(target: Target, body: Body, first: Callable[[], None]) -> tuple[Sample, str]:
    sample, text = Sample(asked=body["max_tokens"], sent=time.perf_counter()), list[str]()
    try:
        async with contextlib.aclosing(target.ask(body)) as pieces:
            async for piece in pieces:
                if piece.text:
                    sample.arrivals.append(time.perf_counter())
                    text.append(piece.text)
                    if len(text) == 1:
                        first()
                sample.tokens = piece.completion_tokens or sample.tokens
                sample.prompt_tokens = piece.prompt_tokens or sample.prompt_tokens
    except (aiohttp.ClientError, RuntimeError, OSError) as error:
        sample.fault = f"{type(error).__name__}: {error}"
    sample.tokens = sample.tokens or len(text)
    if not sample.fault and (sample.tokens != sample.asked or not text):
        sample.fault = f"{sample.tokens} tokens instead of {sample.asked}"
    return sample, "".join(text)
