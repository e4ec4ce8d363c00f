"""An hour of video at one frame per second: limits, memory of the media worker, and progress of the vision encoder."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path

import pytest

from dashinfer_vlm_core.config import EngineConfig, Limits
from dashinfer_vlm_core.errors import MediaTooLarge
from dashinfer_vlm_core.media_workers import MediaWorkerPool
from dashinfer_vlm_core.vision import VisionService
from tests.core.test_vision import MeanTower
from tests.media_pool import budget, run_with_pool, video
from tests.patches import clip
from tests.samples import encode_video
from tests.waiting import HANG

SECONDS = 3600
SIDE = 56
RESIZED = SECONDS * 84 * 84
"""Pixels of all resized frames."""

BYTES_PER_PIXEL = 9
"""Of a media worker: three for the resized frames, for their patches, and for those in the shared memory."""


def peak_bytes(pid):
    """Return the peak memory of a process so far; 0 if it has ended."""
    with contextlib.suppress(OSError, TypeError):
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])
    return 0


async def decode(executor, data):
    """Return the patches of a video, and the peak memory of the worker that decoded it."""
    assert isinstance(executor, MediaWorkerPool)
    part = video(fps=1.0, max_pixels=84 * 84, align=True)
    task = asyncio.create_task(executor.process(part, [data], budget(10**6)))
    peak = 0
    while not task.done():  # the worker of a large video ends with it, that of a small one becomes idle
        await asyncio.wait({task}, timeout=0.02)
        peak = max([peak, *(peak_bytes(worker.pid) for worker in (*executor._busy, *executor._shared.idle))])
    return task.result(), peak


def encode_seconds(seconds, side):
    return encode_video(seconds, fps=1, height=side, width=side, container="avi")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hour_is_decoded_in_stated_memory(tiny_checkpoint):
    longer = {"video_max_seconds": SECONDS, "video_max_frames": SECONDS, "video_total_pixels": RESIZED}
    run = {"media_workers": 1, "limits": Limits(video_decode_timeout=HANG), **longer}
    _, minute = run_with_pool(tiny_checkpoint, lambda pool: decode(pool, encode_seconds(60, SIDE)), **run)
    data = encode_seconds(SECONDS, SIDE)
    patches, hour = run_with_pool(tiny_checkpoint, lambda pool: decode(pool, data), **run)
    assert patches.times == tuple(map(float, range(SECONDS)))
    assert patches.grid.t == SECONDS // 2
    assert hour > minute > 0
    assert hour - minute < BYTES_PER_PIXEL * RESIZED + 4 * len(data) + 2**23


def test_pixels_of_a_file_count_after_resizing(tiny_checkpoint):
    data = encode_seconds(8, 168)
    frame = 84 * 84
    run = {"media_workers": 1, "limits": Limits(video_max_decoded_pixels=8 * frame)}
    patches, _ = run_with_pool(tiny_checkpoint, lambda pool: decode(pool, data), **run)
    assert patches.grid.t == 4
    run["limits"] = Limits(video_max_decoded_pixels=8 * frame - 1)
    with pytest.raises(MediaTooLarge, match=f"have {8 * frame} pixels in total"):
        run_with_pool(tiny_checkpoint, lambda pool: decode(pool, data), **run)


@pytest.mark.parametrize(("allowed", "expected"), [(60.0, 30.0), (600.0, 30.0), (3600.0, 180.0)])
def test_longer_videos_have_more_time(allowed, expected):
    assert EngineConfig(video_max_seconds=allowed).video_decode_seconds == expected


def test_progress_counts_pairs_until_it_is_canceled():
    """The vision encoder stops after the pass that was running."""

    async def scenario():
        tower = MeanTower()
        service = VisionService(tower, cache_bytes=1 << 24, batch_patches=16)
        reported = []
        hour = clip(0, SECONDS // 2)
        task = None

        def progress(done, total):
            reported.append((done, total))
            if done == 3:
                task.cancel()

        task = asyncio.create_task(service.embed([hour], progress=progress))
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert reported[:3] == [(done, SECONDS // 2) for done in (1, 2, 3)]
        await service.embed([clip(0, 2)], progress=progress)
        assert reported[-2:] == [(1, 2), (2, 2)]
        await service.close()
        assert len(tower.passes) < 20

    asyncio.run(scenario())
