"""Temporal patches of videos, encoded separately, have the visual tokens of the whole video, in all families."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.media import Image, Video
from dashinfer_vlm_core.models.patches import with_digest
from dashinfer_vlm_core.models.qwen2_vl import Qwen2VL
from dashinfer_vlm_core.vision import VisionService
from dashinfer_vlm_qwen2_5_vl import Qwen25VL
from dashinfer_vlm_qwen3_vl import Qwen3VL, Qwen35
from tests import tiny
from tests.kernels import selector
from tests.qwen3_5 import tiny_qwen3_5
from tests.qwen3_vl import tiny_qwen3
from tests.samples import noise

FAMILIES = {
    "qwen2_vl": (Qwen2VL, tiny.write_checkpoint),
    "qwen2_5_vl": (Qwen25VL, tiny.write_qwen2_5_vl),
    "qwen3_vl": (Qwen3VL, tiny_qwen3.write_checkpoint),
    "qwen3_5": (Qwen35, tiny_qwen3_5.write_checkpoint),
}
RECORDING = np.stack([noise(120, 160, seed) for seed in range(12)])


class CountingEncoder:
    """Passes batches on, and records their numbers of patches."""

    splits_videos = True
    batch_patches = 200

    def __init__(self, encoder):
        self._encoder = encoder
        self.patches = []

    def encode(self, batch):
        self.patches.append(sum(item.grid.patches for item in batch))
        return self._encoder.encode(batch)

    def adopt(self, rows):
        return self._encoder.adopt(rows)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """Return a function from media to patches, and the vision encoder of a family."""
    family_class, write = FAMILIES[request.param]
    family, config = family_class(), EngineConfig(device="cpu", dtype="float32")
    spec = family.load_spec(write(tmp_path_factory.mktemp(request.param)))
    processor = family.image_processor(spec, config)

    def patches(media):
        return with_digest(processor.process(media))

    return patches, family.load_vision_encoder(spec, config, selector(config))


def clip(start, stop):
    return Video(frames=RECORDING[start:stop], path="here")


def embed(encoder, *requests):
    """Embed the items of requests that arrive one after the other."""

    async def scene():
        service = VisionService(encoder, cache_bytes=1 << 24, batch_patches=encoder.batch_patches)
        try:
            return [await service.embed(items) for items in requests], service.stats
        finally:
            await service.close()

    return asyncio.run(scene())


def test_units_equal_whole_videos(model):
    """Even and odd numbers of frames, windows that move by two frames, and a batch with an image."""
    patches, encoder = model
    counting = CountingEncoder(encoder)
    clips = [patches(clip(*window)) for window in ((0, 8), (2, 10), (4, 11), (4, 12))]
    image = patches(Image(image=PILImage.fromarray(RECORDING[0]), path="there"))
    requests = [[clips[0], image], [clips[1]], [clips[2], clips[3]], [clips[3]]]
    found, stats = embed(counting, *requests)
    unit = clips[0].grid.h * clips[0].grid.w
    # The clip of seven frames ends with a pair of its own: its last frame and padding.
    assert sum(counting.patches) == image.grid.patches + unit * (4 + 1 + 2)
    assert (stats.encoded, stats.joins, stats.hits) == (8, 0, 3 + 3 + 3 + 4)
    for items, tokens in zip(requests, found, strict=True):
        for item, expected, row in zip(items, encoder.encode(items), tokens, strict=True):
            assert row.embedding.shape[0] == item.tokens
            torch.testing.assert_close(row.embedding, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_window_moved_by_one_frame_shares_no_pair(model):
    patches, encoder = model
    _, stats = embed(CountingEncoder(encoder), [patches(clip(0, 8))], [patches(clip(1, 9))])
    assert (stats.encoded, stats.hits) == (8, 0)
