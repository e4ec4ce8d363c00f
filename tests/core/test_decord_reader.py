"""DecordReader: the frames and errors of PyAVReader; and the option that selects a video reader."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import numpy as np
import pytest

from dashinfer_vlm_core import Engine
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import ConfigError, EngineClosed, MediaUndecodable, MissingDependency
from dashinfer_vlm_core.installation import pip_step
from dashinfer_vlm_core.media import READERS, DecordReader, PyAVReader, VideoReader
from dashinfer_vlm_core.media.decoder import MediaDecoder
from dashinfer_vlm_core.media.video import select_readers
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.protocol import MediaPart
from tests.core.test_media_entry_points import X264, encode, trimmed
from tests.core.test_media_video import ONE, POLICY, go_on, with_display_matrix
from tests.core.test_media_workers import process, run  # noqa: F401  `run` is a fixture
from tests.media_pool import make_executor, video
from tests.samples import encode_video, noise

pytestmark = pytest.mark.slow

needs_decord = pytest.mark.skipif(not DecordReader().available(), reason="decord has no wheel for this platform")

CONTAINERS = ["mp4", "mov", "matroska", "webm", "avi"]
MATRICES = {
    "90": (0, ONE, 0, -ONE, 0, 0, 0, 0, 1 << 30),
    "180": (-ONE, 0, 0, 0, -ONE, 0, 0, 0, 1 << 30),
    "270": (0, -ONE, 0, ONE, 0, 0, 0, 0, 1 << 30),
    "mirrored": (-ONE, 0, 0, 0, ONE, 0, 0, 0, 1 << 30),
}


class AbsentReader(VideoReader):
    """A plugin's reader whose library is not installed."""

    name, priority = "absent", 1

    def available(self):
        return False

    def open(self, data):
        raise ImportError


READERS_BY_NAME = {"pyav": PyAVReader(), "decord": DecordReader(), "absent": AbsentReader()}


def config(**options):
    return EngineConfig(**options)


