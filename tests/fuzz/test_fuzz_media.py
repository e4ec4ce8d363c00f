"""Damaged images and videos, from a data: URL to patches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from PIL import Image

from dashinfer_vlm_core.concurrency.loop import LoopThread
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import RequestError
from dashinfer_vlm_core.media import READERS
from dashinfer_vlm_core.models.qwen2_vl.image_processor import Qwen2VLImageProcessor
from dashinfer_vlm_core.models.spec import PixelSpec
from dashinfer_vlm_core.protocol import MediaPart
from tests.decoding_loader import DecodingLoader
from tests.fuzz.mutations import damaged_bytes
from tests.samples import data_url, encode, encode_video, noise

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # for all cases; each one is timed separately

SHARE = settings.default.max_examples
PART = "messages[0].content[0]"

SMALL = Image.fromarray(noise(24, 24))
EXIF = Image.Exif()
EXIF[0x0112] = 6
TWO = {"save_all": True, "append_images": [Image.fromarray(noise(24, 24, 1))]}
IMAGES = [
    *(encode(SMALL, codec) for codec in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")),
    *(encode(SMALL.convert(mode)) for mode in ("1", "L", "P", "LA", "RGBA", "I;16")),
    *(encode(SMALL.convert("CMYK"), codec) for codec in ("JPEG", "TIFF")),
    *(encode(SMALL, "TIFF", compression=name) for name in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")),
    *(encode(SMALL, codec, **TWO) for codec in ("PNG", "GIF", "WEBP", "TIFF")),
    encode(SMALL, "JPEG", exif=EXIF, progressive=True),
    encode(SMALL, "WEBP", lossless=True, exif=EXIF),
    encode(SMALL.quantize(8), transparency=1),
]
VIDEOS = [encode_video(6, container=name) for name in ("mp4", "matroska", "webm", "avi", "mpegts", "mov")]


@pytest.fixture(scope="module")
def load():
    config = EngineConfig(limits={"max_decoded_pixels": 200_000}, video_max_frames=16)
    processor, loop = Qwen2VLImageProcessor(PixelSpec(), config), LoopThread("fuzz")
    loader = DecodingLoader(config, READERS)

    def load(part):
        (patches,) = loop.call(loader.load([part], then=processor.process))
        return patches

    yield load
    loop.stop(cleanup=loader.close())


def check_error(error):
    assert error.param.startswith(PART)
    assert len(error.message) < 300


def check(load, part):
    try:
        patches = load(part)
    except RequestError as error:
        check_error(error)
    else:
        assert patches.grid.patches == len(patches.pixels) > 0


@settings(max_examples=2 * SHARE)
@given(damaged_bytes(IMAGES))
def test_damaged_image_is_processed_or_rejected(monitor, load, file):
    with monitor.case():
        check(load, MediaPart(kind="image", path=PART, url=data_url(file)))


@settings(max_examples=SHARE)
@given(damaged_bytes(VIDEOS))
def test_damaged_video_is_processed_or_rejected(monitor, load, file):
    with monitor.case():
        check(load, MediaPart(kind="video", path=PART, url=data_url(file)))


@pytest.mark.parametrize(("kind", "files"), [("image", IMAGES), ("video", VIDEOS)])
def test_valid_file_is_processed(load, kind, files):
    for file in files:
        assert load(MediaPart(kind=kind, path=PART, url=data_url(file))).tokens
