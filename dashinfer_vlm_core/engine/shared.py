"""Engines shared by adapters: one per configuration and process, started on first use."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from ..config import EngineConfig
from ..errors import DecoderFailed
from ..plugins import Registry, load_plugins
from .engine import Engine
from .remote import RemoteEngine

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value created on first use, and again in a forked process, where the threads of the parent do not exist."""

    def __init__(self, factory: Callable[[], T]) -> None:
        self._factory = factory
        self._value: tuple[int, T] | None = None
        self._lock = threading.Lock()

    def get(self) -> T:
        with self._lock:
            if self._value is None or self._value[0] != os.getpid():
                self._value = os.getpid(), self._factory()
            return self._value[1]


class SharedEngines:
    """One engine per equal configuration, for any thread and any event loop.

    Args:
        registry: the engines' plugins; those of the installed distributions if None.
    """

    def __init__(self, registry: Registry | None = None) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._local: PerProcess[dict[EngineConfig, Future[Engine]]] = PerProcess(dict)
        self._remote: PerProcess[dict[tuple[str, str | None], RemoteEngine]] = PerProcess(dict)
        self._configs: dict[tuple[str, str], EngineConfig] = {}

    def config(self, model: str, options: Mapping[str, Any]) -> EngineConfig:
        """Return the configuration of a model with these options; cached per model and options.

        Only the first call reads the environment, which takes longer than everything else an adapter does per request.

        Raises:
            ConfigError: an option is unknown or out of range.
        """
        key = model, json.dumps(dict(options), sort_keys=True, default=str)
        if key not in self._configs:
            registry = self._registry or load_plugins()
            self._configs[key] = registry.resolve_options(EngineConfig(**{"model": model, **options}))
        return self._configs[key]

    def get(self, config: EngineConfig) -> Engine:
        """Return the engine of `config`, ready to serve; the first caller loads it, and the others wait.

        An engine that was closed or has failed is replaced. A failed start is not cached: the next caller tries again.

        Raises:
            SetupError: the engine cannot be started.
        """
        return self._loaded(config).result()

    async def aget(self, config: EngineConfig) -> Engine:
        """Like `get`, without blocking the caller's event loop. Canceling a caller does not cancel the load."""
        future = self._loaded(config)
        return future.result() if future.done() else await asyncio.wrap_future(future)

    def remote(self, api_base: str, *, api_key: str | None = None) -> RemoteEngine:
        """Return the remote engine of a URL and an API key. Raises the same errors as `RemoteEngine`."""
        with self._lock:
            engines = self._remote.get()
            if (api_base, api_key) not in engines:
                engines[api_base, api_key] = RemoteEngine(api_base, api_key=api_key)
            return engines[api_base, api_key]

    def close(self, *, wait: bool = True) -> None:
        """Close all engines; running requests raise EngineClosed. The next use starts new engines.

        Args:
            wait: whether to wait for an engine that is being loaded, and to close it too.

        Raises:
            DecoderFailed: a step of a decoder does not finish in time; all other engines were closed.
        """
        with self._lock:
            local = self._local.get()
            remote = self._remote.get()
            futures = list(local.values())
            engines = list(remote.values())
            local.clear()
            remote.clear()
        with contextlib.ExitStack() as stack:  # an engine that cannot be closed must not prevent closing the others
            for engine in engines:
                stack.callback(engine.close)
            for future in futures:
                if (wait or future.done()) and future.exception() is None:
                    stack.callback(future.result().close)

    def _loaded(self, config: EngineConfig) -> Future[Engine]:
        """Return the future of an engine. If no caller has begun to load it, a thread does: interrupting or canceling
        a caller does not affect the others."""
        with self._lock:
            futures = self._local.get()
            existing = futures.get(config)
            if existing is not None and _usable(existing):
                return existing
            future: Future[Engine] = Future()
            future.set_running_or_notify_cancel()  # canceling one waiting caller must not cancel the future
            futures[config] = future
        replaced = existing.result() if existing else None
        thread = threading.Thread(
            target=self._load, args=(config, future, replaced), name="dashinfer-vlm-load", daemon=True
        )
        thread.start()
        return future

    def _load(self, config: EngineConfig, future: Future[Engine], replaced: Engine | None) -> None:
        try:
            if replaced is not None:
                replaced.close()  # frees the memory that the new engine needs
            future.set_result(Engine(config, registry=self._registry).start())
        except BaseException as error:  # noqa: BLE001 - the waiting callers raise it
            with self._lock:
                if self._local.get().get(config) is future:
                    del self._local.get()[config]
            future.set_exception(error)


def _usable(future: Future[Engine]) -> bool:
    return not future.done() or future.result().status().state in {"ready", "restarting"}


SHARED = SharedEngines()
"""The engines of this process; closed when the process exits."""


def close_shared() -> None:
    """Close the engines of this process and free their memory; the next use starts new ones."""
    SHARED.close()


def _close_at_exit() -> None:
    try:
        SHARED.close(wait=False)
    except DecoderFailed as error:
        logger.warning("%s", error.message)


# atexit runs too late: by then concurrent.futures accepts no work, which closing an engine needs.
threading._register_atexit(_close_at_exit)  # type: ignore[attr-defined]  # noqa: SLF001 - concurrent.futures uses it too
