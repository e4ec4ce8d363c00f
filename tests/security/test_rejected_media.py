"""Rule 18: a rejected request leaves no reference cycles, which would keep its media until a garbage collection."""

from __future__ import annotations

import asyncio
import base64
import gc
import sys
import weakref

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.errors import InvalidParameter, MediaUndecodable
from dashinfer_vlm_server.request_body import cancel_on_disconnect
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_collection():
    """Release only what nothing refers to."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    with Engine(EngineConfig(model=str(tiny_checkpoint))) as engine:
        yield engine


def is_rejected(engine, url):
    content = [{"type": "video_url", "video_url": {"url": url}}]
    try:
        engine.chat({"messages": [{"role": "user", "content": content}]})
    except MediaUndecodable:
        return True
    return False


@pytest.mark.parametrize(
    "text", ["!", base64.b64encode(b"not a video" * 9).decode()], ids=["not base64", "rejected by a worker"]
)
def test_security_18_rejected_media_are_released(engine, text):
    url = f"data:video/mp4;base64,{text}"
    before = sys.getrefcount(url)
    assert is_rejected(engine, url)
    until(lambda: sys.getrefcount(url) == before)  # threads release their last job after its result


class Body:
    """An object that can be referred to weakly."""


def test_security_18_rejected_body_is_released():
    async def fail(_body):
        await asyncio.sleep(0)
        raise InvalidParameter("The request is invalid.")

    async def receive():
        await asyncio.Event().wait()

    async def serve():
        body = Body()
        reference = weakref.ref(body)
        try:
            await cancel_on_disconnect(receive, fail(body))
        except InvalidParameter:
            del body
        return reference

    async def main():
        reference = await serve()
        await asyncio.sleep(0)
        assert reference() is None

    asyncio.run(main())
