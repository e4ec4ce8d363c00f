"""One engine behind one address, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import click
import uvicorn

from dashinfer_vlm_core.engine import Engine
from dashinfer_vlm_core.errors import ConfigError

from .app import create_app

if TYPE_CHECKING:
    from types import FrameType

    from dashinfer_vlm_core.config import EngineConfig

KEEP_ALIVE_SECONDS = 65
"""Longer than clients and proxies keep idle connections (5 to 60 s), lest one closes while a request is under way."""

GRACE_SECONDS = 10
"""How long running requests may go on after a signal; a second signal ends them at once."""

FAREWELL_SECONDS = 1
"""How long after that clients may take to read why their requests ended, before their connections are cut."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(config: EngineConfig, *, host: str, port: int, max_body_bytes: int, page: bool) -> None:
    """Load a model and serve it until SIGINT or SIGTERM, which end the process with 0.

    Raises:
        ConfigError: the address cannot be listened on.
        SetupError: the model cannot be loaded.
    """
    _on_signal(_leave_at_once)
    with _bind(host, port) as listener, Engine(config) as engine:
        _on_signal(_leave)
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # `_announce` says better that it has started
        settings = uvicorn.Config(
            create_app(engine, max_body_bytes=max_body_bytes, page=page),
            log_config=None,
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        Server(settings, ready=lambda: _announce(listener, engine), end=engine.aclose).run(sockets=[listener])


class Server(uvicorn.Server):
    """Uvicorn, saying when it is ready, and leaving in order.

    Args:
        settings: uvicorn's.
        ready: called when requests are answered.
        end: ends the requests that still run `grace` seconds after the server was told to stop.
        grace: how long they may go on.
    """

    def __init__(
        self,
        settings: uvicorn.Config,
        *,
        ready: Callable[[], None],
        end: Callable[[], Awaitable[None]],
        grace: float = GRACE_SECONDS,
    ) -> None:
        super().__init__(settings)
        self._ready = ready
        self._end = end
        self._grace = grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_later())
        await super().shutdown(sockets)
        ending.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # uvicorn takes a second SIGINT so, but not a second SIGTERM
        super().handle_exit(sig, frame)

    async def _end_later(self) -> None:
        """Uvicorn's own way (`timeout_graceful_shutdown`) cancels the tasks: their clients would get no word of why."""
        await asyncio.sleep(self._grace)
        try:
            await self._end()
        finally:
            await asyncio.sleep(FAREWELL_SECONDS)
            self._cut_connections()

    def _cut_connections(self) -> None:
        """Whoever sends no more of its request, or reads no more of its answer, would hold the server for ever."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _bind(host: str, port: int) -> socket.socket:
    """A socket that is bound, but refuses connections until the server listens: the model is loaded in between."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Cannot listen on {host} port {port}: {error.strerror or error}. Choose another --host or --port"
            " (--port 0 takes a free one)."
        ) from error
    return listener


def _announce(listener: socket.socket, engine: Engine) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    status = engine.status()
    click.echo(f"Serving {status.model} (decoder {status.decoder}) at {url}", err=True)
    click.echo(
        f"""Try: curl {url}/chat/completions -d '{{"messages": [{{"role": "user", "content": "Hello!"}}]}}'""", err=True
    )


def _on_signal(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in SIGNALS:
        signal.signal(number, handler)


def _leave_at_once(number: int, _frame: FrameType | None) -> None:
    """While the model loads: threads that download or read files cannot be told to end, and an exit waits for them."""
    try:
        # Not click.echo: the signal may have come in the midst of another write to the same stream.
        os.write(sys.stderr.fileno(), f"dashinfer-vlm: ended by {signal.Signals(number).name}.\n".encode())
    finally:
        os._exit(0)


def _leave(_number: int, _frame: FrameType | None) -> None:
    """After uvicorn has ended its connections: it raises the signal again. One more does not wait for the engine."""
    _on_signal(_leave_at_once)
    sys.exit(0)
