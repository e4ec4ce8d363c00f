"""A preview shows the vision encoder's input and has no side effects."""

from __future__ import annotations

import asyncio
import io

import numpy as np
import pytest
from PIL import Image as PILImage

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.errors import ContextLengthExceeded, InvalidParameter, MediaTooLarge, QueueFull
from dashinfer_vlm_core.media import Image, Video
from dashinfer_vlm_core.models.patches import unpatchify
from dashinfer_vlm_core.models.qwen2_vl.image_processor import Qwen2VLImageProcessor
from dashinfer_vlm_core.models.spec import PixelSpec
from dashinfer_vlm_core.preprocessing.preview import MAX_FRAMES, preview_media
from dashinfer_vlm_core.testing import Script, scripted_engine, scripted_registry
from tests.conversations import as_openai, blurred_image, user
from tests.samples import noise

SPEC = PixelSpec()
PROCESSOR = Qwen2VLImageProcessor(SPEC, EngineConfig())
PART = "messages[0].content[0]"


@pytest.fixture
def engine(tiny_checkpoint):
    with scripted_engine("Never asked.", model=str(tiny_checkpoint)) as engine:
        yield engine


def request(*parts):
    return {"messages": as_openai([user(*parts)])}


def make_frames(count):
    return np.stack([noise(56, 84, seed) for seed in range(count)])


def decode_png(frame):
    return np.asarray(PILImage.open(io.BytesIO(frame.png)))


def test_unpatchify_inverts_process():
    frames = make_frames(5)
    patches = Qwen2VLImageProcessor(SPEC, EngineConfig()).process(Video(frames=frames, path=PART))
    assert np.array_equal(unpatchify(patches.pixels, patches.grid, SPEC), [*frames, frames[-1]])


def test_image_preview_is_resized_like_pillow(engine):
    image = blurred_image(1, 300, 200)
    (item,) = engine.preview(request(image, "What is this?")).items
    (frame,) = item.frames
    assert (item.kind, item.path, item.source_size, item.frame_count) == ("image", PART, (300, 200), 1)
    assert np.array_equal(decode_png(frame), np.asarray(image.resize(item.size, PILImage.Resampling.BICUBIC)))
    assert item.tokens == item.size[0] * item.size[1] // 784


def test_preview_tokens_equal_usage(engine):
    body = request(blurred_image(1), [blurred_image(2)] * 3, "Compare.")
    preview, usage = engine.preview(body), engine.chat(body).usage
    assert preview.prompt_tokens == usage.prompt_tokens
    assert [item.kind for item in preview.items] == ["image", "video"]
    assert sum(item.tokens for item in preview.items) == sum(
        getattr(usage.prompt_tokens_details, f"{kind}_tokens") for kind in ("image", "video")
    )


def test_long_video_preview_shows_some_frames():
    clip = Video(frames=make_frames(41), path=PART)
    item = preview_media(PROCESSOR.process(clip), PROCESSOR, (28, 28))
    assert item.frame_count == 42
    assert len(item.frames) == MAX_FRAMES
    assert [item.frames[0].index, item.frames[-1].index] == [0, 41]


def test_preview_does_not_encode_decode_or_cache(tiny_checkpoint):
    script = Script("Never asked.")
    body = request(blurred_image(1), "What is this?")
    body["messages"][0]["content"][0]["uuid"] = "one"
    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")
    with Engine(config, registry=scripted_registry(script)) as engine:
        asyncio.run(engine.apreview(body))
        assert engine.stats().vision.passes == 0
        assert script.requests == []
        body["messages"][0]["content"][0] = {"type": "image_url", "uuid": "one"}
        with pytest.raises(InvalidParameter, match="cannot be previewed"):
            engine.preview(body)


def test_preview_has_request_limits(tiny_checkpoint):
    limits = {"max_model_len": 64, "max_batch_size": 1, "max_waiting": 0}
    with scripted_engine("Slow.", delay=60, model=str(tiny_checkpoint), **limits) as engine:
        with pytest.raises(ContextLengthExceeded):
            engine.preview(request(*[blurred_image(seed) for seed in range(4)]))
        with pytest.raises(MediaTooLarge, match="up to 32 image parts"):
            engine.preview(request(*[blurred_image(1)] * 33))
        running = engine.submit(request("Hello"))
        with pytest.raises(QueueFull):
            engine.preview(request("Hello"))
        running.cancel()


def test_fitting_image_is_unchanged():
    image = PILImage.fromarray(noise(56, 84))
    media = Image(image=image, path=PART)
    item = preview_media(PROCESSOR.process(media), PROCESSOR, image.size)
    assert np.array_equal(decode_png(item.frames[0]), np.asarray(image))
