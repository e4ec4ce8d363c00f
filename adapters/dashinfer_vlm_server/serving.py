"""One engine behind one address, until a signal ends it.

start ─▶ listens, `/health/ready` says 503 ─▶ the model is loaded ─▶ answers ─▶ signal ─▶ drains ─▶ ends
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
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import anyio
import click
import uvicorn

from dashinfer_vlm_core.engine import Engine
from dashinfer_vlm_core.errors import ConfigError, DecoderFailed

from .api_keys import KEY_VARIABLE
from .app import create_app
from .logs import last_line, writes_json
from .protocol import MAX_HEAD_BYTES, Protocol, detect_lost_peers
from .settings import DrainState, Settings
from .sockets import Address, opened

if TYPE_CHECKING:
    from types import FrameType

    from starlette.types import ASGIApp

    from dashinfer_vlm_core.config import EngineConfig

logger: logging.Logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 65
"""Longer than clients and proxies keep idle connections (5 to 60 s), lest one closes while a request is under way."""

GRACE_SECONDS = 20.0
"""How long running requests may go on after a signal; a second signal ends them at once. Kubernetes waits for 30 s."""

FAREWELL_SECONDS = 1.0
"""How long after that clients may take to read why their requests ended, before their connections are cut."""

DECODER_LOST = 3
"""Exit code for a decoder that cannot be replaced: whoever supervises the process should start it again."""

HELLO = '{"messages": [{"role": "user", "content": "Hello!"}]}'

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(config: EngineConfig, settings: Settings, address: Address, *, grace: float = GRACE_SECONDS) -> int:
    """Load a model and serve it until SIGINT or SIGTERM; the exit code of the process.

    Raises:
        ConfigError: the address cannot be listened on, or the certificate cannot be used.
        SetupError: the model cannot be loaded.
    """
    _on_signal(leave_at_once)
    drain_state, engine = DrainState(), Engine(config)
    with opened(address) as listener:
        detect_lost_peers(listener)
        application = create_app(engine, settings, drain_state=drain_state)
        server = Server(
            http_settings(application, address),
            engine=engine,
            drain_state=drain_state,
            grace=grace,
            ready=lambda: _ready(address.url(listener), address, settings, engine),
        )
        server.run(sockets=[listener])
    if engine.status().state == "loading":
        leave_at_once(server.signal or signal.SIGTERM, None)
    return _end(engine, server)


def http_settings(application: ASGIApp, address: Address) -> uvicorn.Config:
    """How uvicorn is to serve an application.

    Raises:
        ConfigError: the files of TLS cannot be used.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # `_announce` says better that it has started
    tls = address.tls
    settings = uvicorn.Config(
        application,
        http=Protocol,
        ws="none",
        log_config=None,
        access_log=False,  # `visits` writes it
        server_header=False,
        proxy_headers=False,  # nobody's address is looked at
        lifespan="off",
        root_path=address.root_path,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        ssl_certfile=tls.certificate if tls else None,
        ssl_keyfile=tls.key if tls else None,
        ssl_keyfile_password=tls.password if tls else None,
        ssl_ca_certs=str(tls.client_authorities) if tls and tls.client_authorities else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if tls and tls.client_authorities else ssl.CERT_NONE,
    )
    try:
        settings.load()
    except OSError as error:  # ssl.SSLError is one
        reason = error.strerror or getattr(error, "reason", None) or error
        raise ConfigError(
            f"The files of TLS cannot be used: {reason}. Check --ssl-certfile and --ssl-keyfile."
        ) from error
    return settings


