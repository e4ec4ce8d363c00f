"""Threads that store files for later starts, from the memory of a model."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .abandoned_threads import STORE_THREAD


class Canceled(Exception):
    """The model was unloaded."""


class StoreThread(threading.Thread):
    """Stores a file while its model is used. Not a daemon: a short command would never store what it converted.

    Args:
        model: `EngineConfig.name` of the model.
        store: stores the file. It has to call its argument often, which raises `Canceled` after `cancel_storing`.
    """

    def __init__(self, model: str, store: Callable[[Callable[[], None]], None]) -> None:
        self.model: str = model
        self._canceled = threading.Event()
        # The base class releases the arguments at the end.
        super().__init__(target=store, args=(self._check,), name=STORE_THREAD, daemon=False)

    def cancel(self) -> None:
        self._canceled.set()

    def _check(self) -> None:
        if self._canceled.is_set():
            raise Canceled


def cancel_storing(model: str) -> None:
    """Let the threads that store files of a model release its memory soon. Returns before that."""
    for thread in threading.enumerate():
        if isinstance(thread, StoreThread) and thread.model == model:
            thread.cancel()
