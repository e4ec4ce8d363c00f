"""Sizes, patches and sampled frames equal transformers' processors."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image as PILImage
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import ConfigError, InvalidParameter
from dashinfer_vlm_core.media import Image, Video
from dashinfer_vlm_core.models.spec import PixelLimits, PixelSpec
from dashinfer_vlm_qwen3_vl import Qwen3VL
from dashinfer_vlm_qwen3_vl.image_processor import Qwen3VLImageProcessor
from tests.cases import cases
from tests.patches import normalize
from tests.samples import noise

from .oracle import Clip

PART = "messages[0].content[0]"
SPEC = PixelSpec(patch_size=16, min_pixels=65536, max_pixels=16777216, mean=(0.5,) * 3, std=(0.5,) * 3)
VIDEO = PixelLimits(min_pixels=4096, max_pixels=25165824)


def video(count, height, width, **options):
    frames = np.broadcast_to(np.zeros((), np.uint8), (count, height, width, 3))
    return Video(frames=frames, path=PART, **options)


@pytest.fixture(scope="module")
def processor(dense):
    family = Qwen3VL()
    return family.image_processor(family.load_spec(dense), EngineConfig())


@pytest.mark.parametrize(("height", "width"), [(64, 64), (40, 100), (300, 90), (17, 33), (500, 500)])
def test_image_equals_transformers(processor, oracle, height, width):
    pixels = noise(height, width)
    ours = processor.process(Image(image=PILImage.fromarray(pixels), path=PART))
    expected, grid = oracle.image(PILImage.fromarray(pixels))
    assert list(ours.grid) == grid.tolist()
    np.testing.assert_allclose(normalize(ours.pixels, SPEC), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (30, 110), (200, 90)])
def test_video_equals_transformers(processor, oracle, count, height, width):
    frames = [noise(height, width, seed) for seed in range(count)]
    clip = Video(frames=np.stack(frames), path=PART, times=tuple(map(float, range(count))))
    ours = processor.process(clip)
    expected, grid = oracle.video(Clip([PILImage.fromarray(frame) for frame in frames]))
    assert list(ours.grid) == grid.tolist()
    np.testing.assert_allclose(normalize(ours.pixels, SPEC), expected, rtol=0, atol=1e-6)
    assert (ours.tokens, ours.times) == (processor.count_tokens(clip), clip.times)


def test_video_sizes_equal_transformers():
    """With the published budgets, and with a small one that limits long videos."""
    random, published = np.random.default_rng(0), Qwen3VLVideoProcessor(cap_pixels_per_frame=True)
    budgets = (VIDEO, PixelLimits(min_pixels=131072, max_pixels=2_000_000))
    processors = [(budget, Qwen3VLImageProcessor(SPEC, budget, EngineConfig())) for budget in budgets]
    for index in range(2000):
        budget, processor = processors[index % 2]
        size = {"shortest_edge": budget.min_pixels, "longest_edge": budget.max_pixels}
        count, (height, width) = int(random.integers(2, 800)), (int(2 ** random.uniform(3, 11)) for _ in range(2))
        clip = video(count, height, width)
        try:
            expected = published.get_num_of_video_patches(count, height, width, {"size": size})
        except ValueError:  # the aspect ratio
            with pytest.raises(InvalidParameter):
                processor.frame_size(clip)
        else:
            grid_h, grid_w = (side // 16 for side in processor.frame_size(clip))
            assert -(-count // 2) * grid_h * grid_w == expected


def test_frames_resized_while_decoded_give_the_same_patches(processor):
    frames = np.stack([noise(90, 130, seed) for seed in range(4)])
    whole = Video(frames=frames, path=PART)
    resize = processor.frame_resizer(whole)
    early = Video(frames=np.stack([resize(frame) for frame in frames]), path=PART, source_size=(90, 130))
    np.testing.assert_array_equal(processor.process(early).pixels, processor.process(whole).pixels)
    assert processor.frames(processor.process(whole)).shape == (4, *processor.frame_size(whole), 3)


@cases(
    ("options", "requested", "pixels"),
    [
        ({}, {}, 768 * 1024),
        ({"video_max_pixels": 100_000}, {}, 100_000),
        ({"video_total_pixels": 800_000}, {}, 100_000),
        ({}, {"max_pixels": 50_000}, 50_000),
        ({}, {"total_pixels": 400_000}, 50_000),
        ({"video_max_pixels": 50_000}, {"max_pixels": 10**9, "total_pixels": 10**9}, 50_000),
    ],
)
def test_frame_has_at_most_the_lowest_limit(options, requested, pixels):
    processor = Qwen3VLImageProcessor(SPEC, VIDEO, EngineConfig(**options))
    height, width = processor.frame_size(video(8, 2000, 2000, **requested))
    assert 0.7 * pixels < height * width <= pixels


def test_size_of_aligned_frames_changes_at_powers_of_two():
    processor = Qwen3VLImageProcessor(SPEC, VIDEO, EngineConfig(video_total_pixels=2_000_000))
    sizes = {count: processor.frame_size(video(count, 500, 700, align=True)) for count in range(1, 130)}
    assert [count for count in sizes if count > 1 and sizes[count] != sizes[count - 1]] == [5, 9, 17, 33, 65, 129]
    assert all(count * height * width <= 2_000_000 for count, (height, width) in sizes.items())
    assert all(sizes[count] == processor.frame_size(video(count, 500, 700)) for count in (8, 16, 32, 64, 128))


def test_request_raises_the_minimum_of_a_frame():
    processor = Qwen3VLImageProcessor(SPEC, VIDEO, EngineConfig())
    height, width = processor.frame_size(video(4, 40, 40, min_pixels=200_000))
    assert height * width >= 200_000


def test_single_frame_is_resized_like_two():
    processor = Qwen3VLImageProcessor(SPEC, VIDEO, EngineConfig())
    assert processor.frame_size(video(1, 400, 300)) == processor.frame_size(video(2, 400, 300))
    assert processor.process(video(1, 64, 64)).grid.t == 1


def test_contradictory_limits_of_a_request_are_named():
    processor = Qwen3VLImageProcessor(SPEC, VIDEO, EngineConfig())
    with pytest.raises(InvalidParameter) as caught:
        processor.process(video(4, 40, 40, min_pixels=2000, max_pixels=1000))
    assert caught.value.param == f"{PART}.video_url.min_pixels"


def test_aspect_ratio_above_200_is_rejected():
    processor = Qwen3VLImageProcessor(SPEC, VIDEO, EngineConfig())
    with pytest.raises(InvalidParameter) as caught:
        processor.count_tokens(video(4, 10, 3000))
    assert caught.value.param == PART


def test_contradictory_configuration_is_rejected():
    with pytest.raises(ConfigError, match="min_pixels"):
        Qwen3VLImageProcessor(SPEC, VIDEO, EngineConfig(min_pixels=10_000, max_pixels=5_000))


def test_sampled_frames_equal_transformers(dense):
    policy, published = Qwen3VL().load_spec(dense).video, Qwen3VLVideoProcessor()
    for total in [*range(1, 80), 299, 300, 767, 769, 1000, 4321, 36_000]:
        for rate in (1.0, 12.5, 23.976, 30.0):
            metadata = VideoMetadata(total_num_frames=total, fps=rate)
            for fps in (0.5, 2.0, 7.0):
                expected = published.sample_frames(metadata, fps=fps).tolist()
                assert policy.indices(total, policy.count(total, rate, fps=fps)) == expected, (total, rate, fps)
