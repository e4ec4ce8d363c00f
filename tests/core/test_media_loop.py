"""Loading large media: the event loop's thread does no work on their bytes or pixels."""

from __future__ import annotations

import asyncio
import sys
import threading

import numpy as np
import pytest
from PIL import Image

from dashinfer_vlm_core.concurrency.loop import LoopThread
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.media import READERS
from dashinfer_vlm_core.models.qwen2_vl.image_processor import Qwen2VLImageProcessor
from dashinfer_vlm_core.models.spec import PixelSpec
from dashinfer_vlm_core.protocol import MediaPart
from tests.decoding_loader import DecodingLoader
from tests.samples import data_url, encode, encode_video, noise
from tests.waiting import HANG
from tests.web import body, serve

HEAVY = (
    "PIL",
    "av",
    "base64",
    "binascii",
    "_hashlib",
    "_sha2",
    "_sha256",
    "numpy",
    "dashinfer_vlm_core.models.patches",
    "dashinfer_vlm_core.models.qwen2_vl.image_processor",
)
"""Packages that decode, digest or resize."""

LARGE = 200_000
"""Bytes: methods of texts and buffers above this size copy or scan them."""


def image(url, index=0):
    return MediaPart(kind="image", path=f"messages[0].content[{index}]", url=url)


def video(url, index=0):
    return MediaPart(kind="video", path=f"messages[0].content[{index}]", url=url)


def photograph(seed):
    return encode(noise(400, 600, seed), "JPEG", quality=90)


@pytest.fixture(scope="module")
def large():
    """Return an image file of 1.3 MB, larger than one socket read."""
    return encode(noise(600, 700), "BMP")


def photographs(large):
    return [image(data_url(photograph(index), "image/jpeg"), index) for index in range(2)]


def the_same_large_one_twice(large):
    return [image(data_url(large, "image/bmp"), index) for index in range(2)]  # equal strings, but not the same object


def frames(large):
    return [video(tuple(data_url(encode(noise(240, 320, seed))) for seed in range(8)))]


def a_video(large):
    return [video(data_url(encode_video(30, height=240, width=320), "video/mp4"))]


def heavy(frame, event, argument):
    """Return the name of the called function if it works on media, otherwise None."""
    if event == "call":
        module = frame.f_globals.get("__name__", "")
        return f"{module}.{frame.f_code.co_name}" if _is_heavy(module) else None
    if event == "c_call":
        owner = getattr(argument, "__self__", None)
        module = getattr(argument, "__module__", None) or type(owner).__module__
        if _is_heavy(module) or (isinstance(owner, (str, bytes, bytearray)) and len(owner) > LARGE):
            return f"{module}.{argument.__qualname__}"
    return None


def _is_heavy(module):
    return any(module == name or module.startswith(f"{name}.") for name in HEAVY)


async def heavy_calls(work):
    """Return the heavy calls of the loop's thread while `work` runs."""
    found = []
    sys.setprofile(lambda *event: found.append(name) if (name := heavy(*event)) else None)  # of this thread only
    try:
        await work
    finally:
        sys.setprofile(None)
    return found


def load(parts):
    """Return the heavy calls of the loop's thread, and the threads that patchify the media."""
    config = EngineConfig(allow_private_addresses=True, image_max_bytes=30_000_000, image_fetch_timeout=HANG)
    processor, loop, threads = Qwen2VLImageProcessor(PixelSpec(), config), LoopThread("engine"), set()
    loader = DecodingLoader(config, READERS)

    def record_thread(media):
        threads.add(threading.current_thread().name)
        return processor.process(media)

    try:
        first = [image(data_url(encode(noise(9, 9))))]  # imports modules and starts threads
        loop.call(loader.load(first, then=processor.process))
        return loop.call(heavy_calls(loader.load(parts, then=record_thread))), threads
    finally:
        loop.stop(cleanup=loader.close())


@pytest.mark.parametrize("media", [photographs, the_same_large_one_twice, frames, a_video])
def test_media_are_decoded_off_event_loop(media, large):
    found, threads = load(media(large))
    assert found == []
    assert all(name.startswith("dashinfer-vlm-media") for name in threads)


def test_fetched_media_are_joined_and_decoded_off_event_loop(large):
    with serve({"/large": body(large)}) as web:
        found, threads = load([image(web.url("/large"))])
    assert found == []
    assert all(name.startswith("dashinfer-vlm-media") for name in threads)


@pytest.mark.parametrize(
    "work",
    [
        lambda: np.sort(np.random.default_rng(0).random(10)),
        lambda: Image.new("RGB", (9, 9)).resize((3, 3)),
        lambda: (" " * (LARGE + 1)).partition(","),
    ],
    ids=["numpy", "Pillow", "a large text"],
)
def test_heavy_calls_on_event_loop_are_detected(work):
    """Otherwise the tests above could not fail."""

    async def busy():
        await asyncio.sleep(0)
        work()

    loop = LoopThread("busy")
    assert loop.call(heavy_calls(busy()))
    loop.stop()
