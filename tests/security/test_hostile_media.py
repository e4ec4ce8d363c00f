"""Rules 23 to 25 and 31: files that cost a decoder gigabytes, minutes or a full disk. No model runs."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import io
import resource
import threading
import warnings
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.hostile_media import HOSTILE, damaged_tiff, exif_jpeg, laced_matroska, progressive_jpeg, segment
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import MediaTooLarge, MediaUndecodable
from dashinfer_vlm_core.media import READERS
from dashinfer_vlm_core.media.image import MAX_JPEG_SCANS, MAX_JPEG_SEGMENTS, count_pixels, decode_image
from dashinfer_vlm_core.media.loader import MediaLoader
from dashinfer_vlm_core.media_workers import worker
from dashinfer_vlm_core.media_workers.pool import is_supported
from dashinfer_vlm_core.protocol import MediaPart
from dashinfer_vlm_core.protocol.client import Client, current_client
from dashinfer_vlm_core.testing import scripted_engine
from tests.samples import data_url, encode, image_url, noise
from tests.security.conftest import image, video
from tests.waiting import HANG, auntil, until

PART = "messages[0].content[0]"
MAX_GROWTH = 200 << 20
MAX_WORKER_MEMORY = 300 << 20
MAX_LOGS = 10
MAX_THREAD_MEMORY = 6 << 30

needs_workers = pytest.mark.skipif(not is_supported(), reason="worker processes need Linux")


def request(part):
    return {"messages": [{"role": "user", "content": [part]}]}


def part_of(file):
    return {"image": image, "video": video}[file.kind](data_url(file.build(), file.media_type))


def files(*rules):
    found = {name: file for name, file in HOSTILE.items() if file.rule in rules}
    return pytest.mark.parametrize("file", found.values(), ids=found)


def peak_memory():
    """Return the peak of the resident memory since the last call in bytes."""
    peak = peak_memory_of("self")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    return peak


def peak_memory_of(process):
    status = Path(f"/proc/{process}/status").read_text()
    return next(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


@contextlib.contextmanager
def limited_memory():
    """Limit the address space of this process, so that a test that fails does not take the whole machine's memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_THREAD_MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    """An engine with a short deadline for videos. Images keep theirs: a normal one follows each attack."""
    with (
        limited_memory(),
        scripted_engine(
            "Fine.", model=str(tiny_checkpoint), limits={"video_decode_timeout": 0.5}, media_workers=2
        ) as engine,
    ):
        yield engine


@pytest.fixture(scope="module")
def patient_engine(tiny_checkpoint):
    """An engine whose deadline does not end a decoder that is slow because the machine is."""
    patience = {"image_decode_timeout": HANG, "video_decode_timeout": HANG}
    with scripted_engine("Fine.", model=str(tiny_checkpoint), media_workers=1, limits=patience) as engine:
        yield engine


@pytest.fixture(scope="module")
def thread_engine(tiny_checkpoint):
    with scripted_engine("Fine.", model=str(tiny_checkpoint), media_workers=0) as engine:
        yield engine


def rejection(engine, part):
    """Send a part that is rejected by name, and a normal image after it. Return the error's message."""
    with pytest.raises((MediaTooLarge, MediaUndecodable)) as caught:
        engine.preview(request(part))
    assert caught.value.param == PART
    assert engine.preview(request(image(image_url()))).items
    return caught.value.message


@needs_workers
@files(23)
def test_security_23_sample_tables_take_no_memory(engine, file):
    engine.preview(request(image(image_url())))
    before = peak_memory()
    rejection(engine, part_of(file))
    assert peak_memory() - before < MAX_GROWTH


@needs_workers
@files(23)
def test_security_23_worker_opens_file_in_little_memory(patient_engine, file, monkeypatch):
    monkeypatch.setattr(worker, "PATIENCE_SECONDS", HANG)  # otherwise, a slow job ends its worker
    rejection(patient_engine, part_of(file))
    (idle,) = patient_engine._running.pipeline.inputs.media_executor._shared.idle
    assert peak_memory_of(idle.pid) < MAX_WORKER_MEMORY


@needs_workers
def test_security_23_video_that_crashes_decoder_without_memory_is_rejected(patient_engine):
    file = laced_matroska(15_000_000, packet_bytes=2)
    rejection(patient_engine, video(data_url(file, "video/x-matroska")))


@needs_workers
@files(25)
def test_security_25_deadline_covers_opening_a_video(engine, file):
    assert "takes more than 0.5 seconds" in rejection(engine, part_of(file))


@files(24)
def test_security_24_slow_jpeg_is_rejected_before_decoding(thread_engine, file):
    assert rejection(thread_engine, part_of(file)).startswith("The JPEG file has more than ")


@files(24)
def test_security_24_slow_jpeg_in_a_list_of_frames_is_rejected(file):
    with pytest.raises(MediaTooLarge):
        count_pixels(file.build(), path=PART, max_pixels=64_000_000)


@needs_workers
def test_security_24_image_has_a_deadline(tiny_checkpoint):
    """A list of frames follows, which has the deadline of a video."""
    slow = data_url(progressive_jpeg(MAX_JPEG_SCANS - 1), "image/jpeg")
    with scripted_engine("Fine.", model=str(tiny_checkpoint), limits={"image_decode_timeout": 0.2}) as engine:
        with pytest.raises(MediaTooLarge, match=r"takes more than 0\.2 seconds") as caught:
            engine.preview(request(image(slow)))
        assert caught.value.param == PART
        assert engine.preview(request(video([image_url(), image_url()]))).items


