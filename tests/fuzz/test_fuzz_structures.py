"""Images and videos with a changed structure, from a data: URL to patches, in media workers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from PIL import Image

from dashinfer_vlm_core.config import Limits
from dashinfer_vlm_core.errors import InvalidParameter, MediaTooLarge, MediaUndecodable
from dashinfer_vlm_core.media_workers.fork_server import FORK_SERVER
from dashinfer_vlm_core.media_workers.pool import is_supported
from dashinfer_vlm_core.testing import scripted_engine
from tests.fuzz.conftest import resident_bytes
from tests.fuzz.structures import mutated_files, parse
from tests.samples import data_url, encode, encode_video, noise
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3 * 3600),
    pytest.mark.skipif(not is_supported(), reason="worker processes need Linux"),
]

SHARE = settings.default.max_examples
PART = "messages[0].content[0]"
WORKERS = 2
FILES_PER_WORKER = 3
"""A socket, the shared memory, and its mapping."""
DEADLINE = 0.5
GROWTH = 16 << 20
"""Bytes in 800 cases."""

SMALL = Image.fromarray(noise(24, 24))
EXIF = Image.Exif()
EXIF[0x0112] = 6
EXIF[0x010E] = "A description"
TWO = {"save_all": True, "append_images": [Image.fromarray(noise(24, 24, 1))]}
IMAGES = [
    parse(codec, encode(picture, codec, **options))
    for codec, picture, options in (
        ("JPEG", SMALL, {"exif": EXIF}),
        ("JPEG", SMALL, {"exif": EXIF, "progressive": True, "icc_profile": bytes(200), "comment": "x"}),
        ("JPEG", SMALL.convert("CMYK"), {}),
        ("PNG", SMALL, {"exif": EXIF}),
        ("PNG", SMALL.quantize(8), {"transparency": 1}),
        ("PNG", SMALL, TWO),
        ("WEBP", SMALL, {"exif": EXIF}),
        ("WEBP", SMALL, {"lossless": True, **TWO}),
        ("TIFF", SMALL, {}),
        *(("TIFF", SMALL, {"compression": name}) for name in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")),
        ("GIF", SMALL, TWO),
    )
]
VIDEOS = [
    parse(structure, encode_video(6, container=container))
    for structure, container in (("MP4", "mp4"), ("MP4", "mov"), ("EBML", "matroska"), ("EBML", "webm"))
]


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    limits = Limits(
        max_decoded_pixels=200_000,
        media_worker_memory_mib=512,
        image_decode_timeout=DEADLINE,
        video_decode_timeout=DEADLINE,
    )
    with scripted_engine(
        "Never asked.", model=str(tiny_checkpoint), media_workers=WORKERS, video_max_frames=16, limits=limits
    ) as engine:
        yield engine


@pytest.fixture
def resources(engine):
    """Check that no process or file descriptor remains."""
    engine.preview(request("image", encode(SMALL), "image/png"))
    before, others = open_files(), len(workers())
    yield
    until(lambda: len(workers()) < others + WORKERS)  # one was running before
    assert open_files() <= before + WORKERS * FILES_PER_WORKER
    assert engine.preview(request("image", encode(SMALL), "image/png")).items


def open_files():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def workers():
    server = FORK_SERVER._process.pid
    return Path(f"/proc/{server}/task/{server}/children").read_text().split()


def request(kind, file, media_type):
    part = {"type": f"{kind}_url", f"{kind}_url": {"url": data_url(file, media_type)}}
    return {"messages": [{"role": "user", "content": [part]}]}


def check_error(error):
    assert error.param.startswith(PART)
    assert len(error.message) < 300


def check(engine, kind, file, media_type):
    """Check that a file is previewed or rejected by its part; --hypothesis-show-statistics counts the outcomes."""
    try:
        preview = engine.preview(request(kind, file, media_type))
    except (MediaTooLarge, MediaUndecodable, InvalidParameter) as error:
        check_error(error)
        event(f"rejected: {error.message}")
    else:
        assert preview.items[0].tokens > 0
        event("processed")


@settings(max_examples=15 * SHARE)
@given(mutated_files(IMAGES))
def test_image_with_changed_structure_is_processed_or_rejected(resources, engine, file):
    check(engine, "image", file, "image/png")


@settings(max_examples=5 * SHARE)
@given(mutated_files(VIDEOS))
def test_video_with_changed_structure_is_processed_or_rejected(resources, engine, file):
    check(engine, "video", file, "video/mp4")


def test_memory_of_engine_does_not_grow(engine):
    """Files are drawn before they are sent: Hypothesis itself keeps about 10 kB per case until all have run."""
    files = []

    @settings(max_examples=40)
    @given(st.tuples(mutated_files(IMAGES), mutated_files(VIDEOS)))
    def collect(drawn):
        files.extend(zip(("image", "video"), drawn, strict=True))

    collect()

    def send_all():
        for kind, file in files:
            with suppress(MediaTooLarge, MediaUndecodable, InvalidParameter):
                engine.preview(request(kind, file, "image/png"))

    send_all()
    before = resident_bytes()
    for _ in range(4):
        send_all()
    assert resident_bytes() - before < GROWTH


@pytest.mark.parametrize(("kind", "files"), [("image", IMAGES), ("video", VIDEOS)])
def test_unchanged_structure_is_processed(tiny_checkpoint, kind, files):
    with scripted_engine("Never asked.", model=str(tiny_checkpoint)) as engine:
        for structure in files:
            assert engine.preview(request(kind, structure.write(structure.nodes), "image/png")).items