def random_video(height, width):
    """Encode noise in MPEG-4 Part 2, in AVI."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="avi") as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(6):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(noise(height, width, index), format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


@needs_decord
@pytest.mark.parametrize("container", CONTAINERS)
def test_decord_and_pyav_give_equal_frames(container):
    data = encode_video(30, container=container)
    ours, theirs = DecordReader().open(data), PyAVReader().open(data)
    assert ours.info == theirs.info
    for indices in ([0], [29], [3, 4, 5], [0, 7, 22, 29], list(range(30))):
        np.testing.assert_array_equal(list(ours.frames(indices, go_on)), list(theirs.frames(indices, go_on)))


@needs_decord
@pytest.mark.parametrize("size", [(48, 64), (50, 66)])
def test_decord_and_pyav_give_equal_frames_of_noise(size):
    data = random_video(*size)
    np.testing.assert_array_equal(
        list(DecordReader().open(data).frames([0, 2, 5], go_on)), list(PyAVReader().open(data).frames([0, 2, 5], go_on))
    )


@needs_decord
@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_rotated_video_is_upright_with_decord(matrix):
    data = with_display_matrix(encode_video(6), matrix)
    frames = list(DecordReader().open(data).frames([0, 3], go_on))
    np.testing.assert_array_equal(frames, list(PyAVReader().open(data).frames([0, 3], go_on)))


@needs_decord
def test_trimmed_video_has_equal_frames_with_decord():
    data = trimmed(encode(options=X264), 20, 60, rate=30)
    frames = [list(reader.open(data).frames([0, 30, 59], go_on)) for reader in (DecordReader(), PyAVReader())]
    np.testing.assert_array_equal(*frames)


@needs_decord
@pytest.mark.parametrize("container", CONTAINERS)
def test_half_a_file_is_undecodable_with_decord(container):
    data = encode_video(30, container=container)
    with pytest.raises(MediaUndecodable):
        list(DecordReader().open(data[: len(data) // 2]).frames([0, 10, 29], go_on))


@needs_decord
def test_decord_can_be_stopped_between_frames():
    stopped = []

    def stop():
        if stopped:
            raise EngineClosed("stop")

    frames = DecordReader().open(encode_video(8)).frames([0, 1, 2], stop)
    next(frames)
    stopped.append(True)
    with pytest.raises(EngineClosed):
        next(frames)


SDP = b"\nv=0\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"


REFERRING = [
    b"\0\0\0\x08skip" + SDP,
    (b"G" + SDP).ljust(188) + b"G".ljust(188) + b"G".ljust(188),
    SDP,
    b"#EXTM3U\n",
    encode_video(container="mpegts"),
]


def test_formats_that_refer_to_addresses_do_not_reach_decord():
    """In a process of its own: DecordReader must reject them before it imports decord."""
    program = (
        "import sys; from dashinfer_vlm_core.media import DecordReader\n"
        "for line in sys.stdin:\n"
        "    try: DecordReader().open(bytes.fromhex(line))\n"
        "    except Exception as error: print(type(error).__name__)\n"
        "    assert 'decord' not in sys.modules and 'av' not in sys.modules, line[:40]"
    )
    lines = "".join(f"{data.hex()}\n" for data in REFERRING)
    result = subprocess.run([sys.executable, "-c", program], input=lines, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["MediaUndecodable"] * len(REFERRING)


@needs_decord
def test_decord_in_workers_equals_pyav(run):  # noqa: F811
    data = [encode_video(12)]
    ours = process(run, video(num_frames=4), data, readers=[DecordReader()])
    theirs = process(run, video(num_frames=4), data, readers=[PyAVReader()])
    np.testing.assert_array_equal(ours.pixels, theirs.pixels)
    assert ours.digest == theirs.digest


@needs_decord
def test_pyav_keeps_its_own_libraries_after_decord():
    """decord makes the symbols of its libvpx global; PyAV's encoder would use them if it were loaded later."""
    program = (
        "from dashinfer_vlm_core.media import DecordReader; DecordReader().preload()\n"
        "from tests.samples import encode_video; print(len(encode_video(2, container='webm')) > 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert result.stdout == b"True\n", result.stderr


def test_default_uses_no_reader_that_may_crash():
    selected = select_readers(READERS_BY_NAME, config())
    assert [reader.name for reader in selected] == ["pyav"]
    assert [reader.name for reader in READERS] == ["pyav"]
    assert {"pyav", "decord"} <= set(load_plugins().video_readers)


def test_named_reader_is_used_alone():
    assert select_readers(READERS_BY_NAME, config(video_reader="pyav")) == (READERS_BY_NAME["pyav"],)


def test_named_reader_does_not_fall_back():
    readers = select_readers({"text": AbsentReader(), "pyav": PyAVReader()}, config(video_reader="pyav"))
    part = MediaPart(kind="video", path="here", url="data:")
    with pytest.raises(MediaUndecodable):
        MediaDecoder(config=config(), readers=readers, policy=POLICY).decode(part, [b"none"], go_on)


def test_unknown_reader_lists_available_ones():
    with pytest.raises(ConfigError, match="'opencv'; available: auto, absent, decord, pyav") as caught:
        select_readers(READERS_BY_NAME, config(video_reader="opencv"))
    assert caught.value.param == "video_reader"


def test_reader_without_its_library_is_reported():
    with pytest.raises(MissingDependency, match=r"'absent' is not installed\. Install its library") as caught:
        select_readers(READERS_BY_NAME, config(video_reader="absent"))
    assert caught.value.param == "video_reader"


def test_missing_decord_names_its_command():
    class Missing(DecordReader):
        def available(self):
            return False

    with pytest.raises(MissingDependency, match=re.escape(pip_step("'av>=14' decord==0.6.0"))):
        select_readers({"decord": Missing()}, config(video_reader="decord"))


@needs_decord
def test_decord_is_rejected_without_workers(tiny_checkpoint):
    with pytest.raises(ConfigError, match="needs media workers, because a damaged file can crash it") as caught:
        Engine(EngineConfig(model=str(tiny_checkpoint), video_reader="decord", media_workers=0)).start()
    assert caught.value.param == "video_reader"


def test_reader_that_may_crash_never_gets_threads(tiny_checkpoint):
    class Local(DecordReader):
        """Not importable, so that workers cannot use it."""

    with pytest.raises(ConfigError, match="needs media workers"):
        make_executor(tiny_checkpoint, [Local()])
