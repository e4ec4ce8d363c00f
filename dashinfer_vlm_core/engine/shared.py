"""Engines shared by adapters, one per configuration and process and started on first use; and calls of engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from ..concurrency.deadline import stream_with_timeout, with_timeout
from ..concurrency.loop import LoopThread
from ..config import EngineConfig
from ..errors import DashInferVLMError, DeadlineExceeded, DecoderFailed, QueueFull
from ..plugins import Registry, load_plugins
from .engine import Engine
from .remote import RemoteEngine

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    from .engine import ChatEngine

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

GetEngine: TypeAlias = Callable[[], Awaitable["ChatEngine"]]

RETRY_SECONDS = 0.5


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


LOOP = PerProcess(lambda: LoopThread("dashinfer-vlm-calls"))
"""An event loop for synchronous callers, so that timeouts and cancellation have one implementation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCall:
    """A request to an engine, with timeouts and retries.

    Attributes:
        engine: returns the engine. It is called for each attempt, because a failed engine may have been replaced.
        request: OpenAI's JSON.
        timeout: seconds for the complete response, over all attempts; None means no limit.
        first_token_timeout: seconds until the first chunk of a stream; None means `timeout`.
        max_retries: maximum number of retries after transient errors.
    """

    engine: GetEngine
    request: Mapping[str, Any]
    timeout: float | None
    first_token_timeout: float | None
    max_retries: int = 0

    async def complete(self) -> ChatCompletion:
        """Return the completion. Raises the errors of `Engine.chat`, and DeadlineExceeded."""
        return await call_engine(
            self.engine,
            lambda engine: engine.achat(self.request),
            timeout=self.timeout,
            max_retries=self.max_retries,
        )

    def stream(self) -> AsyncGenerator[ChatCompletionChunk, None]:
        """Stream the completion; closing the generator cancels the request. Raises the errors of `complete`."""
        return stream_with_timeout(self._try_stream(), seconds=self.timeout, first=self.first_token_timeout)

    async def _try_stream(self) -> AsyncGenerator[ChatCompletionChunk, None]:
        retries = self.max_retries
        while True:
            try:
                async with contextlib.aclosing((await self.engine()).astream(self.request)) as chunks:
                    async for chunk in chunks:
                        retries = 0  # the caller has received a part of the response
                        yield chunk
                    return
            except DashInferVLMError as error:
                await _pause_or_raise(error, retries)
            retries -= 1


async def call_engine(
    engine: GetEngine, work: Callable[[ChatEngine], Awaitable[T]], *, timeout: float | None, max_retries: int = 0
) -> T:
    """Return what `work` returns for an engine.

    Args:
        engine: as `EngineCall.engine`.
        work: sends a request to it.
        timeout: seconds over all attempts; None means no limit.
        max_retries: maximum number of retries after transient errors.

    Raises the errors of `work`, and DeadlineExceeded.
    """
    return await with_timeout(_call(engine, work, max_retries), timeout)


async def _call(engine: GetEngine, work: Callable[[ChatEngine], Awaitable[T]], retries: int) -> T:
    while True:
        try:
            return await work(await engine())
        except DashInferVLMError as error:
            await _pause_or_raise(error, retries)
        retries -= 1


async def _pause_or_raise(error: DashInferVLMError, retries: int) -> None:
    if retries < 1 or not error.retryable or isinstance(error, DeadlineExceeded):
        raise error
    await asyncio.sleep(error.retry_after if isinstance(error, QueueFull) else RETRY_SECONDS)


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
