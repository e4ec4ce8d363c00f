"""Serve one engine on one address, until a signal.

start ─▶ listen, `/health/ready` returns 503 ─▶ model loaded ─▶ serve requests ─▶ signal ─▶ drain ─▶ exit
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import anyio
import click
import uvicorn

from dashinfer_vlm_core.concurrency.abandoned_threads import ABANDONED_THREADS, CLOSE_THREAD
from dashinfer_vlm_core.errors import ConfigError, DecoderFailed

from .api_keys import KEY_VARIABLE
from .app import create_app
from .http_protocol import MAX_HEAD_BYTES, TimeoutH11Protocol, detect_lost_peers
from .logs import last_line, writes_json
from .settings import GRACE_SECONDS, DrainState, Settings
from .sockets import Address, open_listener
from .websocket_protocol import MAX_MESSAGE_BYTES, LimitedWebSocketProtocol

if TYPE_CHECKING:
    from types import FrameType

    from starlette.types import ASGIApp

    from .engines import LocalEngine
    from .tracing import Tracer

logger: logging.Logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 65
"""Longer than clients and proxies keep idle connections (5 to 60 s), so that the server does not close one while the
client sends a request."""

STOP_SECONDS = 10.0
"""How long the engine may take to close after the grace period: it waits for the current step of the decoder."""

CLOSE_SECONDS = 0.5
"""Time after that for clients to read why their requests ended, before their connections are aborted."""

THREAD_SECONDS = 0.1
"""Time after that for threads to end, before the process exits without them."""

DECODER_FAILED = 3
"""Exit code if the decoder cannot be restarted: the process supervisor should restart the server."""

SAMPLE_REQUEST = '{"messages": [{"role": "user", "content": "Hello!"}]}'

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(
    engine: LocalEngine,
    settings: Settings,
    address: Address,
    *,
    grace: float = GRACE_SECONDS,
    tracer: Tracer | None = None,
) -> int:
    """Start an engine and serve it until SIGINT or SIGTERM. Returns the exit code of the process.

    Raises:
        ConfigError: the server cannot listen on the address, or cannot use the certificate.
        SetupError: the model cannot be loaded.
    """
    _on_signal(exit_immediately)
    drain_state = DrainState()
    with open_listener(address) as listener:
        detect_lost_peers(listener)
        application = create_app(engine, settings, tracer=tracer, drain_state=drain_state)
        if settings.keys.file:
            _on_hangup(lambda: application.state.reload_api_keys(force=True))
        server = Server(
            uvicorn_config(application, address),
            engine=engine,
            drain_state=drain_state,
            grace=grace,
            on_ready=lambda: _ready(address.url(listener), address, settings, engine),
        )
        server.run(sockets=[listener])
    if _is_loading(engine):
        exit_immediately(server.signal or signal.SIGTERM, None)
    code = _finish(engine, server)
    if server.signal is not None:
        _abandon_threads(code)
    return code


def uvicorn_config(application: ASGIApp, address: Address) -> uvicorn.Config:
    """Return uvicorn's configuration for an application.

    Raises:
        ConfigError: the TLS files cannot be used.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # `_ready` replaces its startup messages
    settings = uvicorn.Config(
        application,
        http=TimeoutH11Protocol,
        ws=LimitedWebSocketProtocol,
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,  # it would take 100 KB of memory per connection
        log_config=None,
        access_log=False,  # `RequestContextMiddleware` writes it
        server_header=False,
        proxy_headers=False,  # client addresses are not used
        lifespan="off",
        root_path=address.root_path,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ssl_certfile=address.ssl_certfile,
        ssl_keyfile=address.ssl_keyfile,
        ssl_ca_certs=str(address.ssl_ca_certs) if address.ssl_ca_certs else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if address.ssl_ca_certs else ssl.CERT_NONE,
    )
    try:
        settings.load()
    except OSError as error:  # the base of ssl.SSLError
        reason = error.strerror or getattr(error, "reason", None) or error
        raise ConfigError(f"The TLS files cannot be used: {reason}. Check --ssl-certfile and --ssl-keyfile.") from error
    return settings


