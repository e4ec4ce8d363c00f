"""Videos are read as by qwen-vl-utils, which is the reference here: the same frames at the same sizes."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import InvalidParameter
from dashinfer_vlm_core.media import READERS, Video
from dashinfer_vlm_core.media.frame_sampling import VideoSamplingPolicy
from dashinfer_vlm_core.media.video import decode_video, frame_count
from dashinfer_vlm_core.models.qwen2_vl.image_processor import Qwen2VLImageProcessor
from dashinfer_vlm_core.models.spec import PixelSpec
from dashinfer_vlm_core.protocol import MediaPart
from tests.samples import encode_video

POLICY = VideoSamplingPolicy()
LENGTHS = [*range(2, 60), 61, 99, 128, 240, 299, 300, 301, 767, 768, 769, 1000, 4321, 9000, 18_000, 36_000, 144_000]


def read_blank(requested):
    """Read a video whose name is its size; its frames are blank."""
    frames, height, width = map(int, requested["video"].split())
    return torch.zeros((), dtype=torch.uint8).expand(frames, 3, height, width), {}, 2.0


def resize(video, size, **options):
    """Replace resizing of the frames: only their size is compared."""
    return video[:, :, :1, :1].expand(*video.shape[:2], *size)


@pytest.fixture(scope="module")
def published():
    """Import qwen-vl-utils. It imports torchvision, whose builds do not load next to a CPU build of torch: during the
    import, a stub with nothing but `resize` replaces it."""
    names = ("torchvision", "torchvision.io", "torchvision.transforms")
    modules = {name: ModuleType(name) for name in names}
    modules["torchvision"].io, modules["torchvision"].transforms = (modules[name] for name in names[1:])
    modules["torchvision.transforms"].InterpolationMode = SimpleNamespace(BICUBIC="bicubic")
    modules["torchvision.transforms"].functional = SimpleNamespace(resize=resize)
    sys.modules.update(modules)
    try:
        package = importlib.import_module("qwen_vl_utils.vision_process")
    finally:
        for name in names:
            del sys.modules[name]
    package.FORCE_QWENVL_VIDEO_READER, package.VIDEO_READER_BACKENDS["blank"] = "blank", read_blank
    return package


def video(**options):
    return MediaPart(kind="video", path="messages[0].content[0]", url="data:", **options)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1.0, 8.0, 12.5, 23.976, 25.0, 30.0, 60.0])
def test_number_of_frames(published, rate):
    for total in LENGTHS:
        for wanted in (0.25, 0.5, 1.0, 2.0, 3.0, 10.0, 30.0, 100.0):
            count = frame_count(total, rate, part=video(fps=wanted), policy=POLICY)
            assert count == published.smart_nframes({"fps": wanted}, total, rate), (total, rate, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("requested", [1, 2, 3, 4, 5, 8, 9, 30, 31, 768])
def test_requested_number_of_frames(published, requested):
    def expected(total):
        with suppress(ValueError):
            return published.smart_nframes({"nframes": requested}, total, 25.0)

    def ours(total):
        with suppress(InvalidParameter):
            return frame_count(total, 25.0, part=video(num_frames=requested), policy=POLICY)

    assert [ours(total) for total in LENGTHS] == [expected(total) for total in LENGTHS]


@pytest.mark.parametrize("total", LENGTHS)
def test_frame_indices(total):
    for count in range(2, min(total, 768) + 1, 2):
        assert POLICY.indices(total, count) == torch.linspace(0, total - 1, count).round().long().tolist(), count


@pytest.mark.parametrize("options", [{}, {"fps": 1.0}, {"fps": 5.0}, {"num_frames": 6}])
def test_file_frames(published, tmp_path, options):
    """Compare the frames before they are resized."""
    path = tmp_path / "movie.mp4"
    path.write_bytes(encode_video(50, fps=10))
    requested = {"nframes" if name == "num_frames" else name: value for name, value in options.items()}
    frames, _, _ = published._read_video_decord({"video": str(path), **requested})
    ours = decode_video(
        path.read_bytes(),
        part=video(**options),
        readers=READERS,
        config=EngineConfig(),
        policy=POLICY,
        check_stop=lambda: None,
    )
    np.testing.assert_array_equal(ours.frames, frames.permute(0, 2, 3, 1).numpy())


SIZES = [(28, 28), (90, 160), (240, 320), (480, 640), (720, 1280), (1080, 1920), (1280, 720), (97, 1001), (1500, 40)]
LIMITS = [{}, {"max_pixels": 150_000}, {"total_pixels": 2_000_000}, {"min_pixels": 200_000}]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4, 10, 48])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_size_of_frames(published, count, limits):
    """With its min_pixels, and its total_pixels where the request has none."""
    total = int(published.MODEL_SEQ_LEN * 784 * 0.9)
    spec = PixelSpec(max_pixels=16384 * 784)
    processor = Qwen2VLImageProcessor(spec, EngineConfig(min_pixels=128 * 784, video_total_pixels=total))
    for height, width in SIZES:
        frames = np.broadcast_to(np.uint8(0), (count, height, width, 3))
        clip = Video(frames=frames, path="here", **limits)
        expected = published.fetch_video({"video": f"{count} {height} {width}", **limits}).shape[2:]
        assert processor._size(clip) == tuple(expected), (height, width)
