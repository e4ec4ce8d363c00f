"""Tests of the rules of SECURITY.md from outside. The name of each test contains the number of its rule.

Two servers with the bundled model listen on real sockets. `open_server` may fetch from loopback, where the malicious
servers of `tests.web` listen, and read one folder; its limits are small. `default_server` has the default settings,
which forbid loopback and local files. After each test, its server must respond to a valid request.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from tests.clock import SkippableLoop
from tests.samples import data_url, encode, image_url, noise
from tests.server.conftest import serving

LEAKS = re.compile(
    r"Traceback|File \"|site-packages|0x[0-9a-f]{4}|\bPIL\b|[Pp]illow|httpx|httpcore|h11|numpy|torch(?!\.save)|decord"
    r"|libav|ffmpeg|[Ee]rrno|\d+\.\d+\.\d+\.\d+|::1|localhost|/etc|/tmp|/root|/home|/proc|passwd|secret",
)
"""What no error may contain: paths, addresses, names and messages of libraries, and content of malicious files."""

LIMITS: dict[str, Any] = {
    "allow_private_addresses": True,
    "image_max_bytes": 100_000,
    "video_max_bytes": 300_000,
    "image_fetch_timeout": 15.0,
    "video_fetch_timeout": 15.0,
    "limit_mm_per_prompt": {"image": 8, "video": 1},
    "limits": {"max_fetches": 4, "max_decoded_pixels": 1_000_000},
    "video_max_frames": 16,
    "video_max_seconds": 5.0,
}


class ServerClient:
    """Sends requests to a server with the bundled model."""

    def __init__(self, engine: Engine, http: httpx.Client) -> None:
        self.engine = engine
        self._http = http

    def skip(self, seconds: float) -> None:
        """Advance the engine's clock."""
        loop = self.engine._running.loop._loop
        assert isinstance(loop, SkippableLoop)
        loop.skip(seconds)

    def post(self, body: str, path: str = "/v1/chat/completions") -> httpx.Response:
        return self._http.post(path, content=body)

    def chat(self, *parts: object, role: str = "user", **fields: object) -> httpx.Response:
        """Send one message with these content parts, and additional request fields."""
        messages = [{"role": role, "content": list(parts) or "What is this?"}]
        return self._http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1, **fields})

    def rejection(self, *parts: object, param: str = "messages[0].content[0]", code: str = "", **fields: object) -> str:
        """Assert that a request is rejected by its field and without internal details. Return the message."""
        response = self.chat(*parts, **fields)
        error = response.json()["error"]
        assert response.status_code == 400, error
        assert (error["type"], error["param"]) == ("invalid_request_error", param), error
        assert error["code"] == code or not code, error
        assert not LEAKS.search(error["message"]), error
        return error["message"]

    def fingerprint(self, *parts: object, **fields: object) -> object:
        """Return the length of the prompt and the logprobs of the first token, which identify the model's input."""
        response = self.chat(*parts, temperature=0, logprobs=True, top_logprobs=5, **fields)
        assert response.status_code == 200, response.json()
        body = response.json()
        return body["usage"]["prompt_tokens"], body["choices"][0]["logprobs"]["content"]


def image(url: str, **options: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url, **options}}


def image_data(data: bytes, kind: str = "image/png", **options: object) -> dict[str, object]:
    return image(data_url(data, kind), **options)


def video(url: str | list[str], **options: object) -> dict[str, object]:
    return {"type": "video_url", "video_url": {"url": url, **options}}


def video_data(data: bytes, **options: object) -> dict[str, object]:
    return video(data_url(data, "video/mp4"), **options)


def text(words: str) -> dict[str, object]:
    return {"type": "text", "text": words}


GOOD = image(image_url())


@contextlib.contextmanager
def running_server(**options: Any) -> Iterator[ServerClient]:
    config = EngineConfig(model="demo", decoder="torch", **options)
    engine = Engine(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "new_event_loop", SkippableLoop)
        engine.start()
    with contextlib.closing(engine), serving(engine, max_body_mib=10) as server, server.http() as http:
        yield ServerClient(engine, http)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the server may read, next to files that it may not read."""
    base = tmp_path_factory.mktemp("disk")
    folder = base / "allowed"
    folder.mkdir()
    (folder / "picture.png").write_bytes(encode(noise(20, 30)))
    (base / "allowed-but-not").mkdir()
    for secret in (base / "secret.png", base / "allowed-but-not" / "secret.png"):
        secret.write_bytes(encode(noise(20, 30)))
    (folder / "inside.png").symlink_to(folder / "picture.png")
    (folder / "outside.png").symlink_to(base / "secret.png")
    return folder


@pytest.fixture(scope="session")
def _open_server(folder: Path) -> Iterator[ServerClient]:
    with running_server(allowed_local_media_path=folder, **LIMITS) as server:
        yield server


@pytest.fixture(scope="session")
def _default_server() -> Iterator[ServerClient]:
    with running_server() as server:
        yield server


def check_responds(server: ServerClient) -> ServerClient:
    assert server.chat(GOOD, text("What is this?")).status_code == 200
    return server


@pytest.fixture
def open_server(_open_server: ServerClient) -> Iterator[ServerClient]:
    yield _open_server
    check_responds(_open_server)


@pytest.fixture
def default_server(_default_server: ServerClient) -> Iterator[ServerClient]:
    yield _default_server
    check_responds(_default_server)
