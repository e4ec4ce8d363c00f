"""Media passed as Python objects: images, arrays, tensors, embeddings."""

from __future__ import annotations

import asyncio
import base64
import io
import threading

import numpy as np
import pytest
import torch
from PIL import Image as PILImage
from safetensors.torch import save

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.errors import InvalidParameter, MediaTooLarge, MediaUndecodable
from dashinfer_vlm_core.media import READERS
from dashinfer_vlm_core.media.frame_sampling import VideoSamplingPolicy
from dashinfer_vlm_core.media.python_objects import digest_media, load_object
from dashinfer_vlm_core.protocol import EncodedEmbeddings, MediaPart
from tests.cases import cases
from tests.decoding_loader import DecodingLoader
from tests.media_pool import budget, run_with_pool
from tests.samples import data_url, encode, encode_video, image_url, noise

PART = "messages[0].content[1]"
RGB = noise(20, 30)
GRAY = RGB[:, :, 0]
FRAMES = np.stack([noise(20, 30, seed) for seed in range(4)])
ROWS = torch.randn((6, 8), generator=torch.Generator().manual_seed(1))


def part(content, kind="image", **options):
    return MediaPart(kind=kind, path=PART, content=content, **options)


def got(content, kind="image", *, config=None, **options):
    settings = EngineConfig(**config or {})
    policy = VideoSamplingPolicy().with_config(settings)
    return load_object(part(content, kind, **options), settings, policy, lambda: None)


def pixels(content, **options):
    image = got(content, **options).image
    assert image.mode == "RGB"
    return np.asarray(image)


def refused(error, content, kind="image", param=PART, **options):
    with pytest.raises(error) as caught:
        got(content, kind, **options)
    assert caught.value.param == param
    return caught.value.message


@cases(
    "content",
    [
        PILImage.fromarray(RGB),
        RGB,
        torch.from_numpy(RGB),
        torch.from_numpy(RGB).permute(2, 0, 1),
        RGB.transpose(2, 0, 1),
        np.asfortranarray(RGB),
        np.dstack([RGB, np.full((20, 30), 255, np.uint8)]),
    ],
)
def test_image_object_types(content):
    assert np.array_equal(pixels(content), RGB)


@pytest.mark.parametrize("content", [PILImage.fromarray(GRAY), GRAY, GRAY[:, :, None], torch.from_numpy(GRAY)[None]])
def test_gray_becomes_rgb(content):
    content = content.permute(1, 2, 0) if isinstance(content, torch.Tensor) else content
    assert np.array_equal(pixels(content), np.dstack([GRAY] * 3))


