"""VisionService with a small tower that is slow on demand but real: it reads pixels and returns tensors."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from dashinfer_vlm_core.errors import EngineClosed, EngineError
from dashinfer_vlm_core.protocol.client import Client, current_client
from dashinfer_vlm_core.vision import VisionService
from tests.patches import random_patches
from tests.waiting import HANG

WIDTH = 4
A, B, C, D, E = (random_patches(1, 4, 4, seed=seed) for seed in range(5))
TOKENS = 4
ITEM_BYTES = TOKENS * WIDTH * 4


class MeanTower:
    """A tower whose visual tokens are the mean of their four patches. A pass waits while the gate is closed.

    Attributes:
        passes: the digests of every pass, in order.
        poison: digests that make a pass fail.
        short: digests that get one row too few.
    """

    splits_videos = True

    def __init__(self):
        self.passes = []
        self.poison = set()
        self.short = set()
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)
        self.threads = set()

    def encode(self, batch):
        self.passes.append([item.digest for item in batch])
        self.threads.add(threading.current_thread())
        self.started.release()
        assert self.gate.wait(timeout=HANG)
        if any(item.digest in self.poison for item in batch):
            raise RuntimeError("this encoder rejects the item")
        return [mean_of(item)[item.digest in self.short :] for item in batch]

    def adopt(self, rows):
        self.threads.add(threading.current_thread())
        return torch.from_numpy(rows)


def mean_of(item):
    means = torch.tensor(item.pixels).float().view(item.tokens, -1).mean(dim=1)
    return means[:, None].expand(item.tokens, WIDTH).contiguous()


def run(scenario, *, cache_bytes=10 * ITEM_BYTES, batch_patches=64):
    """Run `scenario(tower, service)` on a new event loop; fail if the loop is blocked or tasks remain."""

    async def scene():
        tower = MeanTower()
        service = VisionService(tower, cache_bytes=cache_bytes, batch_patches=batch_patches)
        try:
            await asyncio.wait_for(scenario(tower, service), timeout=HANG)
        finally:
            tower.gate.set()
            await service.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scene())


async def wait_for_pass(tower):
    """Wait until the next pass has started."""
    await asyncio.to_thread(tower.started.acquire)


async def occupy(tower, service, item):
    """Close the gate during a pass over `item`, so that new requests have to wait."""
    tower.gate.clear()
    task = asyncio.create_task(service.embed([item]))
    await wait_for_pass(tower)
    return task


async def embed_in_background(service, *items):
    """Start a request and wait until it is queued."""
    task = asyncio.create_task(service.embed(items))
    await asyncio.sleep(0)
    return task


def digests(*items):
    return [item.digest for item in items]


def test_embeds_each_item_in_order():
    async def scenario(tower, service):
        tokens = await service.embed([B, A])

        assert [item.digest for item in tokens] == digests(B, A)
        assert [item.grid for item in tokens] == [B.grid, A.grid]
        assert torch.equal(tokens[0].embedding, mean_of(B))
        assert torch.equal(tokens[1].embedding, mean_of(A))
        assert await service.embed([]) == ()

    run(scenario)


def test_cached_content_is_not_encoded_again():
    async def scenario(tower, service):
        (first,) = await service.embed([A])
        (again,) = await service.embed([random_patches(1, 4, 4, seed=0, part="messages[7].content[1]")])

        assert again.embedding is first.embedding
        assert len(tower.passes) == 1
        stats = service.stats
        assert (stats.passes, stats.encoded, stats.hits, stats.joins, stats.bytes) == (1, 1, 1, 0, ITEM_BYTES)

    run(scenario)


def test_cache_evicts_least_recently_used_beyond_its_size():
    async def scenario(tower, service):
        await service.embed([A, B])
        await service.embed([A])  # B is now the least recently used
        await service.embed([C])
        assert service.stats.bytes == 2 * ITEM_BYTES

        await service.embed([A, C])
        assert len(tower.passes) == 2
        await service.embed([B])
        assert tower.passes[2:] == [digests(B)]

    run(scenario, cache_bytes=2 * ITEM_BYTES)


@pytest.mark.parametrize("cache_bytes", [0, ITEM_BYTES - 1])
def test_item_larger_than_cache_is_not_cached(cache_bytes):
    async def scenario(tower, service):
        await service.embed([A])
        await service.embed([A])

        assert len(tower.passes) == 2
        assert service.stats.bytes == 0

    run(scenario, cache_bytes=cache_bytes)


def test_item_larger_than_cache_evicts_nothing():
    async def scenario(tower, service):
        big = random_patches(1, 4, 8)
        await service.embed([A])
        await service.embed([big])
        await service.embed([A])

        assert tower.passes == [digests(A), digests(big)]

    run(scenario, cache_bytes=ITEM_BYTES)


def test_duplicate_content_in_request_is_encoded_once():
    async def scenario(tower, service):
        tokens = await service.embed([A, B, A])

        assert tower.passes == [digests(A, B)]
        assert tokens[0].embedding is tokens[2].embedding
        assert service.stats.joins == 1

    run(scenario)


def test_concurrent_requests_encode_content_once():
    async def scenario(tower, service):
        tower.gate.clear()
        requests = [await embed_in_background(service, A) for _ in range(5)]
        await wait_for_pass(tower)
        requests += [await embed_in_background(service, A) for _ in range(5)]  # joins a running pass
        tower.gate.set()
        answers = await asyncio.gather(*requests)

        assert tower.passes == [digests(A)]
        assert all(torch.equal(tokens.embedding, mean_of(A)) for (tokens,) in answers)
        assert service.stats.joins == 9

    run(scenario, cache_bytes=0)


def test_waiting_requests_share_next_pass():
    async def scenario(tower, service):
        first = await occupy(tower, service, A)
        others = [await embed_in_background(service, item) for item in (B, C, D)]
        tower.gate.set()
        answers = await asyncio.gather(first, *others)

        assert tower.passes == [digests(A), digests(B, C, D)]
        assert [tokens.digest for (tokens,) in answers] == digests(A, B, C, D)

    run(scenario)


def test_pass_holds_at_most_batch_patches():
    async def scenario(tower, service):
        await service.embed([A, B, C, D])

        assert tower.passes == [digests(A, B), digests(C, D)]

    run(scenario, batch_patches=47)


def test_clients_take_turns():
    async def scenario(tower, service):
        first = await occupy(tower, service, A)
        large = await embed_in_background(service, B, C, D)
        current_client.set(Client(id="other"))
        small = await embed_in_background(service, E)
        tower.gate.set()
        await asyncio.gather(first, large, small)

        assert tower.passes == [digests(A), digests(B, E), digests(C, D)]

    run(scenario, batch_patches=32)


def test_item_larger_than_pass_is_encoded_alone_in_order():
    async def scenario(tower, service):
        big = random_patches(1, 8, 8)
        await service.embed([A, big, B, C])

        assert tower.passes == [digests(A), digests(big), digests(B, C)]

    run(scenario, batch_patches=32)


def test_tower_runs_in_one_thread_outside_event_loop():
    async def scenario(tower, service):
        request = await occupy(tower, service, A)  # the loop continues while the tower is blocked
        tower.gate.set()
        await request
        await service.embed([B])

        assert len(tower.threads) == 1
        assert threading.current_thread() not in tower.threads

    run(scenario)


async def cancel(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_canceled_caller_does_not_cancel_shared_encoding():
    async def scenario(tower, service):
        impatient = await occupy(tower, service, A)
        patient = await embed_in_background(service, A)
        await cancel(impatient)
        tower.gate.set()
        (tokens,) = await patient

        assert torch.equal(tokens.embedding, mean_of(A))
        assert tower.passes == [digests(A)]

    run(scenario)


def test_abandoned_work_is_dropped_before_it_starts():
    async def scenario(tower, service):
        running = await occupy(tower, service, A)
        leaving, staying = await embed_in_background(service, B, C), await embed_in_background(service, C)
        await cancel(leaving)
        tower.gate.set()
        await asyncio.gather(running, staying)

        assert tower.passes == [digests(A), digests(C)]
        await service.embed([B])  # dropped work can be requested again
        assert tower.passes[2:] == [digests(B)]

    run(scenario)


def test_running_work_is_finished_and_cached():
    async def scenario(tower, service):
        await cancel(await occupy(tower, service, A))
        tower.gate.set()
        await service.embed([A])

        assert tower.passes == [digests(A)]

    run(scenario)


def test_failing_item_fails_only_its_requests():
    async def scenario(tower, service):
        tower.poison = {B.digest}
        running = await occupy(tower, service, D)
        good, bad, both = (
            await embed_in_background(service, A),
            await embed_in_background(service, B),
            await embed_in_background(service, C, B),
        )
        tower.gate.set()
        outcomes = await asyncio.gather(running, good, bad, both, return_exceptions=True)

        assert tower.passes == [digests(D), digests(A, B, C), digests(A), digests(B), digests(C)]
        assert torch.equal(outcomes[1][0].embedding, mean_of(A))
        assert isinstance(outcomes[2], EngineError)
        assert isinstance(outcomes[3], EngineError)

    run(scenario)


def test_failure_names_part_hides_cause_and_is_not_cached(caplog):
    async def scenario(tower, service):
        tower.poison = {A.digest}
        with pytest.raises(EngineError) as error:
            await service.embed([random_patches(1, 4, 4, seed=0, part="messages[3].content[2]")])

        assert error.value.param == "messages[3].content[2]"
        assert error.value.retryable
        assert "rejects the item" not in error.value.message
        assert "rejects the item" in caplog.text  # the operator's log has the cause
        tower.poison = set()
        (tokens,) = await service.embed([A])
        assert torch.equal(tokens.embedding, mean_of(A))

    run(scenario)


def test_tower_with_too_few_rows_is_an_error(caplog):
    async def scenario(tower, service):
        tower.short = {A.digest}
        outcomes = await asyncio.gather(service.embed([A]), service.embed([B]), return_exceptions=True)

        assert isinstance(outcomes[0], EngineError)
        assert torch.equal(outcomes[1][0].embedding, mean_of(B))
        assert "[3] visual tokens instead of [4]" in caplog.text

    run(scenario)


def test_models_have_separate_cache_keys():
    """The same content has another key for another model, so that models can share a cache."""

    async def scene():
        services = [
            VisionService(MeanTower(), model_key=key, cache_bytes=ITEM_BYTES, batch_patches=64)
            for key in (b"one", b"two")
        ]
        for service in services:
            await service.embed([A])
        keys = [set(service._cache) for service in services]
        for service in services:
            await service.close()
        assert not keys[0] & keys[1]

    asyncio.run(scene())


def test_close_fails_waiting_and_ends_running_work():
    async def scenario(tower, service):
        running = await occupy(tower, service, A)
        waiting = await embed_in_background(service, B)
        closing = asyncio.create_task(service.close())
        with pytest.raises(EngineClosed):
            await waiting
        tower.gate.set()
        await closing

        assert len(await running) == 1
        assert tower.passes == [digests(A)]
        assert service.stats.bytes == 0
        assert not any(thread.is_alive() for thread in tower.threads)

    run(scenario)


def test_closed_service_rejects_requests():
    async def scenario(tower, service):
        await service.close()
        with pytest.raises(EngineClosed):
            await service.embed([A])

    run(scenario)
