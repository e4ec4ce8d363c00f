from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.config import MIB
from dashinfer_vlm_core.engine import ChatEngine
from dashinfer_vlm_core.protocol.sampling import SAMPLING_PARAMETERS
from dashinfer_vlm_core.testing import Script, scripted_registry
from dashinfer_vlm_server import create_app
from dashinfer_vlm_server.endpoints.responses.response_store import ResponseStore, StoredResponse
from dashinfer_vlm_server.http_protocol import TimeoutH11Protocol
from dashinfer_vlm_server.serving import uvicorn_config
from dashinfer_vlm_server.settings import Settings
from dashinfer_vlm_server.sockets import Address
from tests.clock import SkippableLoop, run
from tests.core.test_reasoning import TEMPLATE
from tests.waiting import HANG, until
from tests.web import CERTIFICATES


@pytest.fixture(autouse=True)
def log_format() -> Iterator[None]:
    """Restore the log format, which the command sets for all logs of this process."""
    handlers = {handler: handler.formatter for handler in logging.getLogger().handlers}
    yield
    for handler, formatter in handlers.items():
        handler.setFormatter(formatter)
    logging.captureWarnings(False)


class RunningServer:
    """An application on a real socket, in a separate thread."""

    def __init__(
        self,
        app: FastAPI,
        address: Address | None = None,
        listener: socket.socket | None = None,
        *,
        protocol: type[TimeoutH11Protocol] = TimeoutH11Protocol,
    ) -> None:
        settings = uvicorn_config(app, address or Address())
        settings.port = 0
        settings.http_protocol_class = protocol
        self._sockets = [listener] if listener else None
        self.loop = SkippableLoop()
        self._uvicorn = uvicorn.Server(settings)

    @property
    def port(self) -> int:
        return self._uvicorn.servers[0].sockets[0].getsockname()[1]

    @property
    def protocols(self) -> tuple[Any, ...]:
        """uvicorn's protocols of the open connections."""
        return tuple(self._uvicorn.server_state.connections)

    @property
    def connections(self) -> int:
        return len(self.protocols)

    @property
    def tasks(self) -> int:
        """Number of requests whose head was read and that have not ended."""
        return len(self._uvicorn.server_state.tasks)

    @property
    def writers_paused(self) -> int:
        """Number of clients that have stopped reading their responses."""
        return sum(connection.flow.write_paused for connection in self.protocols)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, **options) -> httpx.Client:
        """Return a client whose bodies are JSON unless a request has another content type."""
        headers = {"Content-Type": "application/json"}
        settings = {"trust_env": False, "verify": CERTIFICATES, "timeout": HANG, "headers": headers}
        return httpx.Client(base_url=self.url, **settings, **options)

    def openai(self) -> openai.OpenAI:
        client = openai.DefaultHttpxClient(trust_env=False, verify=CERTIFICATES)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=HANG, http_client=client)

    @contextlib.contextmanager
    def running(self) -> Iterator[RunningServer]:
        leave = asyncio.Event()
        thread = threading.Thread(target=run, args=[self._serve(leave), self.loop])
        thread.start()
        try:
            until(lambda: self._uvicorn.started)
            yield self
        finally:
            self.loop.call_soon_threadsafe(leave.set)
            thread.join(timeout=HANG)
            assert not thread.is_alive()

    async def _serve(self, leave: asyncio.Event) -> None:
        """Serve until `leave`. Skip the two waits of 0.1 s in uvicorn's shutdown, which would dominate many tests."""
        serving = asyncio.create_task(self._uvicorn.serve(self._sockets))
        await leave.wait()
        self._uvicorn.should_exit = True
        for _ in range(2):
            await self.loop.askip(0.1)
        await serving


@contextlib.contextmanager
def serving(
    engine: ChatEngine, *, protocol: type[TimeoutH11Protocol] = TimeoutH11Protocol, tracer=None, **options
) -> Iterator[RunningServer]:
    """Serve `engine`, which can be a test double without a checkpoint."""
    with RunningServer(create_app(engine, Settings(**options), tracer=tracer), protocol=protocol).running() as server:
        yield server


class Scripted(NamedTuple):
    server: RunningServer
    engine: Engine
    script: Script


@pytest.fixture
def scripted(tiny_checkpoint) -> Iterator[Callable[..., Scripted]]:
    """Start servers whose engine has a scripted decoder: `scripted("Yes.", delay=0.01)`."""
    with contextlib.ExitStack() as stack:

        def start(
            *responses,
            delay=0.0,
            supported_params=SAMPLING_PARAMETERS,
            max_body_bytes=10_000_000,
            settings=MappingProxyType({}),
            protocol=TimeoutH11Protocol,
            **options,
        ) -> Scripted:
            script = Script(*responses, delay=delay, supported_params=supported_params)
            config = EngineConfig(model=str(tiny_checkpoint), served_model_name="tiny", decoder="scripted", **options)
            engine = stack.enter_context(Engine(config, registry=scripted_registry(script)))
            served = serving(engine, protocol=protocol, max_body_mib=max_body_bytes / MIB, **settings)
            return Scripted(stack.enter_context(served), engine, script)

        yield start


class PausedAdd:
    """The next response is stored when `resume` is set; `store` and `response_id` are known from `entered` on."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.resume = threading.Event()
        self.added = threading.Event()

    def add(self, store: ResponseStore, client_id: str, response: StoredResponse) -> None:
        self.store = store
        self.response_id = response.id
        self.entered.set()
        assert self.resume.wait(HANG)
        self._add(store, client_id, response)
        self.added.set()

    _add = staticmethod(ResponseStore.add)


@pytest.fixture
def thinking(scripted, tmp_path):
    """Start a server whose prompts end with `<think>`."""
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return lambda *responses, **options: scripted(*responses, chat_template=path, **options)


@pytest.fixture
def paused_add(monkeypatch) -> Iterator[PausedAdd]:
    """Let responses wait before they are stored."""
    paused = PausedAdd()

    def add(store: ResponseStore, client_id: str, response: StoredResponse) -> None:
        paused.add(store, client_id, response)

    monkeypatch.setattr(ResponseStore, "add", add)
    yield paused
    paused.resume.set()