class Server(uvicorn.Server):
    """Uvicorn in front of one engine, which it starts, and leaves in order.

    Args:
        settings: uvicorn's.
        engine: is started once the server listens, and closed when requests have outlasted the grace.
        gate: of the application.
        ready: called when the engine is.
        grace: seconds that running requests may go on after a signal.

    Attributes:
        signal: which one ended it, if one did.
        error: why the engine could not be started.
        lost: whether it ended because the engine cannot answer any more.
    """

    def __init__(
        self,
        settings: uvicorn.Config,
        *,
        engine: Engine,
        drain_state: DrainState,
        ready: Callable[[], None] = lambda: None,
        grace: float = GRACE_SECONDS,
    ) -> None:
        super().__init__(settings)
        self._engine = engine
        self._gate = drain_state
        self._ready = ready
        self._grace = grace
        self._loading: asyncio.Task[None] | None = None
        self.signal: int | None = None
        self.error: Exception | None = None
        self.lost: bool = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loading = asyncio.create_task(self._load(), name="load")

    async def on_tick(self, counter: int) -> bool:
        if self._engine.status().state == "failed":
            self.lost = self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let nothing new in, wait for what runs, and then end it; meanwhile newcomers are told so."""
        self._gate.draining = True
        if self.signal is not None:
            running, name = len(self.server_state.tasks), signal.Signals(self.signal).name
            logger.info("%s: %d requests may go on for %g seconds.", name, running, self._grace)
        if self._loading is not None:
            self._loading.cancel()
        with anyio.move_on_after(self._grace):
            await self._finished()
        if self.server_state.tasks and self._engine.status().state != "loading":
            logger.warning("%d requests outlasted the grace, and are ended.", len(self.server_state.tasks))
            await asyncio.to_thread(_close, self._engine)
        ending = asyncio.create_task(self._cut_connections())
        await super().shutdown(sockets)
        ending.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but signals are not raised again: whoever runs the server ends the process."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        _on_signal(self.handle_exit)
        try:
            yield
        finally:
            _on_signal(leave_at_once)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signal = sig
        self.force_exit: bool = self.should_exit  # uvicorn takes a second SIGINT so, but not a second SIGTERM
        self.should_exit: bool = True

    async def _load(self) -> None:
        try:
            await _in_thread(self._engine.start)
        except Exception as error:  # noqa: BLE001 - `run` raises it
            self.error = error
            self.should_exit = True
        else:
            self._ready()

    async def _finished(self) -> None:
        while self.server_state.tasks and not self.force_exit:  # noqa: ASYNC110 - uvicorn's set tells nobody
            await asyncio.sleep(0.05)

    async def _cut_connections(self) -> None:
        """Whoever sends no more of its request, or reads no more of its answer, would hold the server for ever."""
        await asyncio.sleep(FAREWELL_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def leave_at_once(number: int, _frame: FrameType | None) -> None:
    """For signals that cannot wait: threads that download or read files cannot be told to end, and an exit waits for
    them."""
    try:
        # Not click.echo: the signal may have come in the midst of another write to the same stream.
        os.write(sys.stderr.fileno(), last_line(f"ended by {signal.Signals(number).name}.").encode())
    finally:
        os._exit(0)


def _end(engine: Engine, server: Server) -> int:
    if server.error is not None:
        raise server.error
    if server.lost:
        logger.error("The decoder is lost (%s): this process ends, to be started again.", engine.status().fatal_error)
        logging.shutdown()
        os._exit(DECODER_LOST)  # what hangs would hold an orderly exit up
    _close(engine)
    return 0


def _close(engine: Engine) -> None:
    """Whoever sent the signal wants the end: that a step hangs is told, and changes nothing else."""
    try:
        engine.close()
    except DecoderFailed as error:
        logger.error("%s", error.message)  # noqa: TRY400 - it was made for people


async def _in_thread(work: Callable[[], object]) -> None:
    """Blocking work in a thread that an exit does not wait for."""
    done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="dashinfer-vlm-load", daemon=True).start()
    await asyncio.shield(asyncio.wrap_future(done))


def _ready(url: str, address: Address, settings: Settings, engine: Engine) -> None:
    # What is loaded stays: to look at all of it, the collector would keep every answer waiting for 0.3 s.
    gc.freeze()
    gc.enable()
    _announce(url, address, settings, engine)


def _announce(url: str, address: Address, settings: Settings, engine: Engine) -> None:
    status = engine.status()
    served = f"Serving {status.model} (decoder {status.decoder}) at {url}"
    if writes_json():
        logger.info("%s", served, extra={"fields": {"model": status.model, "decoder": status.decoder, "url": url}})
        return
    click.echo(served, err=True)
    if address.path is None:
        click.echo(f"Try: {_curl(url, keyed=len(settings.keys) > 0)}", err=True)


def _curl(url: str, *, keyed: bool) -> str:
    """A first question as a command; its key is for whoever runs it to put into the environment."""
    key = f'-H "Authorization: Bearer ${KEY_VARIABLE}" ' if keyed else ""
    return f"curl {url}/chat/completions {key}-d '{HELLO}'"


def _on_signal(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in SIGNALS:
        signal.signal(number, handler)
