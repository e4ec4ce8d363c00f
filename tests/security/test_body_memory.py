"""Rule 18: the memory of request bodies is shared fairly among API keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys

import pytest

from dashinfer_vlm_core.errors import QueueFull
from dashinfer_vlm_core.protocol.client import Client, current_client
from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_server.api_keys import ApiKeys
from dashinfer_vlm_server.body_memory import WAIT_SECONDS, BodyMemory, BodyMemoryBudget
from tests.clock import run, skippable_loop
from tests.server.conftest import serving
from tests.waiting import HANG

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


class Upload:
    """A body that a client sends in pieces, in a task of its own. It needs no memory anymore once it was rejected."""

    def __init__(self, budget, client):
        self.memory = BodyMemory(budget)
        self._pieces = asyncio.Queue()
        self.task = asyncio.create_task(self._receive(client))

    async def _receive(self, client):
        current_client.set(Client(id=client))
        with self.memory.receiving() as reserve:
            while (size := await self._pieces.get()) is not None:
                await reserve(size)

    def queue(self, *pieces):
        for piece in pieces:
            self._pieces.put_nowait(piece)

    async def send(self, *pieces):
        """Send pieces, of which None is the end. Return whether the body is rejected, as far as is known now."""
        self.queue(*pieces)
        await skippable_loop().askip(0)
        return self.rejected

    @property
    def rejected(self):
        return self.task.done() and isinstance(self.task.exception(), QueueFull)


class CountedCalls(contextlib.AbstractContextManager):
    """Counts the calls of Python functions, whose number does not depend on the machine as time does."""

    number = 0

    def __enter__(self):
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _count(self, frame, event, argument):
        self.number += event == "call"


@contextlib.asynccontextmanager
async def uploads(limit):
    budget, started = BodyMemoryBudget(limit), []

    def start(client):
        started.append(Upload(budget, client))
        return started[-1]

    yield start
    for upload in started:
        upload.task.cancel()
        await asyncio.gather(upload.task, return_exceptions=True)
        upload.memory.release()
    assert not budget._used
    assert not budget._waiting
    assert not budget._receiving


def test_security_18_a_key_alone_uses_all_body_memory():
    async def work():
        async with uploads(100) as start:
            alice, other = start("alice"), start("alice")
            assert not await alice.send(60, 40)
            assert await other.send(1)
            assert not alice.rejected

    run(work())


def test_security_18_largest_incomplete_body_gives_way_to_another_key():
    async def work():
        async with uploads(100) as start:
            small, large, bob = start("alice"), start("alice"), start("bob")
            await small.send(30)
            await large.send(70)
            assert not await bob.send(50)
            assert (small.rejected, large.rejected) == (False, True)
            assert await bob.send(21)  # more than an equal share, and more than is free
            assert not small.rejected

    run(work())


def test_security_18_complete_body_keeps_its_memory_and_others_wait_for_it():
    async def work():
        async with uploads(100) as start:
            first, second, bob, new = start("alice"), start("alice"), start("bob"), start("alice")
            await first.send(70, None)
            await second.send(20, None)
            await bob.send(40)
            assert await new.send(5)  # it is free, but another key waits
            assert bob.memory.size == 0
            first.memory.release()
            await bob.send()
            assert (bob.memory.size, second.memory.size) == (40, 20)

    run(work())


def test_security_18_key_that_waits_too_long_for_memory_is_rejected():
    async def work():
        async with uploads(100) as start:
            alice, bob = start("alice"), start("bob")
            await alice.send(100, None)
            assert not await bob.send(1)
            await skippable_loop().askip(WAIT_SECONDS + 1)
            assert bob.rejected

    run(work())


def test_security_18_bodies_that_wait_are_served_in_order():
    async def work():
        async with uploads(100) as start:
            alice, others = start("alice"), [start("bob") for _ in range(4)]
            await alice.send(100, None)
            for body in others:
                await body.send(20, None)
            others[0].task.cancel()
            await alice.send()
            alice.memory.release()
            await alice.send()
            assert [body.memory.size for body in others] == [0, 20, 20, 20]

    run(work())


@pytest.mark.parametrize("waits", [False, True])
def test_security_18_released_body_gets_no_memory(waits):
    async def work():
        async with uploads(100) as start:
            alice, bob = start("alice"), start("bob")
            await alice.send(*[100] * waits, None)
            await bob.send(*[40] * waits)
            bob.memory.release()  # its request ends while the client still sends
            alice.memory.release()
            assert await bob.send(40)
            assert bob.memory.size == 0

    run(work())


def test_security_18_waiting_bodies_cost_linear_time():
    async def calls(count):
        async with uploads(100 * count) as start:
            await start("alice").send(100 * count, None)
            counted = CountedCalls()
            with counted:
                bodies = [start("bob") for _ in range(count)]
                for body in bodies:
                    body.queue(1)
                await skippable_loop().askip(0)
                await skippable_loop().askip(WAIT_SECONDS + 1)
                assert all(body.rejected for body in bodies)
            return counted.number

    few, many = run(calls(100)), run(calls(400))
    assert many < 6 * few


def test_security_18_stalled_body_of_one_key_does_not_reject_others():
    limit = 200_000
    settings = {"keys": ApiKeys(["alice", "bob"]), "max_buffered_bytes": limit, "max_body_pause": 10 * HANG}
    with scripted_engine("Fine.") as engine, serving(engine, **settings) as server, server.http() as client:

        def post(key, size):
            body = HELLO | {"user": "x" * size}
            return client.post(CHAT, json=body, headers={"Authorization": f"Bearer {key}"}).status_code

        with socket.create_connection(("127.0.0.1", server.port), timeout=HANG) as stalled:
            headers = ["Host: localhost", "Authorization: Bearer alice", f"Content-Length: {limit}"]
            head = "\r\n".join([f"POST {CHAT} HTTP/1.1", *headers, "", ""])
            stalled.sendall(head.encode() + b" " * (limit - 1))
            for _ in range(10):
                server.loop.skip(0)  # all of it is received
            assert post("alice", 10_000) == 429
            assert post("bob", 60_000) == 200
            response = stalled.recv(65536)
            assert response.startswith(b"HTTP/1.1 429 ")
            assert json.loads(response.partition(b"\r\n\r\n")[2])["error"]["code"] == "queue_full"
        assert post("alice", 10_000) == 200
