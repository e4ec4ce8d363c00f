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


class Watcher:
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


class Watchers(Watcher):
    """Tells each one of several."""

    def __init__(self) -> None:
        self._watchers: Sequence[Watcher] = ()

    def add(self, watcher: Watcher) -> None:
        self._watchers = (*self._watchers, watcher)

    def stage(self, stage: Stage) -> AbstractContextManager[object]:
        if not self._watchers:
            return nullcontext()
        with ExitStack() as stack:  # what was entered is left again should one of them fail
            for watcher in self._watchers:
                stack.enter_context(watcher.stage(stage))
            return stack.pop_all()

    def first_token(self, seconds: float) -> None:
        for watcher in self._watchers:
            watcher.first_token(seconds)

    def next_token(self, seconds: float) -> None:
        for watcher in self._watchers:
            watcher.next_token(seconds)

    def answered(self, usage: CompletionUsage, seconds: float) -> None:
        for watcher in self._watchers:
            watcher.answered(usage, seconds)


class Stopwatch:
    """Times one request for a watcher, from when it is made.

    Args:
        watcher: is told.
        answers: of the request.
    """

    def __init__(self, watcher: Watcher, *, answers: int) -> None:
        self._watcher = watcher
        self._start = time.monotonic()
        self._last: list[float | None] = [None] * answers
        self._begun = False

    def token(self, index: int) -> None:
        """A token of the answer with this index is there."""
        now, last = time.monotonic(), self._last[index]
        self._last[index] = now
        if last is not None:
            self._watcher.next_token(now - last)
        if not self._begun:
            self._begun = True
            self._watcher.first_token(now - self._start)

    def answered(self, usage: CompletionUsage) -> None:
        self._watcher.answered(usage, time.monotonic() - self._start)
