"""Run many requests with bounded concurrency, and return their results in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from ..engine import Engine
from ..engine.chat_pipeline import Generation
from ..errors import DashInferVLMError, QueueFull
from ..protocol import OfflineRequest

BatchResult = Generation | DashInferVLMError
RequestFactory = Callable[[], OfflineRequest]


class OfflineBatch:
    """Runs requests concurrently. Each request is created only when a slot is free, and again if the queue was full.

    Args:
        engine: the engine that serves them.
        limit: maximum number of concurrent requests.
        on_done: called in the caller's thread after each request.
    """

    def __init__(self, engine: Engine, *, limit: int, on_done: Callable[[], object]) -> None:
        self._engine = engine
        self._limit = limit
        self._on_done = on_done
        self._running: dict[Future[Generation], tuple[int, RequestFactory]] = {}
        self._results: dict[int, BatchResult] = {}

    def run(self, factories: Iterable[RequestFactory]) -> list[BatchResult]:
        """Return the result of each request, in order. Other exceptions, such as Ctrl-C, cancel running requests."""
        try:
            for index, factory in enumerate(factories):
                self._submit(index, factory)
                self._collect(free_slots=1)
            self._collect(free_slots=self._limit)
        finally:
            for future in self._running:
                future.cancel()
        return [self._results[index] for index in range(len(self._results))]

    def _submit(self, index: int, factory: RequestFactory) -> None:
        try:
            self._running[self._engine.submit(factory())] = index, factory
        except DashInferVLMError as error:
            self._finish(index, error)

    def _collect(self, free_slots: int) -> None:
        while len(self._running) > self._limit - free_slots:
            rejected: list[tuple[int, RequestFactory]] = []
            seconds = 0.0
            for future in wait(self._running, return_when=FIRST_COMPLETED).done:
                index, factory = self._running.pop(future)
                error = future.exception()
                if isinstance(error, QueueFull):  # other callers of the engine use its slots
                    rejected.append((index, factory))
                    seconds = max(seconds, error.retry_after)
                else:
                    self._finish(index, error if isinstance(error, DashInferVLMError) else future.result())
            if rejected:
                time.sleep(seconds)
            for index, factory in rejected:
                self._submit(index, factory)

    def _finish(self, index: int, result: BatchResult) -> None:
        self._results[index] = result
        self._on_done()
