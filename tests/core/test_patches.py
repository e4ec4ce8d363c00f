"""Resizing and patchifying, compared with transformers' image processor and the published formulas."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image as PILImage

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import ConfigError, InvalidParameter
from dashinfer_vlm_core.media import Image, Video
from dashinfer_vlm_core.models.patches import smart_resize, with_digest
from dashinfer_vlm_core.models.qwen2_vl.image_processor import Qwen2VLImageProcessor
from dashinfer_vlm_core.models.spec import PixelLimits, PixelSpec
from tests.cases import cases
from tests.patches import normalize
from tests.samples import noise

PART = "messages[0].content[0]"
SPEC = PixelSpec()
SMALL = EngineConfig(max_pixels=200 * 784)


def make_image(pixels, **limits):
    return Image(image=PILImage.fromarray(pixels), path=PART, **limits)


def make_video(frames, **limits):
    return Video(frames=np.asarray(frames), path=PART, **limits)


def patchify(media, config=SMALL, spec=SPEC):
    return with_digest(Qwen2VLImageProcessor(spec, config).process(media))


@pytest.fixture(scope="module")
def oracle():
    """Return transformers' processor with the limits of SMALL: a function from an image to pixels and grid."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": SPEC.min_pixels, "longest_edge": SMALL.max_pixels}
    processor = Qwen2VLImageProcessorPil(size=size)

    def process(pixels):
        result = processor(PILImage.fromarray(pixels), return_tensors="np")
        return result["pixel_values"], tuple(result["image_grid_thw"][0].tolist())

    return process


