"""Many requests, a bounded number of them at a time, answered in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from ..engine import Engine
from ..engine.chat_pipeline import Generation
from ..errors import DashInferVLMError, QueueFull
from ..protocol import OfflineRequest

Outcome = Generation | DashInferVLMError
Make = Callable[[], OfflineRequest]


class OfflineBatch:
    """Answers requests side by side. They are made one by one, when there is room for them.

    Args:
        engine: answers them.
        limit: most requests that are under way at one time.
        on_done: called in the caller's thread after each.
    """

    def __init__(self, engine: Engine, *, limit: int, on_done: Callable[[], object]) -> None:
        self._engine = engine
        self._limit = limit
        self._on_done = on_done
        self._running: dict[Future[Generation], tuple[int, OfflineRequest]] = {}
        self._outcomes: dict[int, Outcome] = {}

    def run(self, makers: Iterable[Make]) -> list[Outcome]:
        """What became of each, in order. Whatever else is raised, Ctrl-C too, cancels what is under way."""
        try:
            for index, make in enumerate(makers):
                self._begin(index, make)
                self._collect(room_for=1)
            self._collect(room_for=self._limit)
        finally:
            for future in self._running:
                future.cancel()
        return [self._outcomes[index] for index in range(len(self._outcomes))]

    def _begin(self, index: int, make: Make) -> None:
        try:
            request = make()
            self._running[self._engine.submit(request)] = index, request
        except DashInferVLMError as error:
            self._done(index, error)

    def _collect(self, room_for: int) -> None:
        while len(self._running) > self._limit - room_for:
            for future in wait(self._running, return_when=FIRST_COMPLETED).done:
                index, request = self._running.pop(future)
                error = future.exception()
                if isinstance(error, QueueFull):  # other callers of the engine hold its places
                    self._again(index, request, error.retry_after)
                else:
                    self._done(index, error if isinstance(error, DashInferVLMError) else future.result())

    def _again(self, index: int, request: OfflineRequest, seconds: float) -> None:
        time.sleep(seconds)
        self._begin(index, lambda: request)

    def _done(self, index: int, outcome: Outcome) -> None:
        self._outcomes[index] = outcome
        self._on_done()
