"""Engines that adapters share: one per configuration and process, started on first use."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..config import EngineConfig
from ..errors import DecoderFailed
from .engine import Engine
from .remote import RemoteEngine

if TYPE_CHECKING:
    from ..plugins import Registry

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value that is made on first use, and again in a process that was forked: threads do not survive that."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[int, T] | None = None
        self._lock = threading.Lock()

    def get(self) -> T:
        with self._lock:
            if self._made is None or self._made[0] != os.getpid():
                self._made = os.getpid(), self._make()
            return self._made[1]


class SharedEngines:
    """One engine per equal configuration, for any thread and any event loop.

    Args:
        registry: plugins that the engines use; those of the installed distributions if None.
    """

    def __init__(self, registry: Registry | None = None) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._local: PerProcess[dict[EngineConfig, Future[Engine]]] = PerProcess(dict)
        self._remote: PerProcess[dict[tuple[str, str | None], RemoteEngine]] = PerProcess(dict)
        self._configs: dict[tuple[str, str], EngineConfig] = {}

    def config(self, model: str, options: Mapping[str, Any]) -> EngineConfig:
        """The configuration of a model with these other fields. The environment is read for the first call alone: that
        takes longer than all else that an adapter does for a request.

        Raises:
            ConfigError: an option that there is not, or that is out of range.
        """
        key = model, json.dumps(dict(options), sort_keys=True, default=str)
        if key not in self._configs:
            self._configs[key] = EngineConfig(**{"model": model, **options})
        return self._configs[key]

    def get(self, config: EngineConfig) -> Engine:
        """The engine of `config`, ready; whoever comes first loads it, the others wait for that.

        An engine that was closed, or failed for good, is started anew. A start that failed is not kept: the next caller
        tries again.

        Raises:
            SetupError: it cannot be started.
        """
        future, start = self._claim(config)
        if start:
            start()
        return future.result()

    async def aget(self, config: EngineConfig) -> Engine:
        """As `get`, without blocking the caller's event loop. Cancelling a caller ends no load."""
        future, start = self._claim(config)
        if start:
            threading.Thread(target=start, name="dashinfer-vlm-load", daemon=True).start()
        return future.result() if future.done() else await asyncio.wrap_future(future)

    def remote(self, api_base: str, *, api_key: str | None = None) -> RemoteEngine:
        """The engine behind an address, for one key. Raises as `RemoteEngine`."""
        with self._lock:
            engines = self._remote.get()
            if (api_base, api_key) not in engines:
                engines[api_base, api_key] = RemoteEngine(api_base, api_key=api_key)
            return engines[api_base, api_key]

    def close(self, *, wait: bool = True) -> None:
        """End every engine; running requests end with EngineClosed. The next use starts them anew.

        Args:
            wait: whether to wait for one that is being loaded, and to end it too.

        Raises:
            DecoderFailed: a step of one of them does not end soon; all others are ended.
        """
        with self._lock:
            local, remote = self._local.get(), self._remote.get()
            futures, engines = list(local.values()), list(remote.values())
            local.clear()
            remote.clear()
        with contextlib.ExitStack() as ended:  # one that cannot be closed must not keep the others
            for engine in engines:
                ended.callback(engine.close)
            for future in futures:
                if (wait or future.done()) and future.exception() is None:
                    ended.callback(future.result().close)

    def _claim(self, config: EngineConfig) -> tuple[Future[Engine], Callable[[], None] | None]:
        """The place of an engine; and what the caller has to do that it gets there, if nobody does it already."""
        with self._lock:
            futures = self._local.get()
            found = futures.get(config)
            if found is not None and _usable(found):
                return found, None
            future: Future[Engine] = Future()
            future.set_running_or_notify_cancel()  # one who waits for it may be cancelled: that is not to cancel it
            futures[config] = future
        return future, partial(self._start, config, future, instead_of=found.result() if found else None)

    def _start(self, config: EngineConfig, future: Future[Engine], *, instead_of: Engine | None) -> None:
        """Load what belongs in a place; whoever waits there is told of an error."""
        try:
            if instead_of is not None:
                instead_of.close()  # frees the memory that its successor needs
            future.set_result(Engine(config, registry=self._registry).start())
        except BaseException as error:  # noqa: BLE001 - those who wait raise it
            with self._lock:
                if self._local.get().get(config) is future:
                    del self._local.get()[config]
            future.set_exception(error)


def _usable(future: Future[Engine]) -> bool:
    """Whether an engine is ready or on its way, for the first time or again."""
    return not future.done() or future.result().status().state in {"ready", "restarting"}


SHARED = SharedEngines()
"""The engines of this process; closed when it ends."""


def close_shared() -> None:
    """End the engines of this process, to free their memory; the next use starts them anew."""
    SHARED.close()


def _close_at_exit() -> None:
    try:
        SHARED.close(wait=False)
    except DecoderFailed as error:
        logger.warning("%s", error.message)


# Not by atexit: its turn comes when concurrent.futures takes no work any more, without which no engine can be closed.
threading._register_atexit(_close_at_exit)  # type: ignore[attr-defined]  # noqa: SLF001 - concurrent.futures uses it too
