"""Restart a decoder that died, a limited number of times."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from ..concurrency.loop import engine_closed
from ..concurrency.memory import trim_memory
from ..errors import DashInferVLMError, DecoderFailed, EngineClosed
from .interface import Decoder, DecodeRequest, DecoderStats, Pooled, RequestNotStarted, Token

if TYPE_CHECKING:
    from ..models.lora import LoraWeights

logger: logging.Logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""How often the decoder is checked while no request would notice its death."""

HEALTHY_SECONDS = 600.0
"""How long a decoder has to run before the restart counter is reset."""

INITIAL_BACKOFF = 0.1
"""Seconds before a failed start is retried; doubled each time."""


class Supervisor:
    """Wraps a decoder and restarts it when it dies; implements `Decoder` and belongs to one event loop.

    When the decoder reports a `fatal_error`, it is closed, which fails its running requests, and a new one is created
    and started. New requests, and those that the decoder had not started, wait for it. After `restarts` restarts in a
    row, or if a decoder cannot be closed, the error is permanent.

    Args:
        make: creates a decoder that is not started; called here for the first one, and in a thread for the others.
        restarts: the maximum number of restarts, or attempts, in a row.

    Attributes:
        restarted: number of restarts.
        restarting: whether it is restarting now.
        fatal_error: why it stopped restarting; empty while it has not.
        hangs: whether that is because the decoder cannot be closed: only the end of the process frees its memory.
    """

    def __init__(self, make: Callable[[], Decoder], *, restarts: int) -> None:
        self._make = make
        self._restarts = self._restarts_left = restarts
        self._started_at = 0.0
        self._decoder = make()
        self._ready = asyncio.Event()
        self._monitor_task: asyncio.Task[None] | None = None
        self._closed = False
        self.restarted: int = 0
        self.fatal_error: str = ""
        self.hangs: bool = False
        self.max_model_len: int = self._decoder.max_model_len
        self.supported_params: frozenset[str] = self._decoder.supported_params
        self.unsupported_vision_reason: str = self._decoder.unsupported_vision_reason
        self.name: str = self._decoder.name

    @property
    def restarting(self) -> bool:
        return self._monitor_task is not None and not self._ready.is_set()

    def snapshot(self) -> DecoderStats:
        return self._decoder.snapshot()

    async def start(self) -> None:
        await self._decoder.start()
        self._set_ready()
        self._monitor_task = asyncio.create_task(self._monitor(), name="decoder-supervisor")

    async def close(self) -> None:
        self._closed = True
        if self._monitor_task is not None:
            self._monitor_task.cancel()
            await asyncio.gather(self._monitor_task, return_exceptions=True)
            self._monitor_task = None  # the traceback of its error refers to this object
        self._ready.set()
        try:
            await self._decoder.close()
        except DecoderFailed:
            if not self.fatal_error:  # otherwise it failed permanently because it cannot be closed
                raise

    async def load_lora(self, lora: LoraWeights) -> None:
        await (await self._wait_until_healthy()).load_lora(lora)

    async def pool(self, request: DecodeRequest) -> Pooled:
        while True:
            decoder = await self._wait_until_healthy()
            with self._errors_of(decoder):
                return await decoder.pool(request)

    def forget(self, cache_salt: str) -> None:
        self._decoder.forget(cache_salt)

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Token, None]:
        while True:
            decoder = await self._wait_until_healthy()
            with self._errors_of(decoder):
                async with contextlib.aclosing(decoder.decode(request)) as tokens:
                    async for token in tokens:
                        yield token
                return

    @contextlib.contextmanager
    def _errors_of(self, decoder: Decoder) -> Iterator[None]:
        """Raise the errors of a request. Returns if the decoder died before it started the request."""
        try:
            yield
        except RequestNotStarted:
            if self._closed:
                raise engine_closed() from None
        except (EngineClosed, DecoderFailed):
            if self._closed or self._is_healthy(decoder):
                raise
            raise DecoderFailed(_DIED) from None

    def _is_healthy(self, decoder: Decoder) -> bool:
        """Whether `decoder` is in use and works, so that its errors concern one request only."""
        return decoder is self._decoder and self._ready.is_set() and not self.fatal_error and not decoder.fatal_error

    async def _wait_until_healthy(self) -> Decoder:
        if self._decoder.fatal_error and not self.fatal_error and not self._closed:
            self._ready.clear()  # `_monitor` has not noticed its death yet
        await self._ready.wait()
        if self.fatal_error:
            raise DecoderFailed(self.fatal_error)
        return self._decoder

    async def _monitor(self) -> None:
        while not self.fatal_error:
            await asyncio.sleep(POLL_SECONDS)
            if fatal_error := self._decoder.fatal_error:
                self._ready.clear()
                self.fatal_error = await self._replace(fatal_error)
                self._set_ready()
            else:
                self._ready.set()  # a request noticed an error that has ended, such as a step that took too long

    def _set_ready(self) -> None:
        self._started_at = asyncio.get_running_loop().time()
        self._ready.set()

    async def _replace(self, fatal_error: str) -> str:
        """Close the decoder and start a new one; returns why that is impossible, or an empty string on success."""
        logger.error("The decoder %s has failed: %s", self.name, fatal_error)
        if asyncio.get_running_loop().time() - self._started_at >= HEALTHY_SECONDS:
            self._restarts_left = self._restarts
        failure = await _error_of(self._decoder.close())
        self.hangs = bool(failure)
        backoff = 0.0
        while not failure and self._restarts_left:
            await asyncio.sleep(backoff)
            backoff = 2 * backoff or INITIAL_BACKOFF
            self._restarts_left -= 1
            fatal_error = await _error_of(self._start_new_decoder())
            if not fatal_error:
                await asyncio.to_thread(trim_memory)  # glibc keeps freed fragments, and each restart adds more
                self.restarted += 1
                logger.warning("The decoder was restarted; %d restarts are left.", self._restarts_left)
                return ""
        return failure or fatal_error

    async def _start_new_decoder(self) -> None:
        decoder = await asyncio.to_thread(self._make)
        try:
            await decoder.start()
        except BaseException:
            await decoder.close()
            raise
        self._decoder = decoder


async def _error_of(step: Coroutine[Any, Any, None]) -> str:
    try:
        await step
    except DashInferVLMError as error:
        logger.error("The decoder cannot be replaced: %s", error.message)  # noqa: TRY400 - the message is written for users
        return error.message
    except Exception:
        logger.exception("The decoder cannot be replaced.")
        return "The decoder failed and could not be restarted; see the log for the cause."
    return ""


_DIED = "The decoder failed while the request ran. Try again in a moment."
