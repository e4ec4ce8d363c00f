"""The event loop while large media are loaded: what it executes itself between two ticks, not what others do."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from PIL import Image

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.loop import LoopThread
from dashinfer_vlm_core.media import READERS, MediaLoader
from dashinfer_vlm_core.model import PixelSpec
from dashinfer_vlm_core.patches import Patcher
from dashinfer_vlm_core.schema import MediaPart
from tests.samples import data_url, encode, movie, noise
from tests.web import body, serve

MOST = 0.020
TRIES = 3
"""What blocks the loop does so each time; what the machine takes from a core meanwhile counts as its time only once."""


def image(url, index=0):
    return MediaPart(kind="image", part=f"messages[0].content[{index}]", url=url)


def video(url, index=0):
    return MediaPart(kind="video", part=f"messages[0].content[{index}]", url=url)


def photograph(seed):
    """A JPEG of 12 megapixels."""
    small = Image.fromarray(noise(150, 200, seed))
    return encode(small.resize((4000, 3000), Image.Resampling.BICUBIC), "JPEG", quality=90)


@pytest.fixture(scope="module")
def large():
    """A picture file of 20 MB."""
    data = encode(noise(2500, 2600), "BMP")
    assert len(data) > 19_000_000
    return data


def photographs(large):
    return [image(data_url(photograph(index), "image/jpeg"), index) for index in range(2)]


def the_same_large_one_twice(large):
    return [image(data_url(large, "image/bmp"), index) for index in range(2)]  # equal texts, but not one object


def frames(large):
    return [video(tuple(data_url(encode(noise(240, 320, seed))) for seed in range(64)))]


def a_film(large):
    return [video(data_url(movie(30, height=240, width=320), "video/mp4"))]


async def longest_step(work):
    """The most processor time, in seconds, that this thread spent between two ticks while `work` ran."""
    longest, running = 0.0, asyncio.ensure_future(work)
    while not running.done():
        started = time.thread_time()  # a thread that has to wait for a core spends none
        await asyncio.sleep(0.001)
        longest = max(longest, time.thread_time() - started)
    await running
    return longest


def measure(parts):
    config = EngineConfig(allow_private_addresses=True, image_max_bytes=30_000_000, image_fetch_timeout=60.0)
    patcher, loop = Patcher(PixelSpec(), config), LoopThread("engine")
    loader = MediaLoader(config, READERS)
    try:
        loop.call(loader.load([image(data_url(encode(noise(9, 9))))], then=patcher.cut))  # imports, and starts threads
        return loop.call(longest_step(loader.load(parts, then=patcher.cut)))
    finally:
        loop.stop(last=loader.close())


@pytest.mark.parametrize("media", [photographs, the_same_large_one_twice, frames, a_film])
def test_the_loop_goes_on_while_media_are_decoded(media, large):
    parts = media(large)
    assert any(measure(parts) < MOST for _ in range(TRIES))


def test_the_loop_goes_on_while_media_are_fetched(large):
    with serve({"/large": body(large)}) as web:
        assert any(measure([image(web.url("/large"))]) < MOST for _ in range(TRIES))


def test_a_loop_that_is_blocked_is_noticed():
    """Else the tests above could not fail."""

    async def busy():
        await asyncio.sleep(0.005)
        np.sort(np.random.default_rng(0).random(1_000_000))

    loop = LoopThread("busy")
    assert all(loop.call(longest_step(busy())) > MOST for _ in range(TRIES))
    loop.stop()