@needs_workers
def test_security_24_client_cannot_occupy_all_workers(tiny_checkpoint):
    slow = request(video(data_url(laced_matroska(10**8), "video/x-matroska")))
    normal = request(image(image_url()))
    with scripted_engine(
        "Fine.",
        model=str(tiny_checkpoint),
        limits={"video_decode_timeout": HANG, "image_decode_timeout": HANG},
        media_workers=2,
    ) as engine:
        attacks = [as_client("attacker", engine.submit, slow) for _ in range(3)]
        pool = engine._running.pipeline.inputs.media_executor
        until(lambda: "attacker" in pool._shared.slots._waiting)
        try:
            assert as_client("user", engine.preview, normal).items
            assert not any(attack.done() for attack in attacks)
        finally:
            for attack in attacks:
                attack.cancel()


def test_security_24_large_media_of_a_client_do_not_delay_others(monkeypatch):
    """More threads decode base64 than one client can occupy. The attacker's do not end before the user's image."""
    is_loaded = threading.Event()

    def decode(source):
        assert len(source.url) < 100 or is_loaded.wait(HANG)
        return b""

    async def process(part, data):
        return part.path

    def load(client, *urls):
        parts = [MediaPart(kind="image", path=f"{client}[{i}]", url=url) for i, url in enumerate(urls)]
        return as_client(client, asyncio.create_task, loader.load(parts, process))

    async def work():
        attacks = [load("attacker", *(data_url(bytes(1000 + i)) for i in range(16))) for _ in range(4)]
        await auntil(lambda: loader._slots.waiting > 16)
        try:
            assert await asyncio.wait_for(load("user", data_url(b"small")), HANG) == ("user[0]",)
        finally:
            is_loaded.set()
        assert len(await asyncio.gather(*attacks)) == 4
        await loader.close()

    monkeypatch.setattr("dashinfer_vlm_core.media.loader.decode", decode)
    loader = MediaLoader(EngineConfig(limit_mm_per_prompt={"image": 16}), READERS)
    asyncio.run(work())


def as_client(name, function, *arguments):
    context = contextvars.copy_context()
    context.run(current_client.set, Client(id=name))
    return context.run(function, *arguments)


def test_security_24_scans_and_segments_below_the_limits_are_decoded():
    tables = 4  # segments in addition to metadata
    for file in (progressive_jpeg(MAX_JPEG_SCANS - 1, side=64), exif_jpeg(MAX_JPEG_SEGMENTS - tables)):
        assert decode_image(file, path=PART, max_pixels=10**6, background=(0, 0, 0)).size == (64, 64)


def test_security_24_scan_marker_in_metadata_does_not_end_check():
    hidden = segment(0xFE, b"\xff\xda") + exif_jpeg(MAX_JPEG_SEGMENTS)[2:]
    with pytest.raises(MediaTooLarge, match="segments"):
        count_pixels(b"\xff\xd8" + hidden, path=PART, max_pixels=10**6)


def test_security_24_real_jpegs_are_not_rejected():
    """With the largest color profile, a thumbnail, comments, and another file after the end."""
    picture = Image.fromarray(noise(40, 60))
    exif = b"Exif\0\0" + bytes(20_000) + encode(noise(20, 30), "JPEG", progressive=True)
    for options in ({}, {"progressive": True}, {"icc_profile": bytes(65_519 * 255)}, {"exif": exif, "comment": "x"}):
        data = encode(picture, "JPEG", quality=95, **options) + encode(noise(300, 300), "JPEG")
        assert decode_image(data, path=PART, max_pixels=10**6, background=(0, 0, 0)).size == (60, 40)


def damaged_exif(codec):
    """Return an image whose EXIF metadata have damaged tags."""
    buffer = io.BytesIO()
    Image.fromarray(noise(20, 30)).save(buffer, codec, exif=b"Exif\0\0" + damaged_tiff(1000))
    return buffer.getvalue()


FLOODS = {
    **{name: file.build for name, file in HOSTILE.items() if file.rule == 31},
    **{f"EXIF in a {codec}": lambda codec=codec: damaged_exif(codec) for codec in ("JPEG", "PNG", "WEBP")},
}


@pytest.mark.parametrize("build", FLOODS.values(), ids=FLOODS)
def test_security_31_warnings_of_threads_are_bounded(thread_engine, build):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert thread_engine.preview(request(image(data_url(build())))).items
    assert len(caught) <= MAX_LOGS


@needs_workers
@pytest.mark.parametrize("build", FLOODS.values(), ids=FLOODS)
def test_security_31_log_records_of_workers_are_bounded(patient_engine, caplog, build):
    assert patient_engine.preview(request(image(data_url(build())))).items
    assert len(caplog.records) <= MAX_LOGS


def test_security_31_warnings_of_other_modules_are_kept(thread_engine):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread_engine.preview(request(image(image_url())))
        warnings.warn("This is not Pillow's.", stacklevel=1)
    assert len(caught) == 1
