"""The sixteen lines about media of our security rules, tried from outside: each test carries its line's number.

Two doors, both with the bundled model behind a real socket. The `open_door` may fetch from loopback, where the hostile
web servers of `tests.web` live, and read one folder; its caps are small. The `closed_door` has the defaults, under
which loopback and local files are out of reach. Whatever a test does, its door has to answer a good request afterwards.
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
"""What no error may show: paths, addresses, libraries and their words, and what the hostile files and servers say."""

LIMITS: dict[str, Any] = {
    "allow_private_addresses": True,
    "image_max_bytes": 100_000,
    "video_max_bytes": 300_000,
    "image_fetch_timeout": 15.0,
    "video_fetch_timeout": 15.0,
    "max_fetches": 4,
    "limit_mm_per_prompt": {"image": 8, "video": 1},
    "max_decoded_pixels": 1_000_000,
    "video_max_frames": 16,
    "video_max_seconds": 5.0,
}


class Door:
    """A server of the bundled model, and the ways to knock at it."""

    def __init__(self, engine: Engine, http: httpx.Client) -> None:
        self.engine = engine
        self._http = http

    def skip(self, seconds: float) -> None:
        """Move the engine's clock forward."""
        loop = self.engine._running.loop._loop
        assert isinstance(loop, SkippableLoop)
        loop.skip(seconds)

    def post(self, body: str) -> httpx.Response:
        return self._http.post("/v1/chat/completions", content=body)

    def ask(self, *parts: object, role: str = "user", **fields: object) -> httpx.Response:
        """One message of these content parts; `fields` go beside it."""
        messages = [{"role": role, "content": list(parts) or "What is this?"}]
        return self._http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1, **fields})

    def refuses(self, *parts: object, param: str = "messages[0].content[0]", code: str = "", **fields: object) -> str:
        """The words with which a request is refused: by the field to blame, and without a word from inside."""
        answer = self.ask(*parts, **fields)
        error = answer.json()["error"]
        assert answer.status_code == 400, error
        assert (error["type"], error["param"]) == ("invalid_request_error", param), error
        assert error["code"] == code or not code, error
        assert not LEAKS.search(error["message"]), error
        return error["message"]

    def sees(self, *parts: object, **fields: object) -> object:
        """What the model makes of a request: its prompt's length and its thoughts about the first token."""
        answer = self.ask(*parts, temperature=0, logprobs=True, top_logprobs=5, **fields)
        assert answer.status_code == 200, answer.json()
        body = answer.json()
        return body["usage"]["prompt_tokens"], body["choices"][0]["logprobs"]["content"]


def image(url: str, **options: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url, **options}}


def picture(data: bytes, kind: str = "image/png", **options: object) -> dict[str, object]:
    return image(data_url(data, kind), **options)


def video(url: str | list[str], **options: object) -> dict[str, object]:
    return {"type": "video_url", "video_url": {"url": url, **options}}


def film(data: bytes, **options: object) -> dict[str, object]:
    return video(data_url(data, "video/mp4"), **options)


def text(words: str) -> dict[str, object]:
    return {"type": "text", "text": words}


GOOD = image(image_url())


@contextlib.contextmanager
def opened(**options: Any) -> Iterator[Door]:
    config = EngineConfig(model="demo", decoder="torch", **options)
    engine = Engine(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "new_event_loop", SkippableLoop)
        engine.start()
    with contextlib.closing(engine), serving(engine, max_body_bytes=10_000_000) as server, server.http() as http:
        yield Door(engine, http)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that may be read, and beside it what may not."""
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
def _open_door(folder: Path) -> Iterator[Door]:
    with opened(allowed_local_media_path=folder, **LIMITS) as door:
        yield door


@pytest.fixture(scope="session")
def _closed_door() -> Iterator[Door]:
    with opened() as door:
        yield door


def _still_answers(door: Door) -> Door:
    assert door.ask(GOOD, text("What is this?")).status_code == 200
    return door


@pytest.fixture
def open_door(_open_door: Door) -> Iterator[Door]:
    yield _open_door
    _still_answers(_open_door)


@pytest.fixture
def closed_door(_closed_door: Door) -> Iterator[Door]:
    yield _closed_door
    _still_answers(_closed_door)
