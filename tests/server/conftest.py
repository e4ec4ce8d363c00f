from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
import uvicorn
from dashinfer_vlm_server import create_app

from dashinfer_vlm_core import Engine
from dashinfer_vlm_core.testing import scripted_engine


class RunningServer:
    """An application behind a real socket, in a thread of its own."""

    def __init__(self, app, engine):
        self.app = app
        self.engine = engine
        self._uvicorn = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, ws="none"))

    @property
    def port(self) -> int:
        return self._uvicorn.servers[0].sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, trust_env=False, timeout=30, **options)

    def openai(self) -> openai.OpenAI:
        client = openai.DefaultHttpxClient(trust_env=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30, http_client=client)

    @contextlib.contextmanager
    def running(self) -> Iterator[RunningServer]:
        thread = threading.Thread(target=self._uvicorn.run)
        thread.start()
        try:
            eventually(lambda: self._uvicorn.started)
            yield self
        finally:
            self._uvicorn.should_exit = True
            thread.join(timeout=20)
            assert not thread.is_alive()


def eventually(condition: Callable[[], bool], *, within: float = 10.0) -> float:
    """Wait until `condition` holds; the seconds that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < within, f"not within {within} s"
        time.sleep(0.005)
    return time.monotonic() - start


@contextlib.contextmanager
def serving(engine, **options) -> Iterator[RunningServer]:
    with RunningServer(create_app(engine, **options), engine).running() as server:
        yield server


@pytest.fixture
def scripted(tiny_checkpoint) -> Iterator[Callable[..., RunningServer]]:
    """Start servers whose engine plays a script: `scripted("The answer.", delay=0.01)`."""
    with contextlib.ExitStack() as stack:

        def start(*answers, max_body_bytes=10_000_000, **options) -> RunningServer:
            options = {"model": str(tiny_checkpoint), "served_model_name": "tiny", **options}
            engine: Engine = stack.enter_context(scripted_engine(*answers, **options))
            return stack.enter_context(serving(engine, max_body_bytes=max_body_bytes))

        yield start
