"""Observers of requests: the core notifies them, metrics and traces implement them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from openai.types import CompletionUsage

Stage = Literal["grammar", "media", "prompt", "vision", "decode"]
"""The timed stages of a request, in order."""


class RequestObserver:
    """Is notified of the events of requests on the engine's event loop; methods must be fast and must not raise.

    The base class does nothing; subclasses override the methods they need. Methods are called with the context
    variables of the engine's caller.
    """

    def for_model(self, name: str) -> RequestObserver:
        """Return the observer of the requests to one model: this one, if it does not separate models."""
        return self

    def stage(self, stage: Stage) -> AbstractContextManager[object]:
        """Return a context manager that is active while a request is in a stage; it is also exited on errors."""
        return nullcontext()

    def prompt_built(self, num_tokens: int) -> None:
        """The prompt of a request was built; its media are encoded and its tokens are decoded after that."""

    def units_encoded(self, done: int, total: int) -> None:
        """`done` of the `total` images and pairs of frames of a request were encoded, or found in a cache."""

    def token_decoded(self) -> None:
        """A token of any choice was decoded; called in addition to `first_token` and `next_token`."""

    def first_token(self, seconds: float) -> None:
        """The first token of a request was decoded, `seconds` after the request arrived."""

    def next_token(self, seconds: float) -> None:
        """Another token of a choice was decoded, `seconds` after the previous one."""

    def completed(self, usage: CompletionUsage, seconds: float) -> None:
        """A request is complete, `seconds` after it arrived; `usage` is the usage of its response."""


class ObserverList(RequestObserver):
    """Notifies several observers."""

    def __init__(self) -> None:
        self._observers: Sequence[RequestObserver] = ()

    def add(self, observer: RequestObserver) -> None:
        self._observers = (*self._observers, observer)

    def stage(self, stage: Stage) -> AbstractContextManager[object]:
        if not self._observers:
            return nullcontext()
        with ExitStack() as stack:  # if one of them raises, those already entered are exited
            for observer in self._observers:
                stack.enter_context(observer.stage(stage))
            return stack.pop_all()

    def prompt_built(self, num_tokens: int) -> None:
        for observer in self._observers:
            observer.prompt_built(num_tokens)

    def units_encoded(self, done: int, total: int) -> None:
        for observer in self._observers:
            observer.units_encoded(done, total)

    def token_decoded(self) -> None:
        for observer in self._observers:
            observer.token_decoded()

    def first_token(self, seconds: float) -> None:
        for observer in self._observers:
            observer.first_token(seconds)

    def next_token(self, seconds: float) -> None:
        for observer in self._observers:
            observer.next_token(seconds)

    def completed(self, usage: CompletionUsage, seconds: float) -> None:
        for observer in self._observers:
            observer.completed(usage, seconds)


@dataclass(kw_only=True, slots=True)
class RequestStateStats:
    """When a request was served. Names are vLLM's; `_ts` are times of `time.monotonic`.

    Attributes:
        num_generation_tokens: number of tokens of all completions.
        arrival_time: when it arrived, as `time.time`.
        queued_ts: when its prompt was built and its media were encoded, so that it waited for the decoder.
        first_token_ts: when its first token was decoded.
        last_token_ts: when its last token was decoded.
        first_token_latency: seconds from its arrival to its first token.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


class RequestTimer:
    """Measures one request from construction on, and notifies an observer.

    Args:
        observer: is notified.
        n: the number of choices of the request.

    Attributes:
        stats: the times so far.
    """

    def __init__(self, observer: RequestObserver, *, n: int) -> None:
        self._observer = observer
        self._start = time.monotonic()
        self._last: list[float | None] = [None] * n
        self.stats: RequestStateStats = RequestStateStats(arrival_time=time.time())

    def queued(self) -> None:
        """The request was prepared, and waits for the decoder."""
        self.stats.queued_ts = time.monotonic()

    def token(self, index: int) -> None:
        """A token of the choice with this index was decoded."""
        self._observer.token_decoded()
        now = time.monotonic()
        last = self._last[index]
        self._last[index] = now
        if last is not None:
            self._observer.next_token(now - last)
        elif not self.stats.num_generation_tokens:
            self.stats.first_token_ts = now
            self.stats.first_token_latency = now - self._start
            self._observer.first_token(now - self._start)
        self.stats.num_generation_tokens += 1
        self.stats.last_token_ts = now

    def completed(self, usage: CompletionUsage) -> None:
        self._observer.completed(usage, time.monotonic() - self._start)
