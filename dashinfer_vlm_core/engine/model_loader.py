"""ModelLoader: loads and unloads the engines of several models, as `ModelScheduler` decides."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ..concurrency.loop import engine_closed
from ..concurrency.memory import resident_bytes, trim_memory
from ..concurrency.storing import cancel_storing
from ..config import EngineConfig
from ..errors import DashInferVLMError, DecoderFailed, EngineClosed, QueueFull
from .engine import Engine
from .model_rules import Action, Admit, Load, ModelScheduler, RejectBusy, RejectFailed, Unload

logger: logging.Logger = logging.getLogger(__name__)

LOAD_FAILED = "model_load_failed"
"""The code of errors of requests whose model could not be loaded."""

MAX_PAUSE = 3600.0
"""Seconds between two looks at the clock, while nothing is expected to happen."""

_ABSOLUTE_PATH = re.compile(r"(?<![\w.-])/[^\s'\"]+")


class ModelLoader:
    """Runs requests on the engines of several models, which are loaded before and unloaded after that.

    Each load and each unload runs in its own thread. Safe to use from any thread and any event loop.

    Args:
        engines: the engines by the names of their models; none is started.
        rules: decides which models are loaded.
        clock: the monotonic clock of the rules, in seconds.
    """

    def __init__(self, engines: Mapping[str, Engine], rules: ModelScheduler, clock: Callable[[], float]) -> None:
        self._engines = engines
        self._rules = rules
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[str, Future[None]]] = {}
        self._ids = itertools.count()
        self._errors: dict[str, Exception] = {}
        self._close_failure = ""
        self._wakes_at = 0.0
        self._closed = False
        self._timer = threading.Thread(target=self._watch_clock, name="dashinfer-vlm-models", daemon=True)
        self._timer.start()

    @contextlib.contextmanager
    def use(self, name: str, *, max_wait: float | None = None) -> Iterator[Engine]:
        """Return the engine of a model, which stays loaded in this context; blocks until it is.

        Args:
            name: the model's name.
            max_wait: how many seconds it may take; None for that of the policy.

        Raises:
            QueueFull: it takes longer.
            EngineClosed: the model cannot be loaded; the code is `LOAD_FAILED`. Or the loader was closed.
        """
        request, admitted = self._request(name, max_wait)
        try:
            admitted.result()
            yield self._engines[name]
        finally:
            self._end(request)

    @contextlib.asynccontextmanager
    async def ause(self, name: str, *, max_wait: float | None = None) -> AsyncIterator[Engine]:
        """Like `use`, without blocking the caller's event loop."""
        request, admitted = self._request(name, max_wait)
        try:
            if admitted.done():
                admitted.result()
            else:
                await asyncio.wrap_future(admitted)
            yield self._engines[name]
        finally:
            self._end(request)

    def unload(self, name: str) -> None:
        """Unload a model when its running requests have ended. Returns before that."""
        self._send(lambda now: self._rules.unload(name, now))

    def state(self, name: str) -> tuple[str, str]:
        """Return the state of a model, and why it could not be loaded."""
        model = self._rules.models[name]
        return model.state, model.failure

    def idle_seconds(self, name: str) -> float | None:
        """Return how many seconds a model without requests stays loaded from now on; None for ever."""
        now = self._clock()
        end = self._rules.idle_end(name, now)
        return None if end == math.inf else max(end - now, 0.0)

    def error(self, name: str) -> Exception | None:
        """Return the error of the last attempt to load a model."""
        return self._errors.get(name)

    def fatal_error(self) -> str:
        """Return why only the end of the process frees the memory of a model; empty if nothing prevents that."""
        hanging = (engine.status().fatal_error for engine in self._engines.values() if engine.decoder_hangs)
        return self._close_failure or next(hanging, "")

    def close(self) -> None:
        """Reject waiting requests and close the engines; running requests raise EngineClosed.

        Raises:
            DecoderFailed: a step of a decoder does not finish in time; all other engines were closed.
        """
        with self._changed:
            self._closed = True
            for _, admitted in self._waiting.values():
                admitted.set_exception(engine_closed())
            self._waiting.clear()
            self._changed.notify_all()
        self._timer.join()
        # A step of one must not delay closing the others.
        with ThreadPoolExecutor(len(self._engines), thread_name_prefix="dashinfer-vlm-unload") as threads:
            closing = [threads.submit(engine.close) for engine in self._engines.values()]
        for closed in closing:
            closed.result()

    def _request(self, name: str, max_wait: float | None) -> tuple[int, Future[None]]:
        request = next(self._ids)
        admitted: Future[None] = Future()
        admitted.set_running_or_notify_cancel()  # a caller that is canceled calls `_end`
        with self._changed:
            if self._closed:
                raise engine_closed()
            self._waiting[request] = name, admitted
            if self._rules.models[name].state == "ready" and self._must_reload(self._engines[name]):
                logger.warning("The decoder of %s failed permanently. The model is loaded again.", name)
                self._send(lambda now: self._rules.unload(name, now))
            self._send(lambda now: self._rules.request(request, name, now, max_wait=max_wait))
        return request, admitted

    def _must_reload(self, engine: Engine) -> bool:
        return engine.status().state == "failed" and not engine.decoder_hangs

    def _end(self, request: int) -> None:
        with self._changed:
            self._waiting.pop(request, None)
            self._send(lambda now: self._rules.end(request, now))

    def _send(self, event: Callable[[float], Sequence[Action]]) -> None:
        with self._changed:
            if self._closed:
                return
            now = self._clock()
            for action in event(now):
                self._do(action)
            if self._rules.next_event(now) < self._wakes_at:
                self._changed.notify_all()

    def _watch_clock(self) -> None:
        with self._changed:
            while not self._closed:
                self._send(self._rules.tick)
                now = self._clock()
                self._wakes_at = min(self._rules.next_event(now), now + MAX_PAUSE)
                self._changed.wait(max(0.0, self._wakes_at - now))

    def _do(self, action: Action) -> None:
        match action:
            case Admit(request):
                self._waiting.pop(request)[1].set_result(None)
            case RejectBusy(request, retry_after):
                name, admitted = self._waiting.pop(request)
                message = f"The model {name!r} was not loaded in time. Try again later."
                admitted.set_exception(QueueFull(message, retry_after=retry_after))
            case RejectFailed(request, reason):
                self._waiting.pop(request)[1].set_exception(EngineClosed(reason, code=LOAD_FAILED))
            case Load(name):
                threading.Thread(target=self._load, args=(name,), name="dashinfer-vlm-load", daemon=True).start()
            case Unload(name):
                threading.Thread(target=self._unload, args=(name,), name="dashinfer-vlm-unload", daemon=True).start()

    def _load(self, name: str) -> None:
        before = resident_bytes()
        try:
            self._engines[name].start()
        except Exception as error:  # noqa: BLE001 - the waiting requests raise it
            reason = _reason(self._engines[name].config, error)
            error.__traceback__ = error.__cause__ = error.__context__ = None  # they refer to what was loaded
            self._errors[name] = error
            self._send(lambda now: self._rules.load_failed(name, reason, now))
            return
        self._errors.pop(name, None)
        if self._closed:  # before the engine was started
            self._engines[name].close()
            return
        grown = resident_bytes() - before
        logger.info("Model %s is loaded. Memory grew by %d MiB.", name, grown >> 20)
        self._send(lambda now: self._rules.loaded(name, now, num_bytes=grown))

    def _unload(self, name: str) -> None:
        cancel_storing(name)
        try:
            self._engines[name].close()
        except DecoderFailed as error:  # its memory is not free
            logger.error("%s", error.message)  # noqa: TRY400 - the message is for the operator
            self._close_failure = error.message
            return
        trim_memory()
        logger.info("Model %s is unloaded.", name)
        self._send(lambda now: self._rules.unloaded(name, now))


def _reason(config: EngineConfig, error: Exception) -> str:
    """Log an error, and return why a model could not be loaded, without paths of this machine."""
    name = config.name
    if not isinstance(error, DashInferVLMError):
        logger.error("The model %s could not be loaded.", name, exc_info=error)
        return f"The model {name!r} could not be loaded. The server's log contains the cause."
    logger.error("The model %s could not be loaded: %s", name, error.message)
    shown = error.message
    folder = Path(config.model).expanduser()
    if folder.name and (folder.is_absolute() or folder.exists()):
        shown = shown.replace(str(folder), folder.name)  # it may contain spaces
    shown = _ABSOLUTE_PATH.sub(lambda path: Path(path[0]).name, shown)
    return f"The model {name!r} could not be loaded: {shown}"
