"""Rule 32: no call decodes a whole data: URL, which would hold the interpreter lock."""

from __future__ import annotations

import base64
import random
import threading
import tracemalloc

import pytest

from dashinfer_vlm_core.concurrency.loop import LoopThread
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import MediaRefused, MediaUnreachable
from dashinfer_vlm_core.media import READERS
from dashinfer_vlm_core.media.loader import MediaLoader
from dashinfer_vlm_core.media.source import SLICE
from dashinfer_vlm_core.protocol import ChatRequest

DATA = random.Random(1).randbytes(12 * SLICE)
ENCODED = base64.b64encode(DATA).decode()

BOUNDED = {"find", "count"}
"""Methods that are called with the bounds of a slice."""


class CallRecorder:
    """Records the methods of large strings and bytes, and the calls of the base64 decoder, that other threads run."""

    def __init__(self):
        self.methods = set()
        self.decoder_calls = 0

    def __enter__(self):
        threading.setprofile(self._record)
        return self

    def __exit__(self, *error):
        threading.setprofile(None)

    def _record(self, frame, event, argument):
        if event == "c_call":
            owner, name = getattr(argument, "__self__", None), argument.__name__
            self.decoder_calls += name == "a2b_base64"
            if isinstance(owner, (str, bytes, bytearray)) and len(owner) > SLICE + 16 and name not in BOUNDED:
                self.methods.add(name)


def load(*urls, kind="video_url"):
    """Return the bytes of the parts, and the calls of the loading threads."""
    content = [{"type": kind, kind: {"url": url}} for url in urls]
    config = EngineConfig(limit_mm_per_prompt={"video": 4})
    request = ChatRequest.parse({"messages": [{"role": "user", "content": content}]})
    loaded = []

    async def process(part, data):
        loaded.append(data)

    with CallRecorder() as calls:
        loop = LoopThread("engine")
        loader = MediaLoader(config, READERS)
        try:
            loop.call(loader.load(request.media(), process))
        finally:
            loop.stop(cleanup=loader.close())
    return loaded, calls


@pytest.mark.parametrize(
    ("encoded", "methods"),
    [
        (ENCODED, set()),
        (base64.encodebytes(DATA).decode(), {"translate", "rstrip"}),
        (ENCODED.replace("+", "%2B").replace("/", "%2f"), {"replace", "translate", "rstrip"}),
    ],
    ids=["plain", "lines", "escapes"],
)
def test_security_32_large_data_url_is_decoded_in_slices(encoded, methods):
    loaded, calls = load(f"data:video/mp4;base64,{encoded}")
    assert loaded == [[DATA]]
    assert calls.methods == methods
    assert calls.decoder_calls >= len(encoded) // (2 * SLICE)


def test_security_32_equal_large_urls_are_decoded_once():
    url = f"data:video/mp4;base64,{ENCODED}"
    loaded, calls = load(url, f"{url[:9]}{url[9:]}")
    assert loaded == [[DATA], [DATA]]
    assert loaded[0][0] is loaded[1][0]
    assert calls.methods == set()


def test_security_32_data_url_is_decoded_without_copies():
    url = f"data:video/mp4;base64,{ENCODED}"
    tracemalloc.start()
    try:
        load(url)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.25 * len(DATA) + 8 * SLICE


@pytest.mark.parametrize("url", ["https://good.example/" + "a" * 2 * SLICE, "x" * 2 * SLICE, "file:" + "a/" * SLICE])
def test_security_32_other_long_url_is_rejected_at_once(url, tmp_path):
    config = EngineConfig(allowed_local_media_path=tmp_path)
    request = ChatRequest.parse(
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    )
    calls = CallRecorder()

    async def process(part, data):
        raise AssertionError

    with calls:
        loop = LoopThread("engine")
        loader = MediaLoader(config, READERS)
        try:
            with pytest.raises((MediaRefused, MediaUnreachable)):
                loop.call(loader.load(request.media(), process))
        finally:
            loop.stop(cleanup=loader.close())
    assert calls.methods == set()
