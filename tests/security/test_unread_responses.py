"""Rule 39: a stored response that is not read costs no memory, and API keys share the time in which pages are made."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tracemalloc

import pytest

from dashinfer_vlm_core.concurrency.fair_slots import FairSlots
from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_server.body_memory import BodyMemoryBudget
from dashinfer_vlm_server.json_stream import SLICE_BYTES, stream_json
from dashinfer_vlm_server.metrics import Metrics
from dashinfer_vlm_server.request_context import RequestContextMiddleware
from tests.samples import data_url, encode, noise
from tests.server.conftest import serving
from tests.waiting import until

MIB = 1024 * 1024

VALUES = [
    {},
    [],
    [[], {}, None, True, 1, -1.5, ""],
    {"a": {"b": [{"c": 'quotes " and \\ and \n'}]}, "é": "\ud83d ü \x00"},
    {"text": "x" * (2 * SLICE_BYTES + 1), "quotes": '"' * SLICE_BYTES, "non-ASCII": "ü😀" * SLICE_BYTES},
    [{"id": index} for index in range(10_000)],
]


async def collect(stream):
    return [data async for data in stream]


def test_streamed_json_is_the_same_value_in_small_slices():
    for value in VALUES:
        slices = asyncio.run(collect(stream_json(value, slots=FairSlots(1), client="")))
        assert json.loads(b"".join(slices)) == value
        assert max(map(len, slices)) <= 4 * SLICE_BYTES


def test_security_39_keys_take_turns_while_pages_are_made():
    ended = []

    async def read(client, slots, size):
        await collect(stream_json("x" * size, slots=slots, client=client))
        ended.append(client)

    async def run():
        slots = FairSlots(1)
        attack = [asyncio.create_task(read("alice", slots, 100 * SLICE_BYTES)) for _ in range(10)]
        await asyncio.sleep(0)
        await read("bob", slots, 10 * SLICE_BYTES)
        await asyncio.gather(*attack)

    asyncio.run(run())
    assert ended == ["bob"] + ["alice"] * 10


@pytest.mark.slow
def test_security_39_unread_items_cost_no_memory():
    picture = data_url(encode(noise(20, 30)) + bytes(12 * MIB))
    content = [{"type": "input_image", "image_url": picture}]
    with scripted_engine("Fine.") as engine, serving(engine) as server, contextlib.ExitStack() as stack:
        with server.http() as client:
            body = {"input": [{"role": "user", "content": content}]}
            response_id = client.post("/v1/responses", json=body).json()["id"]
            page = client.get(f"/v1/responses/{response_id}/input_items").json()
            assert page["data"][0]["content"][0]["image_url"] == picture
        del page
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        for _ in range(4):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            request = f"GET /v1/responses/{response_id}/input_items HTTP/1.1\r\nHost: localhost\r\n\r\n"
            connection.sendall(request.encode())
        until(lambda: server.writers_paused == 4)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB


def test_security_39_large_body_is_sent_in_slices():
    """The server copies what the client does not read, so it gets no more than a slice at once."""
    sent, body = [], bytes(range(256)) * (SLICE_BYTES // 100)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": body})

    async def send(message):
        sent.append(message)

    with scripted_engine("Fine.") as engine:
        middleware = RequestContextMiddleware(app, routes=[], metrics=Metrics(engine), budget=BodyMemoryBudget(1))
        asyncio.run(middleware({"type": "http", "method": "GET", "path": "/", "headers": []}, None, send))
    bodies = [message["body"] for message in sent[1:]]
    assert b"".join(bodies) == body * 2
    assert max(map(len, bodies)) == SLICE_BYTES
    assert [message.get("more_body", False) for message in sent[1:]] == [True] * (len(bodies) - 1) + [False]