class Server(uvicorn.Server):
    """A uvicorn server that starts its engine, and shuts down gracefully.

    Args:
        settings: uvicorn's configuration.
        engine: started once the server listens, and closed if requests are still running after the grace period.
        drain_state: the application's drain state.
        on_ready: called when the engine is ready.
        grace: number of seconds for running requests to finish after a signal.

    Attributes:
        signal: the signal that ended the server, if any.
        error: why the engine could not be started.
        decoder_failed: whether the server ended because its engine failed permanently.
    """

    def __init__(
        self,
        settings: uvicorn.Config,
        *,
        engine: LocalEngine,
        drain_state: DrainState,
        on_ready: Callable[[], None] = lambda: None,
        grace: float = GRACE_SECONDS,
    ) -> None:
        super().__init__(settings)
        self._engine = engine
        self._drain_state = drain_state
        self._on_ready = on_ready
        self._grace = grace
        self._loading: asyncio.Task[None] | None = None
        self._closing: threading.Thread | None = None
        self.signal: int | None = None
        self.error: Exception | None = None
        self.decoder_failed: bool = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loading = asyncio.create_task(self._load(), name="load")

    async def on_tick(self, counter: int) -> bool:
        if self._engine.status().state == "failed":
            self.decoder_failed = self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Reject new requests, wait for running ones, and terminate those that exceed the grace period."""
        self._drain_state.drain()
        if self.signal is not None:
            name = signal.Signals(self.signal).name
            running = self._num_running
            logger.info("%s: waiting for %d running requests, up to %g seconds.", name, running, self._grace)
        if self._loading is not None:
            self._loading.cancel()
        with anyio.move_on_after(self._grace):
            await self._wait_for_requests()
        if self._num_running and not _is_loading(self._engine):
            logger.warning("%d requests exceeded the grace period and are terminated.", self._num_running)
            await asyncio.to_thread(self.close_engine)
        ending = asyncio.create_task(self._abort_connections())
        await super().shutdown(sockets)
        ending.cancel()

    def close_engine(self) -> None:
        """Close the engine, once; logs an error if it does not close in time."""
        if self._closing is not None:
            return
        self._closing = threading.Thread(target=_close, args=(self._engine,), name=CLOSE_THREAD, daemon=True)
        self._closing.start()
        self._closing.join(STOP_SECONDS)
        if self._closing.is_alive():
            logger.error("A step of the decoder has not ended within %g seconds.", STOP_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture signals as uvicorn does, but do not raise them again: `run` exits the process."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        _on_signal(self.handle_exit)
        try:
            yield
        finally:
            _on_signal(exit_immediately)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signal = sig
        self.force_exit: bool = self.should_exit  # uvicorn does this for a second SIGINT only
        self.should_exit: bool = True

    async def _load(self) -> None:
        # Neither the event loop nor an exit while the model is loaded waits for a thread of this executor.
        executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="dashinfer-vlm-load")
        try:
            await asyncio.get_running_loop().run_in_executor(executor, self._engine.start)
        except Exception as error:  # noqa: BLE001 - `run` raises it
            self.error = error
            self.should_exit = True
        else:
            self._on_ready()

    @property
    def _num_running(self) -> int:
        return len(self.server_state.tasks) + self._drain_state.background

    async def _wait_for_requests(self) -> None:
        while self._num_running and not self.force_exit:  # noqa: ASYNC110 - uvicorn's set has no event
            await asyncio.sleep(0.05)

    async def _abort_connections(self) -> None:
        """Abort connections whose clients stopped sending or reading, which would block the shutdown forever."""
        await asyncio.sleep(CLOSE_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def exit_immediately(number: int, _frame: FrameType | None) -> None:
    """Handle a signal by exiting without cleanup: a normal exit would wait for threads that download or read files."""
    try:
        # Not click.echo: the signal may have interrupted another write to the same stream.
        os.write(sys.stderr.fileno(), last_line(f"terminated by {signal.Signals(number).name}.").encode())
    finally:
        os._exit(0)


def _abandon_threads(code: int) -> None:
    """Exit now if threads still decode media, store weights or run a step of the decoder: they cannot be stopped, and
    the interpreter would wait for them."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(ABANDONED_THREADS)]
    end = time.monotonic() + THREAD_SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        logger.warning("The process exits, although threads still decode media, store weights or run a step.")
        logging.shutdown()
        os._exit(code)


def _finish(engine: LocalEngine, server: Server) -> int:
    if server.error is not None:
        raise server.error
    if server.decoder_failed:
        logger.error(
            "The decoder failed permanently (%s). The process exits and must be restarted.", engine.status().fatal_error
        )
        logging.shutdown()
        os._exit(DECODER_FAILED)  # a hung decoder step would block a normal exit
    server.close_engine()
    return 0


def _is_loading(engine: LocalEngine) -> bool:
    return any(model.status().state == "loading" for model in engine.models())


def _close(engine: LocalEngine) -> None:
    try:
        engine.close()
    except DecoderFailed as error:
        logger.error("%s", error.message)  # noqa: TRY400 - the message is for the operator


def _ready(url: str, address: Address, settings: Settings, engine: LocalEngine) -> None:
    # Loaded objects stay alive. Scanning them would delay every response by 0.3 s per collection.
    gc.freeze()
    gc.enable()
    status = engine.status()
    served = f"Serving {_names(engine)} at {url}"
    if writes_json():
        logger.info("%s", served, extra={"fields": {"model": status.model, "decoder": status.decoder, "url": url}})
        return
    click.echo(served, err=True)
    if status.card.description:
        click.echo(f"{status.model}: {status.card.description}", err=True)
    if address.uds is None:
        key = f'-H "Authorization: Bearer ${KEY_VARIABLE}" ' if len(settings.keys) else ""
        curl = f"curl {url}/chat/completions {key}-H 'Content-Type: application/json' -d '{SAMPLE_REQUEST}'"
        click.echo(f"Try: {curl}", err=True)


def _names(engine: LocalEngine) -> str:
    statuses = [model.status() for model in engine.models()]
    details = (f"decoder {status.decoder}" if status.decoder else "loaded on request" for status in statuses)
    return ", ".join(f"{status.model} ({detail})" for status, detail in zip(statuses, details, strict=True))


def _on_hangup(work: Callable[[], object]) -> None:
    """Run `work` in a thread for each SIGHUP, which would end the process otherwise."""

    def start(_number: int, _frame: FrameType | None) -> None:
        threading.Thread(target=work, name="dashinfer-vlm-keys", daemon=True).start()

    signal.signal(signal.SIGHUP, start)


def _on_signal(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in SIGNALS:
        signal.signal(number, handler)
