"""Keeps a decoder running: one that has died is replaced, a bounded number of times."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from ..errors import DashInferVLMError, DecoderFailed, EngineClosed
from .interface import Decoder, DecodeRequest, DecoderStats, RequestNotStarted, Token

logger: logging.Logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
"""How often it is asked whether the decoder has died, should nobody be decoding who would notice."""

HEALTHY_SECONDS = 600.0
"""How long a decoder has to run until the restarts before it are forgotten."""

INITIAL_BACKOFF = 0.1
"""Seconds before a decoder that did not start is tried again; doubled each time."""


class Supervisor:
    """A decoder that outlives its death; implements `Decoder` and belongs to one event loop.

    When the decoder says that it is in `trouble`, it is closed, which fails the requests in it, and another one is made
    and started; requests that come meanwhile, and those that it had not begun with, wait for that. After `restarts` of
    them in a row, or where one cannot be closed, the trouble is for good.

    Args:
        make: a decoder that is not started yet; called here for the first one, and in a thread for the others.
        restarts: how often in a row it is replaced, or tried to be.

    Attributes:
        restarted: how often it was replaced.
        restarting: whether it is being replaced now.
        trouble: why it was given up on; empty while it was not.
    """

    def __init__(self, make: Callable[[], Decoder], *, restarts: int) -> None:
        self._make = make
        self._restarts = self._left = restarts
        self._began = 0.0
        self._decoder = make()
        self._ready = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False
        self.restarted: int = 0
        self.fatal_error: str = ""
        self.max_model_len: int = self._decoder.max_model_len
        self.supported_params: frozenset[str] = self._decoder.supported_params
        self.unsupported_vision_reason: str = self._decoder.unsupported_vision_reason
        self.name: str = self._decoder.name

    @property
    def restarting(self) -> bool:
        return self._keeper is not None and not self._ready.is_set()

    def snapshot(self) -> DecoderStats:
        return DecoderStats.of(self._decoder)

    async def start(self) -> None:
        await self._decoder.start()
        self._now_ready()
        self._keeper = asyncio.create_task(self._keep(), name="decoder-supervisor")

    async def close(self) -> None:
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._ready.set()
        try:
            await self._decoder.close()
        except DecoderFailed:
            if not self.fatal_error:  # else it was given up on because it cannot be closed
                raise

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[Token, None]:
        while True:
            decoder = await self._healthy()
            try:
                async with contextlib.aclosing(decoder.decode(request)) as tokens:
                    async for token in tokens:
                        yield token
            except RequestNotStarted:
                if self._closed:
                    raise EngineClosed("The engine was closed; start it again.") from None
            except (EngineClosed, DecoderFailed):
                if self._closed or self._well(decoder):
                    raise
                raise DecoderFailed(_DIED) from None
            else:
                return

    def _well(self, decoder: Decoder) -> bool:
        """Whether it is in use and in no trouble: what it says is about one request alone."""
        return decoder is self._decoder and self._ready.is_set() and not self.fatal_error and not decoder.fatal_error

    async def _healthy(self) -> Decoder:
        """The decoder, once it is in no trouble.

        Raises:
            DecoderFailed: it was given up on.
        """
        if self._decoder.fatal_error and not self.fatal_error and not self._closed:
            self._ready.clear()  # its death is not known to `_keep` yet
        await self._ready.wait()
        if self.fatal_error:
            raise DecoderFailed(self.fatal_error)
        return self._decoder

    async def _keep(self) -> None:
        """Look after the decoder until it is given up on, or we are cancelled."""
        while not self.fatal_error:
            await asyncio.sleep(LOOK_SECONDS)
            if fatal_error := self._decoder.fatal_error:
                self._ready.clear()
                self.fatal_error = await self._replace(fatal_error)
                self._now_ready()

    def _now_ready(self) -> None:
        self._began = asyncio.get_running_loop().time()
        self._ready.set()

    async def _replace(self, fatal_error: str) -> str:
        """Close the decoder and start another one; why that is not possible, or nothing if it is done."""
        logger.error("The decoder %s has failed: %s", self.name, fatal_error)
        if asyncio.get_running_loop().time() - self._began >= HEALTHY_SECONDS:
            self._left = self._restarts
        failure = await _failure(self._decoder.close())
        pause = 0.0
        while not failure and self._left:
            await asyncio.sleep(pause)
            pause = 2 * pause or INITIAL_BACKOFF
            self._left -= 1
            fatal_error = await _failure(self._start_another())
            if not fatal_error:
                await asyncio.to_thread(_give_back)
                self.restarted += 1
                logger.warning("The decoder was started again; this may happen %d more times.", self._left)
                return ""
        return failure or fatal_error

    async def _start_another(self) -> None:
        self._decoder = await self._started()

    async def _started(self) -> Decoder:
        decoder = await asyncio.to_thread(self._make)
        try:
            await decoder.start()
        except BaseException:
            await decoder.close()
            raise
        return decoder


async def _failure(step: Coroutine[Any, Any, None]) -> str:
    """Why a step of the replacement has failed; empty if it has not."""
    try:
        await step
    except DashInferVLMError as error:
        logger.error("The decoder cannot be replaced: %s", error.message)  # noqa: TRY400 - it was made for people
        return error.message
    except Exception:
        logger.exception("The decoder cannot be replaced.")
        return "The decoder failed and could not be started again; the log has the cause."
    return ""


def _give_back() -> None:
    """Return to the system what a dead decoder has freed in pieces: glibc keeps it, and each death leaves more."""
    with contextlib.suppress(OSError, TypeError, AttributeError):  # there is no such function outside of glibc
        ctypes.CDLL(None).malloc_trim(0)


_DIED = "The decoder failed while the request ran. Try again in a moment."
