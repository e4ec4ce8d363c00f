"""Rule 39: a stored response that is not read costs no memory, and API keys share the time in which pages are made."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import tracemalloc

import pytest

from dashinfer_vlm_core.concurrency.fair_slots import FairSlots
from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_server.body_memory import BodyMemoryBudget
from dashinfer_vlm_server.endpoints.responses.json_stream import SLICE_BYTES, JsonStream
from dashinfer_vlm_server.metrics import Metrics
from dashinfer_vlm_server.request_context import RequestContextMiddleware
from dashinfer_vlm_server.sse import Discarded, EventStream
from tests.samples import data_url, encode, noise
from tests.server.conftest import serving
from tests.waiting import HANG, until

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
    return [data async for data in stream.body_iterator]


def test_streamed_json_is_the_same_value_in_small_slices():
    for value in VALUES:
        slices = asyncio.run(collect(JsonStream(value, slots=FairSlots(1), client="")))
        assert json.loads(b"".join(slices)) == value
        assert max(map(len, slices)) <= 4 * SLICE_BYTES


def test_security_39_keys_take_turns_while_pages_are_made():
    ended = []

    async def read(client, slots, size):
        await collect(JsonStream("x" * size, slots=slots, client=client))
        ended.append(client)

    async def run():
        slots = FairSlots(1)
        attack = [asyncio.create_task(read("alice", slots, 100 * SLICE_BYTES)) for _ in range(10)]
        await asyncio.sleep(0)
        await read("bob", slots, 10 * SLICE_BYTES)
        await asyncio.gather(*attack)

    asyncio.run(run())
    assert ended == ["bob"] + ["alice"] * 10


@contextlib.contextmanager
def unread_items(server, response_id):
    """A request for the items of a response whose client has not read anything."""
    with socket.socket() as connection:
        connection.settimeout(HANG)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        request = f"GET /v1/responses/{response_id}/input_items HTTP/1.1\r\nHost: localhost\r\n\r\n"
        connection.sendall(request.encode())
        yield connection


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
            stack.enter_context(unread_items(server, response_id))
        until(lambda: server.writers_paused == 4)
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB


@pytest.mark.slow
def test_security_39_deleted_items_cost_no_memory_while_they_are_sent():
    with scripted_engine("Fine.") as engine, serving(engine) as server, contextlib.ExitStack() as stack:
        client = stack.enter_context(server.http())
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        connections = []
        for index in range(3):
            item = {"type": "reasoning", "summary": [], "encrypted_content": "x" * 12 * MIB}
            body = {"input": [item, {"role": "user", "content": "Hello"}]}
            response_id = client.post("/v1/responses", json=body).json()["id"]
            connections.append(stack.enter_context(unread_items(server, response_id)))
            until(lambda paused=index + 1: server.writers_paused == paused)
            del item, body
            assert client.delete(f"/v1/responses/{response_id}").status_code == 200
        gc.collect()  # the requests of the test's client
        until(lambda: tracemalloc.get_traced_memory()[0] < 8 * MIB)
        for connection in connections:
            received = b"".join(iter(lambda connection=connection: connection.recv(65536), b""))
            assert received.startswith(b"HTTP/1.1 200 ")
            assert not received.endswith(b"0\r\n\r\n")  # it is incomplete


def test_security_39_discarded_event_is_not_completed():
    sent = []

    async def events():
        yield b"data: {"
        raise Discarded

    async def send(message):
        sent.append(message)

    with scripted_engine("Fine.") as engine:
        app = EventStream(events(), encode=bytes, encode_error=str)
        middleware = RequestContextMiddleware(app, routes=[], metrics=Metrics(engine), budget=BodyMemoryBudget(1))
        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        asyncio.run(middleware(scope, asyncio.Event().wait, send))
    assert [message.get("body") for message in sent] == [None, b"data: {"]
    assert sent[-1]["more_body"]


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
