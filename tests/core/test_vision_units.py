"""VisionService and temporal patches of videos: a video that overlaps an earlier one encodes only what is new."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from dashinfer_vlm_core.concurrency.compute import THREAD_NAME
from dashinfer_vlm_core.embedding_store.client import EmbeddingStoreClient
from dashinfer_vlm_core.embedding_store.codec import EmbeddingCodec
from dashinfer_vlm_core.embedding_store.file_store import FileStore
from dashinfer_vlm_core.errors import EngineError
from dashinfer_vlm_core.media import Grid
from dashinfer_vlm_core.models.patches import with_digest
from dashinfer_vlm_core.vision import VisionService, units
from tests.core.test_vision import A, MeanTower, embed_in_background, mean_of, occupy, run
from tests.patches import clip
from tests.waiting import auntil

UNIT_BYTES = mean_of(A).nbytes


def encoded(tower):
    """Return the number of units of each pass."""
    return [len(batch) for batch in tower.passes]


async def check(service, *items, **options):
    for tokens, item in zip(await service.embed(items, **options), items, strict=True):
        assert torch.equal(tokens.embedding, mean_of(item))
        assert tokens.grid == item.grid


def test_digests_cover_content_and_grid():
    whole, part = clip(0, 6), clip(2, 5)
    assert part.units == whole.units[2:5]
    first = clip(0, 1)
    wide = with_digest(replace(first, grid=Grid(1, 2, 8)))
    image = with_digest(replace(first, kind="image", units=()))
    assert len({*whole.units, *wide.units, image.digest}) == 8
    items = [whole, part, clip(2, 6), first, wide, image]
    assert len({item.digest for item in items}) == len(items)
    assert image.units == ()


def test_temporal_patches_share_the_pixels():
    whole = clip(0, 3)
    units = whole.temporal_patches()
    assert [(unit.grid, unit.tokens, unit.digest, unit.units) for unit in units] == [
        (Grid(1, 4, 4), 4, digest, ()) for digest in whole.units
    ]
    assert all(np.shares_memory(unit.pixels, whole.pixels) for unit in units)
    np.testing.assert_array_equal(np.concatenate([unit.pixels for unit in units]), whole.pixels)


def test_units_are_joined_on_compute_thread(monkeypatch):
    """Otherwise OpenMP would start a second team of threads, which slows down every step."""
    parts = [torch.full((2, 3), float(index)) for index in range(3)]
    seen = []
    join = units._concatenate
    monkeypatch.setattr(units, "_concatenate", lambda each: seen.append(threading.current_thread().name) or join(each))
    assert torch.equal(units.concatenate(parts), torch.cat(parts))
    assert seen == [THREAD_NAME]


@pytest.mark.parametrize(("start", "stop", "new"), [(1, 7, 1), (4, 10, 4), (0, 6, 0), (2, 4, 0), (6, 12, 6)])
def test_only_new_units_of_a_shifted_window_are_encoded(start, stop, new):
    async def scenario(tower, service):
        await check(service, clip(0, 6))
        await check(service, clip(start, stop))
        assert encoded(tower) == [6] + [new] * (new > 0)
        assert (service.stats.encoded, service.stats.hits) == (6 + new, stop - start - new)
        assert service.stats.bytes == (6 + new) * UNIT_BYTES

    run(scenario, cache_bytes=12 * UNIT_BYTES, batch_patches=1000)


def test_units_share_passes_with_images_and_within_limits():
    async def scenario(tower, service):
        await check(service, A, clip(0, 5), clip(3, 7))
        assert encoded(tower) == [3, 3, 2]
        assert service.stats.joins == 2

    run(scenario, batch_patches=48)


def test_evicted_units_are_encoded_again():
    async def scenario(tower, service):
        await check(service, clip(0, 4))
        await check(service, clip(6, 8))  # evicts the first two
        await check(service, clip(0, 4))
        assert encoded(tower) == [4, 2, 2]
        assert service.stats.bytes == 4 * UNIT_BYTES

    run(scenario, cache_bytes=4 * UNIT_BYTES)


def test_video_larger_than_the_cache_evicts_nothing():
    async def scenario(tower, service):
        await check(service, A)
        await check(service, clip(0, 3))
        assert service.stats.bytes == UNIT_BYTES
        await check(service, A)
        assert encoded(tower) == [1, 3]

    run(scenario, cache_bytes=2 * UNIT_BYTES)


def test_salts_separate_units():
    async def scenario(tower, service):
        for salt in ("anna", "bert", "anna"):
            await check(service, clip(0, 3), cache_salt=salt)
        assert encoded(tower) == [3, 3]

    run(scenario)


def test_encoder_that_does_not_split_gets_whole_videos():
    async def scenario(tower, service):
        tower.splits_videos = False
        await check(service, clip(0, 3))
        await check(service, clip(1, 4))
        await check(service, clip(0, 3))
        assert tower.passes == [[clip(0, 3).digest], [clip(1, 4).digest]]
        assert (service.stats.encoded, service.stats.hits) == (2, 1)

    run(scenario)


def test_requests_in_progress_share_units_and_the_joined_video():
    async def scenario(tower, service):
        running = await occupy(tower, service, A)
        waiting = [await embed_in_background(service, clip(0, 3)) for _ in range(2)]
        waiting.append(await embed_in_background(service, clip(1, 4)))
        tower.gate.set()
        (first,), (second,), (third,) = await asyncio.gather(*waiting)
        await running
        assert encoded(tower) == [1, 4]
        assert first.embedding is second.embedding
        assert torch.equal(third.embedding[:8], first.embedding[4:])

    run(scenario, cache_bytes=0, batch_patches=1000)


def test_canceled_video_drops_only_units_that_no_other_request_needs():
    async def scenario(tower, service):
        running = await occupy(tower, service, A)
        canceled = await embed_in_background(service, clip(0, 3))
        kept = await embed_in_background(service, clip(2, 4))
        canceled.cancel()
        await asyncio.gather(canceled, return_exceptions=True)
        tower.gate.set()
        await asyncio.gather(running, kept)
        assert tower.passes[1:] == [list(clip(2, 4).units)]

    run(scenario)


def test_faulty_unit_fails_only_the_videos_that_contain_it(caplog):
    async def scenario(tower, service):
        tower.poison = {clip(0, 1).units[0]}
        running = await occupy(tower, service, A)
        waiting = [await embed_in_background(service, clip(start, 3)) for start in (0, 1)]
        tower.gate.set()
        failed, good, _ = await asyncio.gather(*waiting, running, return_exceptions=True)
        assert isinstance(failed, EngineError)
        assert torch.equal(good[0].embedding, mean_of(clip(1, 3)))

    run(scenario)


def test_video_is_found_without_pixels_while_all_units_are_cached():
    async def scenario(tower, service):
        (tokens,) = await service.embed([clip(0, 3)])
        found = await service.find(tokens)
        assert torch.equal(found.embedding, tokens.embedding)
        await service.embed([found])
        assert service.stats.hits == 3
        await check(service, clip(8, 11))
        assert await service.find(tokens) is None

    run(scenario, cache_bytes=4 * UNIT_BYTES)


def test_folder_store_has_units(tmp_path):
    async def scene():
        passes = []
        for start in (0, 2, 0):
            tower = MeanTower()
            store = FileStore(tmp_path, max_bytes=1 << 20, ttl=3600)
            client = EmbeddingStoreClient(store, EmbeddingCodec(mean_of(A)), model_key=b"model", timeout=60.0)
            service = VisionService(tower, cache_bytes=0, batch_patches=1000, store=client)
            await check(service, clip(start, start + 4))
            await auntil(lambda client=client: not client.stats.pending_bytes)
            await service.close()
            passes.append(encoded(tower))
        assert passes == [[4], [2], []]

    asyncio.run(scene())