def sizes(count):
    """Yield random sizes: half of them ordinary, the rest narrow, tiny or at rounding boundaries."""
    rng = np.random.default_rng(0)
    for i in range(count):
        height = int(2 ** rng.uniform(1, 10))
        width = min(max(int(2 ** rng.uniform(1, 10)), -(-height // 200)), 200 * height)
        if i % 4 == 0:
            height, width = 14 * int(rng.integers(1, 40)), 14 * int(rng.integers(1, 40))
        if i % 4 == 1:
            width = min(height * int(rng.integers(1, 200)), 4000)
        yield (height, width) if i % 3 else (width, height)


@pytest.mark.slow
def test_random_sizes_equal_transformers(oracle):
    for seed, (height, width) in enumerate(sizes(240)):
        pixels = noise(height, width, seed)
        expected, grid = oracle(pixels)
        ours = patchify(make_image(pixels))
        assert tuple(ours.grid) == grid, (height, width)
        np.testing.assert_allclose(normalize(ours.pixels, SPEC), expected, rtol=0, atol=1e-6)


def test_smart_resize_equals_transformers():
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as published

    rng = np.random.default_rng(3)
    for _ in range(3000):
        height, width = (int(2 ** rng.uniform(0, 13)) for _ in range(2))
        minimum = int(rng.integers(1, 500_000))
        limits = {
            "factor": int(rng.choice([28, 32])),
            "min_pixels": minimum,
            "max_pixels": minimum + int(rng.integers(2_000_000)),
        }
        if max(height, width) <= 200 * min(height, width):
            assert smart_resize(height, width, **limits) == published(height, width, **limits)


@pytest.mark.parametrize(("height", "width"), [(1, 201), (201, 1), (20_000, 99), (10, 2001)])
def test_aspect_ratio_above_200_is_rejected_by_name(height, width):
    with pytest.raises(InvalidParameter) as caught:
        patchify(make_image(noise(height, width)))
    assert caught.value.param == PART


def test_aspect_ratio_of_200_is_accepted():
    assert patchify(make_image(noise(2, 400))).grid.h == 2


def reference_patches(frames):
    """Return patches in the published order for an even number of channels-first frames."""
    t, c, h, w = len(frames) // 2, 3, frames.shape[1] // 14, frames.shape[2] // 14
    shaped = frames.transpose(0, 3, 1, 2).reshape(t, 2, c, h // 2, 2, 14, w // 2, 2, 14)
    return shaped.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, c * 2 * 14 * 14), (t, h, w)


@pytest.mark.parametrize("count", [2, 4, 6])
def test_video_patches_are_in_published_order(count):
    frames = np.stack([noise(56, 84, seed) for seed in range(count)])
    ours = patchify(make_video(frames))
    expected, grid = reference_patches(frames)
    np.testing.assert_array_equal(ours.pixels, expected)
    assert tuple(ours.grid) == grid
    assert ours.tokens == ours.grid.patches // 4


@pytest.mark.parametrize("count", [1, 3, 5])
def test_odd_number_of_frames_repeats_last(count):
    frames = np.stack([noise(56, 84, seed) for seed in range(count)])
    odd, even = patchify(make_video(frames)), patchify(make_video([*frames, frames[-1]]))
    assert odd.grid == even.grid
    assert odd.digest == even.digest
    np.testing.assert_array_equal(odd.pixels, even.pixels)


def test_video_frames_are_resized_like_images():
    frames = np.stack([noise(100, 150, seed) for seed in range(2)])
    ours = patchify(make_video(frames))
    for index, frame in enumerate(frames):
        alone = patchify(make_image(frame)).pixels.reshape(-1, 3, 2, 196)
        np.testing.assert_array_equal(ours.pixels.reshape(-1, 3, 2, 196)[:, :, index], alone[:, :, 0])


def test_other_patch_and_merge_sizes():
    spec = PixelSpec(patch_size=8, temporal_patch_size=4, merge_size=3, min_pixels=24 * 24)
    ours = patchify(make_video(np.stack([noise(48, 72, seed) for seed in range(5)])), spec=spec)
    assert tuple(ours.grid) == (2, 6, 9)
    assert ours.pixels.shape == (2 * 6 * 9, 3 * 4 * 64)
    assert ours.tokens == 12


def test_digest_covers_kind_grid_and_pixels():
    flat = np.full((28, 112, 3), 7, np.uint8)
    wide, high, square = (
        patchify(make_image(flat)),
        patchify(make_image(flat.reshape(112, 28, 3))),
        patchify(make_image(flat.reshape(56, 56, 3))),
    )
    moving = patchify(make_video(flat[None]))
    assert wide.pixels.tobytes() == high.pixels.tobytes() == square.pixels.tobytes() == moving.pixels.tobytes()
    assert len({item.digest for item in (wide, high, square, moving)}) == 4
    other = flat.copy()
    other[0, 0, 0] = 8
    assert patchify(make_image(other)).digest != wide.digest
    assert patchify(make_image(flat.copy())).digest == wide.digest
    assert len(wide.digest) == 32


@cases(
    ("requested", "options", "limits"),
    [
        ({}, {}, (4 * 784, 1280 * 784)),
        ({}, {"min_pixels": 5000, "max_pixels": 9000}, (5000, 9000)),
        ({"max_pixels": 16384 * 784}, {}, (4 * 784, 16384 * 784)),
        ({"min_pixels": 1, "max_pixels": 1000}, {}, (1, 1000)),
        ({"min_pixels": 100_000}, {}, (100_000, 1280 * 784)),
        ({}, {"max_pixels": 99_999_999}, (4 * 784, 99_999_999)),
        ({}, {"min_pixels": 2_000_000}, (2_000_000, 2_000_000)),
        ({"max_pixels": 16384 * 784 + 1}, {}, (4 * 784, 16384 * 784)),
        ({"max_pixels": 9001}, {"max_pixels": 9000}, (4 * 784, 9000)),
    ],
)
def test_image_limits(requested, options, limits):
    assert Qwen2VLImageProcessor(SPEC, EngineConfig(**options)).limits(make_image(noise(2, 2), **requested)) == limits


def test_checkpoint_limit_bounds_default():
    assert (
        Qwen2VLImageProcessor(PixelSpec(max_pixels=50_000), EngineConfig()).limits(make_image(noise(2, 2))).max_pixels
        == 50_000
    )


@pytest.mark.parametrize(
    ("requested", "options", "field"),
    [
        ({"max_pixels": 100}, {}, "max_pixels"),
        ({"min_pixels": 2000, "max_pixels": 1000}, {}, "min_pixels"),
        ({"min_pixels": 2_000_000}, {}, "min_pixels"),
    ],
)
def test_contradictory_image_limits_are_named(requested, options, field):
    with pytest.raises(InvalidParameter) as caught:
        patchify(make_image(noise(30, 30), **requested), EngineConfig(**options))
    assert caught.value.param == f"{PART}.image_url.{field}"


def published_frame_limit(count, minimum, maximum=768 * 784, total=16384 * 784):
    """Return the frame limit of fetch_video in qwen-vl-utils, with this server's default of total_pixels."""
    return max(min(maximum, total / count * 2), int(minimum * 1.05))


@cases("count", [1, 2, 5, 42, 43, 44, 100, 767, 768])
def test_frame_limits_follow_published_rule(count):
    frames = np.zeros((count, 2, 2, 3), np.uint8)
    for minimum in (4 * 784, 128 * 784):
        limits = Qwen2VLImageProcessor(SPEC, EngineConfig()).limits(make_video(frames, min_pixels=minimum))
        assert limits == PixelLimits(minimum, int(published_frame_limit(count + count % 2, minimum)))


def test_request_lowers_frame_limits():
    frames = np.zeros((8, 2, 2, 3), np.uint8)
    processor = Qwen2VLImageProcessor(SPEC, EngineConfig())
    assert processor.limits(make_video(frames, max_pixels=50_000)).max_pixels == 50_000
    assert processor.limits(make_video(frames, total_pixels=100_000)).max_pixels == 25_000
    assert processor.limits(make_video(frames, total_pixels=1)).max_pixels == int(SPEC.min_pixels * 1.05)


def test_request_limits_are_capped_at_server_limits():
    frames = np.zeros((64, 2, 2, 3), np.uint8)
    processor = Qwen2VLImageProcessor(SPEC, EngineConfig(video_total_pixels=100_000 * 32))
    whole = processor.limits(make_video(frames))
    for requested in ({"max_pixels": 10**9}, {"total_pixels": 10**9}):
        assert processor.limits(make_video(frames, **requested)) == whole


@pytest.mark.parametrize(
    ("requested", "field"),
    [
        ({"max_pixels": 100}, "max_pixels"),
        ({"min_pixels": 768 * 784 + 1}, "min_pixels"),
    ],
)
def test_video_limits_beyond_server_limits_are_named(requested, field):
    with pytest.raises(InvalidParameter) as caught:
        patchify(make_video([noise(30, 30)], **requested), EngineConfig())
    assert caught.value.param == f"{PART}.video_url.{field}"


def test_frames_stay_within_total_pixels():
    frames = np.zeros((64, 90, 120, 3), np.uint8)
    grid = patchify(make_video(frames), EngineConfig(video_total_pixels=200_000)).grid
    assert grid.t == 32
    assert grid.patches * 196 <= 200_000


def test_contradictory_configuration_is_rejected():
    with pytest.raises(ConfigError, match="min_pixels"):
        Qwen2VLImageProcessor(SPEC, EngineConfig(min_pixels=10_000, max_pixels=5_000))


def test_count_tokens_equals_processed_tokens():
    processor = Qwen2VLImageProcessor(SPEC, SMALL)
    for height, width in [(2, 2), (28, 28), (300, 451), (90, 1300), (1200, 800)]:
        still = make_image(noise(height, width))
        assert processor.count_tokens(still) == processor.process(still).tokens
        for count in (1, 2, 5):
            moving = make_video([noise(height, width)] * count)
            assert processor.count_tokens(moving) == processor.process(moving).tokens
    vast = make_video(np.broadcast_to(np.uint8(0), (1, 1_000_000, 1_000_000, 3)))  # too large to be resized
    assert processor.count_tokens(vast) == 27 * 27


def test_count_tokens_rejects_what_process_rejects():
    with pytest.raises(InvalidParameter) as caught:
        Qwen2VLImageProcessor(SPEC, SMALL).count_tokens(make_image(noise(1, 201)))
    assert caught.value.param == PART
