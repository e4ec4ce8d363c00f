"""Rules 36 and 37: what a hostile file that has taken over a media worker can reach. No model runs."""

from __future__ import annotations

import asyncio
import functools

import pytest

from dashinfer_vlm_core.media_workers.pool import is_supported
from dashinfer_vlm_core.protocol.client import Client, current_client
from tests.media_pool import budget, run_with_pool, video
from tests.worker_readers import ActionReader

pytestmark = pytest.mark.skipif(not is_supported(), reason="worker processes need Linux")


@pytest.fixture
def run(tiny_checkpoint):
    return functools.partial(run_with_pool, tiny_checkpoint, readers=[ActionReader()])


async def decoded_before(pool, client):
    """Decode a file for a client; return how many files its worker decoded before."""
    current_client.set(Client(id=client))
    processed = await pool.process(video(min_pixels=784, max_pixels=784), [b"remember"], budget())
    return int(processed.item.pixels[0, 0]) - 1


def test_security_36_worker_serves_one_client(run):
    async def work(pool):
        files = [await decoded_before(pool, client) for client in "aabbaabcab"]
        assert len(pool._idle) == 2
        assert [worker.client for worker in pool._idle] == ["a", "b"]
        return files

    assert run(work, media_workers=2) == [0, 1, 0, 1, 2, 3, 2, 0, 0, 0]


def test_security_36_workers_of_concurrent_clients_are_separate(run):
    async def work(pool):
        clients = [client for client in "abcd" for _ in range(3)]
        await asyncio.gather(*(decoded_before(pool, client) for client in clients))
        assert len(pool._idle) <= 3
        return pool.stats.started

    assert run(work, media_workers=3) >= 4