@cases("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "PA", "CMYK", "YCbCr", "LAB", "HSV", "I;16"])
def test_every_mode_is_converted_as_from_file(mode):
    """As the file decoder converts it to RGB; modes that no file format has are converted by Pillow."""
    image = PILImage.fromarray(RGB).convert("L" if mode == "I;16" else "RGB")
    image = PILImage.fromarray(np.asarray(image).astype(np.uint16) << 8) if mode == "I;16" else image.convert(mode)
    expected = PILImage.fromarray(np.asarray(image) >> 8) if mode == "I;16" else image
    assert np.array_equal(pixels(image), np.asarray(expected.convert("RGB")))


@pytest.mark.parametrize("mode", ["I", "F"])
def test_modes_without_defined_range_are_rejected(mode):
    assert "Convert it to RGB" in refused(MediaUndecodable, PILImage.new(mode, (20, 20)))


def test_transparency_uses_background_of_request_or_server():
    clear = np.zeros((4, 4, 4), np.uint8)
    for content in (clear, PILImage.fromarray(clear)):
        assert (pixels(content) == 255).all()
        assert (pixels(content, config={"rgba_background": (1, 2, 3)})[0, 0] == (1, 2, 3)).all()
        assert (pixels(content, config={"rgba_background": (1, 2, 3)}, background=(9, 8, 7))[0, 0] == (9, 8, 7)).all()


def test_opened_file_has_exif_orientation_applied():
    exif = PILImage.Exif()
    exif[0x0112] = 6
    opened = PILImage.open(io.BytesIO(encode(RGB, "PNG", exif=exif)))
    assert np.array_equal(pixels(opened), np.rot90(RGB, -1))


def test_shared_opened_file_is_read_by_one_request_at_a_time():
    data = encode(noise(700, 700))
    for _ in range(5):
        opened, found = PILImage.open(io.BytesIO(data)), []
        threads = [threading.Thread(target=lambda o=opened, f=found: f.append(pixels(o))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert all(np.array_equal(item, noise(700, 700)) for item in found)


def test_damaged_opened_file_is_rejected():
    refused(MediaUndecodable, PILImage.open(io.BytesIO(encode(noise(50, 50))[:-3000])))


@cases(
    ("content", "message"),
    [
        (RGB / 255, "Multiply floats"),
        (torch.from_numpy(RGB) / 255, "Multiply floats"),
        (ROWS, "image_embeds and image_grid_thw"),
        (RGB.astype(np.int64), "uint8"),
        (GRAY > 9, "uint8"),
        (np.zeros((20, 30, 2), np.uint8), "[height, width, channels]"),
        (np.zeros((2, 20, 30, 3), np.uint8), "[height, width, channels]"),
        (np.zeros(20, np.uint8), "[height, width, channels]"),
        (np.zeros((0, 30, 3), np.uint8), "at least 2 pixels"),
        (np.zeros((1, 30, 3), np.uint8), "at least 2 pixels"),
        (PILImage.new("RGB", (1, 5)), "at least 2 pixels"),
        ("/etc/passwd", "is not an image"),
        (object(), "is not an image"),
        ([RGB], "is not an image"),
        (torch.eye(3).to_sparse(), "a dense tensor"),
        (torch.empty(4, 4, device="meta"), "a dense tensor"),
    ],
)
def test_non_image_object_is_rejected_with_next_step(content, message):
    assert message in refused(InvalidParameter, content)


@pytest.mark.parametrize("content", [RGB, PILImage.fromarray(RGB)])
def test_server_pixel_limit_applies_to_image_objects(content):
    assert pixels(noise(28, 28), config={"limits": {"max_decoded_pixels": 784}}).shape == (28, 28, 3)
    refused(MediaTooLarge, noise(28, 29), config={"limits": {"max_decoded_pixels": 784}})
    refused(MediaTooLarge, PILImage.fromarray(noise(28, 29)), config={"limits": {"max_decoded_pixels": 784}})


def test_part_options_are_kept():
    picture = got(RGB, min_pixels=784, max_pixels=7840)
    assert (picture.path, picture.min_pixels, picture.max_pixels) == (PART, 784, 7840)
    clip = got(FRAMES, "video", min_pixels=784, max_pixels=7840, total_pixels=78400)
    assert (clip.path, clip.min_pixels, clip.max_pixels, clip.total_pixels) == (PART, 784, 7840, 78400)


@cases(
    "content",
    [
        FRAMES,
        FRAMES.transpose(0, 3, 1, 2),
        torch.from_numpy(FRAMES),
        torch.from_numpy(FRAMES).permute(0, 3, 1, 2),
        list(FRAMES),
        tuple(PILImage.fromarray(frame) for frame in FRAMES),
        [PILImage.fromarray(FRAMES[0]), *FRAMES[1:3], torch.from_numpy(FRAMES[3])],
        [PILImage.fromarray(frame).convert("RGBA") for frame in FRAMES],
    ],
)
def test_video_object_types(content):
    assert np.array_equal(got(content, "video").frames, FRAMES)


def test_ambiguous_channel_axis_is_last():
    frames = np.random.default_rng(0).integers(0, 256, (2, 3, 5, 3), np.uint8)
    assert np.array_equal(got(frames, "video").frames, frames)


def test_video_copies_the_callers_array():
    frames = FRAMES.copy()
    clip = got(frames, "video")
    frames[:] = 0
    assert np.array_equal(clip.frames, FRAMES)


@cases(
    ("content", "message", "where"),
    [
        (FRAMES / 255, "Multiply floats", "[0]"),
        (RGB, "[frames, height, width, 3]", ""),
        (FRAMES[None], "[frames, height, width, 3]", ""),
        (FRAMES[:0], "1 to 768 frames", ""),
        ([], "1 to 768 frames", ""),
        ("film.mp4", "[frames, height, width, 3]", ""),
        ([RGB, "frame.png"], "is not an image", "[1]"),
        ([RGB, noise(20, 31)], "size of the first", "[1]"),
        ([RGB, noise(1, 30)], "at least 2 pixels", "[1]"),
    ],
)
def test_non_video_object_is_rejected_with_next_step(content, message, where):
    assert message in refused(InvalidParameter, content, "video", param=PART + where)


def test_server_frame_and_pixel_limits_apply_to_video_objects():
    refused(InvalidParameter, FRAMES, "video", config={"video_max_frames": 3})
    many = np.broadcast_to(np.zeros((28, 28, 3), np.uint8), (17, 28, 28, 3))
    assert len(got(many[:16], "video", config={"limits": {"video_max_decoded_pixels": 16 * 784}}).frames) == 16
    refused(MediaTooLarge, many, "video", config={"limits": {"video_max_decoded_pixels": 16 * 784}})


def test_frames_are_not_sampled():
    refused(InvalidParameter, FRAMES, "video", param=f"{PART}.num_frames", num_frames=2)


@pytest.mark.parametrize(("fps", "times"), [(None, (0, 0.5, 1, 1.5)), (4.0, (0, 0.25, 0.5, 0.75))])
def test_fps_of_frames_determines_their_times(fps, times):
    video = got(list(FRAMES), "video", fps=fps)
    assert (video.times, video.sampled_fps) == (times, fps or 2.0)


@pytest.mark.parametrize(
    ("metadata", "times", "sampled_fps"),
    [
        ({"fps": 10.0, "frames_indices": [0, 3, 7, 10], "total_num_frames": 20}, (0, 0.3, 0.7, 1), 2),
        ({"fps": 8, "frames_indices": torch.tensor([0, 2, 4, 6]), "total_num_frames": 8.0}, (0, 0.25, 0.5, 0.75), 4),
        ({"fps": 4.0, "video_backend": "decord"}, (0, 0.25, 0.5, 0.75), 4),
    ],
    ids=["list", "tensor", "defaults"],
)
def test_metadata_has_times_of_frames(metadata, times, sampled_fps):
    video = got((list(FRAMES), metadata), "video")
    assert (video.times, video.sampled_fps) == (times, sampled_fps)
    assert np.array_equal(video.frames, FRAMES)


@cases(
    ("metadata", "where"),
    [
        ({}, "[1].fps"),
        ({"fps": 0}, "[1].fps"),
        ({"fps": "fast"}, "[1].fps"),
        ({"fps": float("nan")}, "[1].fps"),
        ({"fps": 2, "total_num_frames": -1}, "[1].total_num_frames"),
        ({"fps": 2, "frames_indices": [0, 1]}, "[1].frames_indices"),
        ({"fps": 2, "frames_indices": [0.5, 1, 2, 3]}, "[1].frames_indices"),
        ({"fps": 2, "frames_indices": [-1, 1, 2, 3]}, "[1].frames_indices"),
        ({"fps": 2, "do_sample_frames": True}, "[1].do_sample_frames"),
    ],
)
def test_invalid_metadata_is_named(metadata, where):
    refused(InvalidParameter, (FRAMES, metadata), "video", param=PART + where)


def test_metadata_and_fps_cannot_be_combined():
    refused(InvalidParameter, (FRAMES, {"fps": 2}), "video", param=f"{PART}.fps", fps=1.0)


@pytest.mark.parametrize("bridge", ["native", "torch"])
def test_decord_reader_is_sampled_like_file(bridge):
    decord = pytest.importorskip("decord")
    data = encode_video(50, fps=10)
    decord.bridge.set_bridge(bridge)
    try:
        for options in ({}, {"fps": 1.0}, {"num_frames": 6}):
            reader = decord.VideoReader(io.BytesIO(data))
            file = MediaPart(kind="video", path="a", url=data_url(data, "video/mp4"), **options)
            (expected,) = load_with_readers(file)
            video = got(reader, "video", **options)
            assert np.array_equal(video.frames, expected.frames)
            assert (video.times, video.sampled_fps) == (expected.times, expected.sampled_fps)
    finally:
        decord.bridge.set_bridge("native")


def test_limits_apply_to_decord_reader():
    decord = pytest.importorskip("decord")
    reader = decord.VideoReader(io.BytesIO(encode_video(50, fps=10)))
    refused(MediaTooLarge, reader, "video", config={"video_max_seconds": 4.0})
    refused(InvalidParameter, reader, "video", param=f"{PART}.num_frames", num_frames=51)


FLOATS = torch.from_numpy(FRAMES).permute(0, 3, 1, 2).float()


@pytest.mark.parametrize("content", [FLOATS, FLOATS.bfloat16(), FLOATS.numpy(), list(FLOATS), FLOATS - 0.25])
def test_floats_from_0_to_255_are_pixels(content):
    """qwen-vl-utils returns such tensors."""
    content = content.clamp(min=0) if isinstance(content, torch.Tensor) else content
    assert np.array_equal(got(content, "video").frames, FRAMES)
    assert np.array_equal(pixels(content[0]), FRAMES[0])


def test_black_float_video_is_accepted():
    assert not got(np.zeros_like(FLOATS.numpy()), "video").frames.any()
    dark = np.zeros_like(FLOATS.numpy())
    dark[0], dark[3] = 0.6, 200
    assert got(dark, "video").frames[0].all()


@pytest.mark.parametrize("value", [-1.0, 255.5, float("nan")])
def test_floats_out_of_range_are_rejected(value):
    wrong = FLOATS.clone()
    wrong[2, 0, 0, 0] = value
    assert "from 0 to 255" in refused(InvalidParameter, wrong, "video", param=f"{PART}[2]")


@cases("kind", ["image", "video"])
@cases("rows", [ROWS, ROWS.numpy(), ROWS.bfloat16(), ROWS.half(), ROWS.double(), ROWS.numpy().T.copy().T])
@cases("grid", [(1, 4, 6), [[1, 4, 6]], torch.tensor([1, 4, 6]), np.array([[1, 4, 6]], np.int32)])
def test_embeddings_as_tensors_with_grid(kind, rows, grid):
    found = got({f"{kind}_embeds": rows, f"{kind}_grid_thw": grid}, kind)
    assert found.rows.dtype == np.float32
    assert np.array_equal(found.rows, torch.as_tensor(rows).float().numpy())
    assert (found.grid, found.kind, found.path) == ((1, 4, 6), kind, PART)


def test_embeddings_are_copied():
    rows = ROWS.numpy().copy()
    found = got({"image_embeds": rows, "image_grid_thw": (1, 4, 6)})
    rows[:] = 0
    assert np.array_equal(found.rows, ROWS.numpy())


def test_embeddings_as_text():
    text = base64.b64encode(save({"image_embeds": ROWS})).decode()
    found = got(EncodedEmbeddings(rows=text, grid=(1, 4, 6)))
    assert np.array_equal(found.rows, ROWS.numpy())
    refused(MediaTooLarge, EncodedEmbeddings(rows=text, grid=(1, 4, 6)), config={"image_max_bytes": 64})


@cases(
    ("content", "message"),
    [
        ({}, "`image_embeds` and `image_grid_thw`"),
        ({"image_embeds": ROWS}, "`image_embeds` and `image_grid_thw`"),
        ({"image_embeds": ROWS, "image_grid_thw": (1, 4, 6), "extra": 1}, "`image_embeds` and `image_grid_thw`"),
        ({"video_embeds": ROWS, "video_grid_thw": (1, 4, 6)}, "`image_embeds` and `image_grid_thw`"),
        ({"image_embeds": ROWS[None], "image_grid_thw": (1, 4, 6)}, "[tokens, hidden size]"),
        ({"image_embeds": ROWS.long(), "image_grid_thw": (1, 4, 6)}, "[tokens, hidden size]"),
        ({"image_embeds": ROWS.tolist(), "image_grid_thw": (1, 4, 6)}, "[tokens, hidden size]"),
        ({"image_embeds": ROWS, "image_grid_thw": (1, 4)}, "three positive integers"),
        ({"image_embeds": ROWS, "image_grid_thw": (1, 4, 6.0)}, "three positive integers"),
        ({"image_embeds": ROWS, "image_grid_thw": (1, 4, 0)}, "three positive integers"),
        ({"image_embeds": ROWS, "image_grid_thw": [[1, 4, 6], [1, 4, 6]]}, "three positive integers"),
        ({"image_embeds": ROWS, "image_grid_thw": [[1, 4], [6]]}, "three positive integers"),
        ({"image_embeds": ROWS, "image_grid_thw": None}, "three positive integers"),
    ],
)
def test_embeddings_of_wrong_shape_are_rejected(content, message):
    assert message in refused(InvalidParameter, content)


def test_fingerprint_depends_on_shape():
    same = np.zeros((20, 30, 3), np.uint8)
    contents = [
        (same, "image"),
        (same.reshape(30, 20, 3), "image"),
        (same[None], "video"),
        (same.reshape(1, 30, 20, 3), "video"),
        ({"image_embeds": np.zeros((6, 75), np.float32), "image_grid_thw": (1, 4, 6)}, "image"),
        ({"image_embeds": np.zeros((6, 75), np.float32), "image_grid_thw": (1, 6, 4)}, "image"),
    ]
    prints = [digest_media(got(content, kind)) for content, kind in contents]
    assert len(set(prints)) == len(contents)
    assert prints == [digest_media(got(content, kind)) for content, kind in contents]


def load_with_readers(*parts):
    return load(*parts, readers=READERS)


def load(*parts, readers=(), **config):
    async def run():
        loader = DecodingLoader(EngineConfig(**config), readers)
        try:
            return await loader.load(parts, lambda media: media)
        finally:
            await loader.close()

    return asyncio.run(run())


def test_loader_accepts_objects_and_urls_in_order():
    url = MediaPart(kind="image", path="a", url=image_url())
    found = load(url, part(RGB), part(FRAMES, "video"), part({"image_embeds": ROWS, "image_grid_thw": (1, 4, 6)}))
    assert [type(media).__name__ for media in found] == ["Image", "Image", "Video", "Embeddings"]


def test_loader_counts_objects():
    with pytest.raises(MediaTooLarge, match="up to 1 image"):
        load(part(RGB), part(RGB), limit_mm_per_prompt={"image": 1})


def test_object_with_uuid_has_source(tiny_checkpoint):
    def source_digest(content, **options):
        return run_with_pool(
            tiny_checkpoint, lambda pool: pool.process(part(content, **options), [], budget()), media_workers=0
        ).source_digest

    one, same, other = (source_digest(content, uuid="x") for content in (RGB, RGB.copy(), RGB[::-1]))
    assert one == same != other
    assert len(one) == 32
    assert source_digest(RGB) == b""
