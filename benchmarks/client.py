"""Load generation: concurrent users, over OpenAI's streaming API or with an in-process engine."""

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
from dashinfer_vlm_core.errors import DashInferVLMError

if TYPE_CHECKING:
    from typing_extensions import Self

READ_TIMEOUT = 600.0
"""Seconds without data after which an engine is considered hung."""

Body = dict[str, Any]
Content = str | list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Talk:
    """One conversation.

    Attributes:
        turns: the user messages; the responses in between are the engine's.
        tokens: completion tokens of each response.
    """

    turns: tuple[Content, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The content of one event of a stream: text, and in one of the events the token counts."""

    text: str
    completion_tokens: int | None = None
    prompt_tokens: int | None = None


class Target(Protocol):
    """A target of chat completion requests."""

    def ask(self, body: Body) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of the response as they arrive."""


@dataclass(kw_only=True)
class Sample:
    """One response as seen by its reader. Times are from `time.perf_counter`.

    Attributes:
        requested_tokens: the number of requested tokens.
        sent: when the request was sent.
        arrivals: when each piece of text came.
        tokens: completion tokens as counted by the engine, or one per piece if it does not count them.
        fault: the error, if any.
    """

    requested_tokens: int
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

    Entering the context raises RuntimeError if the server does not respond.

    Uses aiohttp, which parses in C: the client's work takes CPU time from the engine on the same cores.

    Args:
        base: address of the API.
        reuses_connections: whether the server answers several requests on a connection. llama.cpp's server sometimes
            closes one instead; and it sometimes closes a new one without a response, so that the request is sent again.
        api_key: the API key, if the server requires one.
        model: name of the model; the server's first by default.
    """

    def __init__(self, base: str, *, reuses_connections: bool = True, api_key: str = "", model: str = "") -> None:
        self._base = base
        self._reuses_connections = reuses_connections
        self._headers = authorization(api_key)
        self._model = model

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_TIMEOUT)
        connector = aiohttp.TCPConnector(limit=0, force_close=not self._reuses_connections)
        self._client = aiohttp.ClientSession(timeout=timeout, connector=connector, headers=self._headers)
        try:
            if not self._model:
                async with self._client.get(f"{self._base}/models", raise_for_status=True) as models:
                    self._model = (await models.json())["data"][0]["id"]
        except (aiohttp.ClientError, OSError) as error:
            await self._client.close()
            raise RuntimeError(f"no response from {self._base}: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def ask(self, body: Body) -> AsyncGenerator[Piece, None]:
        async with await self._post({**body, "model": self._model}) as response:
            if not response.ok:
                raise RuntimeError(f"HTTP {response.status}: {(await response.read())[:300]!r}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield _piece(json.loads(line[6:]))

    async def _post(self, body: Body) -> aiohttp.ClientResponse:
        url = f"{self._base}/chat/completions"
        try:
            return await self._client.post(url, json=body)
        except aiohttp.ServerDisconnectedError:
            if self._reuses_connections:
                raise
            return await self._client.post(url, json=body)


def authorization(api_key: str) -> dict[str, str]:
    """Return the headers with an API key; none for an empty key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


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
    """Run all conversations with `users` concurrent users, each of whom starts the next one when the last has ended.

    Args:
        target: the engine.
        talks: the conversations.
        users: number of concurrent users.
        first: called at the first text of each response.
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
    """Return a streaming request for exactly `tokens` tokens."""
    return {
        "messages": messages,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "metadata": {"users": str(users)},  # for engines with separate pipelines for one user and for many
    }


async def _ask(target: Target, body: Body, first: Callable[[], None]) -> tuple[Sample, str]:
    sample, text = Sample(requested_tokens=body["max_tokens"], sent=time.perf_counter()), list[str]()
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
    except (aiohttp.ClientError, DashInferVLMError, RuntimeError, OSError) as error:
        sample.fault = f"{type(error).__name__}: {error}"
    sample.tokens = sample.tokens or len(text)
    if not sample.fault and (sample.tokens != sample.requested_tokens or not text):
        sample.fault = f"{sample.tokens} tokens instead of {sample.requested_tokens}"
    return sample, "".join(text)
