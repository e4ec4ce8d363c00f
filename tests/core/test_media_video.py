"""Video frames: which ones are sampled, how they are processed, and files that pretend to be videos."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import InvalidParameter, MediaTooLarge, MediaUndecodable
from dashinfer_vlm_core.media import READERS, PyAVReader
from dashinfer_vlm_core.media.decoder import MediaDecoder
from dashinfer_vlm_core.media.frame_sampling import VideoSamplingPolicy
from dashinfer_vlm_core.media.types import VideoInfo, VideoReader
from dashinfer_vlm_core.media.video import (
    FrameTimes,
    frame_count,
    of_one_size,
    select_readers,
    stack_frames,
)
from dashinfer_vlm_core.protocol import MediaPart
from tests.cases import cases
from tests.samples import encode_video, noise, video_frame
from tests.web import body, serve

POLICY = VideoSamplingPolicy()
PART = "messages[0].content[0]"
ONE = 1 << 16
CONTAINERS = ["mp4", "mov", "matroska", "webm", "avi", "mpegts"]


def video(**options):
    return MediaPart(kind="video", path=PART, url="data:", **options)


def decode(data, readers=READERS, config=None, resizer=None, **options):
    config = config or EngineConfig()
    decoder = MediaDecoder(config=config, readers=readers, policy=POLICY.with_config(config))
    return decoder.decode(video(**options), [data], go_on, resizer)


def go_on():
    """Never stop decoding."""


def with_display_matrix(data, matrix):
    """Return the MP4 file with another display matrix in its track header."""
    start = data.index(b"tkhd") + 4 + 4 + 5 * 4 + 8 + 8
    return data[:start] + struct.pack(">9i", *matrix) + data[start + 36 :]


class HeaderOnlyReader(VideoReader):
    """A reader of videos that consist of a header only; it records the requested frames."""

    name, priority = "film", 1

    def __init__(self, **info):
        self.info = VideoInfo(**{"frames": 100, "fps": 10.0, "width": 4, "height": 4} | info)
        self.requested = None

    def available(self):
        return True

    def open(self, data):
        return self

    def frames(self, indices, check_stop):
        self.requested = indices
        return np.zeros((len(indices), self.info.height, self.info.width, 3), np.uint8)


ANY = encode_video(1)


def test_default_rate_and_limits_come_from_configuration():
    config = EngineConfig(video_fps=1.0, video_max_frames=20)
    policy = VideoSamplingPolicy(min_frames=6).with_config(config)
    counts = [frame_count(total, 10.0, part=video(), policy=policy) for total in (30, 100, 1000, 5)]
    assert counts == [6, 10, 20, 4]


def test_request_cannot_raise_frame_limit():
    config = EngineConfig(video_max_frames=8)
    assert frame_count(1000, 10.0, part=video(fps=10.0), policy=POLICY.with_config(config)) == 8
    with pytest.raises(InvalidParameter) as caught:
        frame_count(1000, 10.0, part=video(num_frames=10), policy=POLICY.with_config(config))
    assert caught.value.param == f"{PART}.video_url.num_frames"


@cases(("requested", "count"), [(2, 2), (3, 4), (4, 4), (5, 4), (6, 6), (7, 8), (100, 100)])
def test_number_of_frames_is_rounded_to_even(requested, count):
    assert frame_count(100, 10.0, part=video(num_frames=requested), policy=POLICY) == count


@pytest.mark.parametrize("requested", [1, 102, 1000])
def test_more_frames_than_the_file_has_are_rejected(requested):
    with pytest.raises(InvalidParameter) as caught:
        frame_count(100, 10.0, part=video(num_frames=requested), policy=POLICY)
    assert caught.value.param == f"{PART}.video_url.num_frames"


@cases(
    ("info", "fps", "indices"),
    [
        ({"frames": 9, "fps": 4.0}, None, [0, 2, 4, 6, 8]),
        ({"frames": 10, "fps": 4.0}, None, [0, 2, 4, 6, 8]),
        ({"frames": 11, "fps": 4.0}, None, [0, 2, 4, 6, 8, 10]),
        ({"frames": 12, "fps": 3.0}, 2, [0, 2, 3, 5, 6, 8, 9, 11]),
        ({"frames": 5, "fps": 1.0}, 30, [0, 1, 2, 3, 4]),  # a file has no more frames than it has
        ({"frames": 61, "fps": 29.97}, 1, [0, 30, 60]),
        ({"frames": 1, "fps": 25.0}, None, [0]),
    ],
)
def test_aligned_frames_are_those_at_multiples_of_the_rate(info, fps, indices):
    reader = HeaderOnlyReader(**info)
    found = decode(ANY, [reader], align=True, fps=fps)
    assert reader.requested == indices
    assert found.times == tuple(index / info["fps"] for index in indices)
    assert (found.sampled_fps, found.align) == (min(fps or 2.0, info["fps"]), True)


@cases("rate", [1.0, 12.5, 23.976, 30.0, 59.94])
@cases("fps", [0.5, 2.0, 3.0, 7.0])
def test_aligned_frames_of_a_longer_file_begin_with_the_same(rate, fps):
    step = max(rate / fps, 1.0)
    longest = POLICY.aligned_indices(2000, step)
    assert longest == sorted(set(longest))
    for total in [*range(1, 70), 999, 1000, 1999]:
        assert POLICY.aligned_indices(total, step) == [index for index in longest if index < total]


def test_too_many_aligned_frames_are_rejected():
    config = EngineConfig(video_max_frames=8)
    assert len(decode(ANY, [HeaderOnlyReader(frames=40)], config, align=True).frames) == 8
    with pytest.raises(
        InvalidParameter, match="has 9 frames at 2 frames per second, more than the limit of 8"
    ) as caught:
        decode(ANY, [HeaderOnlyReader(frames=41)], config, align=True)
    assert caught.value.param == f"{PART}.video_url.align"


def test_single_frame_file_gives_that_frame():
    assert decode(encode_video(1)).frames.shape == (1, 48, 64, 3)


@cases("container", CONTAINERS)
def test_requested_frames_are_returned(container):
    data = encode_video(30, container=container)
    by_pyav = PyAVReader().open(data)
    assert (by_pyav.info.frames, by_pyav.info.fps, by_pyav.info.width, by_pyav.info.height) == (30, 10.0, 64, 48)
    every = np.stack(list(by_pyav.frames(list(range(30)), go_on)))
    for indices in ([0], [29], [3, 4, 5], [0, 7, 22, 29]):
        frames = np.stack(list(by_pyav.frames(indices, go_on)))
        assert frames.dtype == np.uint8
        np.testing.assert_array_equal(frames, every[indices])


DEFAULT_DURATION = b"\x23\xe3\x83\x84"
"""Of a frame, in Matroska: the identifier of the element and its size, before the nanoseconds."""


@cases("element", [DEFAULT_DURATION + struct.pack(">I", 1_000_000), b"\xec\x86" + bytes(6)])
def test_rate_of_a_file_with_a_wrong_or_no_rate_is_that_of_its_frames(element):
    data = encode_video(30, container="matroska")
    given = DEFAULT_DURATION + struct.pack(">I", 100_000_000)
    assert data.count(given) == 1
    assert PyAVReader().open(data.replace(given, element)).info == PyAVReader().open(data).info


@cases("container", CONTAINERS)
def test_decoded_frames_equal_encoded_frames(container):
    sampled = decode(encode_video(30, container=container), num_frames=4)
    for frame, index in zip(sampled.frames, [0, 10, 19, 29], strict=True):
        difference = np.abs(frame.astype(int) - video_frame(index, 48, 64))
        assert np.median(difference) < 12, "H.264 and its colours lose a little, the next frames differ by more"


@pytest.mark.parametrize(
    ("matrix", "turns"),
    [
        ((ONE, 0, 0, 0, ONE, 0, 0, 0, 1 << 30), 0),
        ((0, ONE, 0, -ONE, 0, 0, 0, 0, 1 << 30), 3),
        ((-ONE, 0, 0, 0, -ONE, 0, 0, 0, 1 << 30), 2),
        ((0, -ONE, 0, ONE, 0, 0, 0, 0, 1 << 30), 1),
    ],
    ids=["0", "90", "180", "270"],
)
def test_rotated_video_is_displayed_upright(matrix, turns):
    data = encode_video(6)
    np.testing.assert_array_equal(
        decode(with_display_matrix(data, matrix)).frames, np.rot90(decode(data).frames, turns, axes=(1, 2))
    )


def test_readers_are_tried_in_order_of_priority():
    tried = []

    class Reader(VideoReader):
        def __init__(self, name, priority):
            self.name, self.priority = name, priority

        def available(self):
            return self.name != "absent"

        def open(self, data):
            tried.append(self.name)
            if self.name == "last":
                return HeaderOnlyReader()
            raise MediaUndecodable("not mine")

    readers = {"last": Reader("last", 1), "absent": Reader("absent", 9), "first": Reader("first", 5)}
    readers = select_readers(readers, EngineConfig())
    assert len(decode(ANY, readers).frames) == 20
    assert tried == ["first", "last"]


def test_failing_reader_is_logged_and_next_one_is_used(caplog):
    class Broken(HeaderOnlyReader):
        name = "broken"

        def open(self, data):
            raise OSError("libavcodec.so.58: cannot open shared object file")

    class BreaksLater(HeaderOnlyReader):
        name = "breaks later"

        def frames(self, indices, check_stop):
            raise KeyError

    assert len(decode(ANY, [Broken(), BreaksLater(), HeaderOnlyReader()]).frames) == 20
    assert [(record.levelname, record.args) for record in caplog.records] == [
        ("WARNING", ("broken",)),
        ("WARNING", ("breaks later",)),
    ]
    assert "libavcodec" in caplog.text
    with pytest.raises(MediaUndecodable) as caught:
        decode(ANY, [Broken()])
    assert caught.value.param == PART
    assert "libavcodec" not in caught.value.message


def test_reader_of_other_formats_is_used_for_them():
    assert len(decode(b"film: ten seconds of nothing", [*READERS, HeaderOnlyReader()]).frames) == 20


def test_decoding_can_be_stopped_at_every_frame():
    class Stopped(Exception):
        pass

    calls = []

    def stop_at_the_third():
        calls.append(1)
        if len(calls) == 3:
            raise Stopped

    video = PyAVReader().open(encode_video(3))
    list(video.frames([0, 1], stop_at_the_third))
    calls.clear()
    with pytest.raises(Stopped):
        list(video.frames([0, 1, 2], stop_at_the_third))


@pytest.mark.parametrize(
    "header",
    [
        {"frames": 10_000, "fps": 10.0},
        {"frames": 200_000, "fps": 1e6},
        {"frames": 2**31, "fps": 25.0},
        {"width": 8001, "height": 8000},
        {"width": 8000, "height": 8000, "fps": 1.0},
    ],
    ids=["too long", "too long at an impossible rate", "overflow", "too large", "too large together"],
)
def test_limits_are_checked_by_header_before_decoding(header):
    film = HeaderOnlyReader(**header)
    with pytest.raises(MediaTooLarge) as caught:
        decode(ANY, [film], fps=30.0)
    assert caught.value.param == PART
    assert film.requested is None


def test_decoding_is_stopped_at_time_limit():
    """A static video of an hour is a small file, and decoding two of its frames requires decoding all."""
    with pytest.raises(MediaTooLarge, match=r"1e-09 seconds"):
        decode(encode_video(60, height=240, width=320), config=EngineConfig(limits={"video_decode_timeout": 1e-9}))


@cases(
    "header",
    [{"frames": 0}, {"fps": 0.0}, {"fps": -1.0}, {"fps": math.inf}, {"fps": math.nan}, {"width": 0}, {"frames": -5}],
)
def test_nonsensical_header_is_undecodable(header):
    film = HeaderOnlyReader(**header)
    with pytest.raises(MediaUndecodable):
        decode(ANY, [film])
    assert film.requested is None


def test_only_sampled_frames_are_requested():
    film = HeaderOnlyReader(frames=1000)
    decode(ANY, [film], num_frames=6)
    assert film.requested == [0, 200, 400, 599, 799, 999]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_playlist_is_rejected_and_its_entries_not_fetched(reader):
    with serve({"/x.ts": body(encode_video(container="mpegts")), "/x.mp4": body(encode_video())}) as web:
        playlists = [
            f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{web.url('/x.ts')}\n#EXT-X-ENDLIST\n",
            f"ffconcat version 1.0\nfile '{web.url('/x.mp4')}'\n",
            "#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n",
        ]
        for playlist in playlists:
            with pytest.raises(MediaUndecodable):
                decode(playlist.encode(), [reader])
    assert web.requests == []


def test_readers_open_no_other_containers():
    for reader in READERS:
        with pytest.raises(MediaUndecodable):
            reader.open(encode_video(container="flv"))


@pytest.mark.slow
@pytest.mark.parametrize("container", CONTAINERS)
def test_damaged_video_is_decoded_or_rejected(container):
    rng = np.random.default_rng(2)
    sound = encode_video(8, container=container)
    for _ in range(12):
        damaged = bytearray(sound)
        for position in rng.integers(0, len(damaged), 4):
            damaged[position] = rng.integers(0, 256)
        try:
            frames = decode(bytes(damaged), [PyAVReader()]).frames
        except (MediaUndecodable, MediaTooLarge):
            continue
        assert frames.ndim == 4


@pytest.mark.parametrize("found", [0, 3])
@pytest.mark.parametrize("is_resized", [False, True])
def test_file_with_fewer_frames_than_its_header_is_undecodable(found, is_resized):
    class Truncated(HeaderOnlyReader):
        def frames(self, indices, check_stop):
            yield from super().frames(indices[:found], check_stop)

    with pytest.raises(MediaUndecodable) as caught:
        decode(b"", [Truncated()], num_frames=4, resizer=(lambda _: lambda frame: frame) if is_resized else None)
    assert caught.value.param == PART


@cases("data", [b"", b"\0" * 64, b"\0\0\0\x18ftypisom", b"RIFF\0\0\0\0AVI ", b"\x1a\x45\xdf\xa3", b"G" * 600])
def test_non_video_is_undecodable(data):
    with pytest.raises(MediaUndecodable) as caught:
        decode(data)
    assert caught.value.param == PART


def test_truncated_file_is_undecodable():
    data = encode_video(30)
    with pytest.raises(MediaUndecodable):
        decode(data[: len(data) // 2])


def test_frame_list_becomes_video():
    frames = [noise(4, 6, seed) for seed in range(3)]
    part = video(min_pixels=1, max_pixels=2, total_pixels=3)
    stacked = stack_frames(frames, part, FrameTimes.of_list(3, part, POLICY))
    np.testing.assert_array_equal(stacked.frames, frames)
    assert (stacked.min_pixels, stacked.max_pixels, stacked.total_pixels) == (1, 2, 3)


def test_frame_of_another_size_is_named():
    with pytest.raises(InvalidParameter, match="6 x 4") as caught:
        list(of_one_size([noise(4, 6), noise(4, 6), noise(6, 4)], video()))
    assert caught.value.param == f"{PART}.video_url.url[2]"


MEMORY = """
import asyncio, pathlib, sys
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.media import READERS
from dashinfer_vlm_core.protocol import MediaPart
from tests.decoding_loader import DecodingLoader

def peak():  # not ru_maxrss: a child inherits that of its parent
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

async def load(name):
    loader = DecodingLoader(EngineConfig(allowed_local_media_path=sys.argv[1]), READERS)
    part = MediaPart(kind="video", path="here", url=name)
    frames, = await loader.load([part], then=lambda clip: clip.frames.nbytes)
    await loader.close()
    return frames

asyncio.run(load("short.mp4"))
before = peak()
kept = asyncio.run(load("long.mp4"))
print(kept, peak() - before - kept)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_memory_of_720p_minute_is_its_frames_plus_64_mb(tmp_path):
    (tmp_path / "short.mp4").write_bytes(encode_video(8, height=72, width=128))
    (tmp_path / "long.mp4").write_bytes(encode_video(120, height=720, width=1280, fps=2))
    program = [sys.executable, "-c", MEMORY, str(tmp_path)]
    kept, more = map(int, subprocess.run(program, capture_output=True, text=True, check=True).stdout.split())
    assert kept == 120 * 720 * 1280 * 3
    assert more < 64 * 1024 * 1024
