"""What is told about requests while they are served: to metrics and traces, which the core knows nothing of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from openai.types import CompletionUsage

Stage = Literal["grammar", "media", "prompt", "vision", "decode"]
"""The parts of a request's way that take time, in their order."""


class RequestObserver:
    """Told what happens to requests, on the engine's event loop: be quick, and raise nothing.

    It does nothing by itself; subclasses override what they want to know. The context variables of whoever asked the
    engine are set where it is called.
    """

    def stage(self, stage: Stage) -> AbstractContextManager[object]:
        """Entered where a request comes to a stage, and left where it leaves it, however that may be."""
        return nullcontext()

    def first_token(self, seconds: float) -> None:
        """The first token of a request is there, so long after the request."""

    def next_token(self, seconds: float) -> None:
        """Another token of an answer is there, so long after the one before it."""

    def answered(self, usage: CompletionUsage, seconds: float) -> None:
        """A request is answered whole, so long after it came; `usage` is what its answer tells."""


class ObserverList(RequestObserver):
    """Tells each one of several."""

    def __init__(self) -> None:
        self._observers: Sequence[RequestObserver] = ()

    def add(self, observer: RequestObserver) -> None:
        self._observers = (*self._observers, observer)

    def stage(self, stage: Stage) -> AbstractContextManager[object]:
        if not self._observers:
            return nullcontext()
        with ExitStack() as stack:  # what was entered is left again should one of them fail
            for observer in self._observers:
                stack.enter_context(observer.stage(stage))
            return stack.pop_all()

    def first_token(self, seconds: float) -> None:
        for observer in self._observers:
            observer.first_token(seconds)

    def next_token(self, seconds: float) -> None:
        for observer in self._observers:
            observer.next_token(seconds)

    def answered(self, usage: CompletionUsage, seconds: float) -> None:
        for observer in self._observers:
            observer.answered(usage, seconds)


class RequestTimer:
    """Times one request for a watcher, from when it is made.

    Args:
        watcher: is told.
        answers: of the request.
    """

    def __init__(self, observer: RequestObserver, *, answers: int) -> None:
        self._observer = observer
        self._start = time.monotonic()
        self._last: list[float | None] = [None] * answers
        self._begun = False

    def token(self, index: int) -> None:
        """A token of the answer with this index is there."""
        now, last = time.monotonic(), self._last[index]
        self._last[index] = now
        if last is not None:
            self._observer.next_token(now - last)
        if not self._begun:
            self._begun = True
            self._observer.first_token(now - self._start)

    def answered(self, usage: CompletionUsage) -> None:
        self._observer.answered(usage, time.monotonic() - self._start)
