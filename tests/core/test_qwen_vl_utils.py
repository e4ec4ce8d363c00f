"""Videos are read as by qwen-vl-utils, which is the reference here: the same frames at the same sizes. Its outputs are
accepted as in the recipe of Qwen's model cards."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from dashinfer_vlm_core import VLM, SamplingParams
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import InvalidParameter
from dashinfer_vlm_core.media import READERS, Video
from dashinfer_vlm_core.media.decoder import MediaDecoder
from dashinfer_vlm_core.media.frame_sampling import VideoSamplingPolicy
from dashinfer_vlm_core.media.python_objects import load_object
from dashinfer_vlm_core.media.video import frame_count
from dashinfer_vlm_core.models.qwen2_vl.image_processor import Qwen2VLImageProcessor
from dashinfer_vlm_core.models.spec import PixelSpec
from dashinfer_vlm_core.protocol import MediaPart
from tests.cases import cases
from tests.conversations import blurred_image
from tests.pages import ROOT, check_programs
from tests.samples import encode_video
from tests.transformers_engine import TransformersEngine

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


@cases("total", LENGTHS)
def test_frame_indices(total):
    for count in range(2, min(total, 768) + 1, 2):
        assert POLICY.indices(total, count) == torch.linspace(0, total - 1, count).round().long().tolist(), count


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"fps": 1.0}, {"fps": 5.0}, {"num_frames": 6}])
def test_file_frames(published, tmp_path, options):
    """Compare the frames before they are resized."""
    pytest.importorskip("decord")
    path = tmp_path / "movie.mp4"
    path.write_bytes(encode_video(50, fps=10))
    requested = {"nframes" if name == "num_frames" else name: value for name, value in options.items()}
    frames, _, _ = published._read_video_decord({"video": str(path), **requested})
    decoder = MediaDecoder(config=EngineConfig(), readers=READERS, policy=POLICY)
    ours = decoder.decode(video(**options), [path.read_bytes()], lambda: None)
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
        assert processor.size(clip) == tuple(expected), (height, width)


# The recipe of the model cards


def bicubic(video, size, **options):
    """Resize as `torchvision.transforms.functional.resize` does with antialias: it gives the same pixels."""
    resized = torch.nn.functional.interpolate(video.float(), size, mode="bicubic", antialias=True)
    return resized.clamp(0, 255).round().to(torch.uint8)


@pytest.fixture
def process_vision_info(published, monkeypatch):
    """qwen-vl-utils' function, with decord and without the stub of the other tests that does not resize."""
    pytest.importorskip("decord")
    monkeypatch.setattr(published.transforms.functional, "resize", bicubic)
    monkeypatch.setattr(published, "FORCE_QWENVL_VIDEO_READER", "decord")
    published.get_video_reader_backend.cache_clear()
    yield published.process_vision_info
    published.get_video_reader_backend.cache_clear()


@pytest.fixture
def messages(tmp_path):
    """An image, a video file, and a list of an odd number of frames, at sizes that the tiny model keeps."""
    path, limits = tmp_path / "movie.mp4", {"min_pixels": 784, "max_pixels": 28_224}
    path.write_bytes(encode_video(50, fps=10, height=84, width=112))
    frames = [blurred_image(seed, 112, 84) for seed in range(3)]
    parts = [
        {"type": "image", "image": blurred_image(3), **limits},
        {"type": "video", "video": str(path), "fps": 1.0, **limits},
        {"type": "video", "video": frames, "sample_fps": 4.0, **limits},
        {"type": "text", "text": "Compare."},
    ]
    return [{"role": "user", "content": parts}]


@pytest.mark.slow
@pytest.mark.parametrize("metadata", [False, True], ids=["fps", "metadata"])
def test_recipe_of_model_cards_equals_transformers(process_vision_info, messages, tiny_checkpoint, metadata):
    images, videos, video_kwargs = process_vision_info(
        messages, return_video_kwargs=True, return_video_metadata=metadata
    )
    params = SamplingParams(temperature=0, max_tokens=16, stop_token_ids=[])
    with VLM(model=str(tiny_checkpoint), dtype="float32", limit_mm_per_prompt={"image": 10, "video": 10}) as llm:
        prompt = llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        data = {"image": images, "video": videos}
        inputs = {"prompt": prompt, "multi_modal_data": data, "mm_processor_kwargs": video_kwargs}
        (output,) = llm.generate([inputs], sampling_params=params)
    tensors = [video[0] if metadata else video for video in videos]
    assert [tensor.dtype for tensor in tensors] == [torch.float32] * 2
    frames = [[Image.fromarray(frame.permute(1, 2, 0).byte().numpy()) for frame in tensor] for tensor in tensors]
    content = [{"type": "image", "image": images[0]}, *({"type": "video", "video": clip} for clip in frames)]
    content.append(messages[0]["content"][-1])
    (expected,), _ = TransformersEngine(tiny_checkpoint).generate([[{"role": "user", "content": content}]])
    assert output.outputs[0].token_ids == tuple(expected[:16])


def test_fps_and_metadata_of_the_recipe_give_the_same_times(process_vision_info, messages):
    """The rate of qwen-vl-utils is that of the frames in the file: 4 of 50 frames at 10 frames per second."""
    _, videos, video_kwargs = process_vision_info(messages, return_video_kwargs=True)
    _, with_metadata, _ = process_vision_info(messages, return_video_kwargs=True, return_video_metadata=True)
    for tensor, pair, fps in zip(videos, with_metadata, video_kwargs["fps"], strict=True):
        part = MediaPart(kind="video", path="video", content=tensor, fps=fps)
        given = load_object(part, EngineConfig(), POLICY, lambda: None)
        part = MediaPart(kind="video", path="video", content=pair)
        read = load_object(part, EngineConfig(), POLICY, lambda: None)
        assert given.sampled_fps == pytest.approx(read.sampled_fps)
        np.testing.assert_array_equal(given.frames, read.frames)
        assert read.times == tuple(index / pair[1]["fps"] for index in pair[1]["frames_indices"])


def test_number_of_fps_must_be_that_of_videos(process_vision_info, messages, tiny_checkpoint):
    images, videos, video_kwargs = process_vision_info(messages, return_video_kwargs=True)
    data = {"image": images, "video": videos[:1]}
    with VLM(tiny_checkpoint) as llm, pytest.raises(InvalidParameter) as caught:
        llm.generate({"prompt": "x", "multi_modal_data": data, "mm_processor_kwargs": video_kwargs}, use_tqdm=False)
    assert caught.value.param == "mm_processor_kwargs.fps"


@pytest.mark.slow
def test_page_runs(process_vision_info, monkeypatch):
    """The programs of docs/vllm.md."""
    monkeypatch.chdir(ROOT)
    check_programs("vllm.md")
