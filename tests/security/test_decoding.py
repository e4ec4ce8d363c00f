"""Rules 6 to 8: decoding. Decoded images are compared by the model's response to them."""

from __future__ import annotations

import contextlib
import io
import re
import struct
import zipfile
import zlib

import av
import numpy as np
import pytest
from PIL import Image

from dashinfer_vlm_core.media.readers import CODECS
from dashinfer_vlm_core.media_workers.self_test import SAMPLES
from tests.samples import data_url, encode, encode_video, image_url, noise
from tests.security.conftest import LIMITS, image, image_data, text, video, video_data

PART = "messages[0].content[0]"
WORDS = text("What is this?")
UPRIGHT = noise(20, 30)


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, rows=b""):
    """Return a PNG file with this size in its header, regardless of its rows."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def with_size(data, place, layout, *size):
    """Return the file with another width and height in its header."""
    return data[:place] + struct.pack(layout, *size) + data[place + struct.calcsize(layout) :]


def jpeg_of(width, height):
    data = encode(UPRIGHT, "JPEG")
    return with_size(data, data.index(b"\xff\xc0") + 5, ">HH", height, width)


SMALL = Image.fromarray(UPRIGHT)

# Rule 6: pixels are counted before they are decoded

BOMBS = {
    "PNG of 900 million pixels": png(30_000, 30_000),
    "PNG with all of its rows": png(4000, 4000, bytes(4000 * 12_001)),
    "PNG of the maximum size in a header": png(2**31 - 1, 2**31 - 1),
    "JPEG": jpeg_of(65_000, 65_000),
    "GIF": with_size(encode(SMALL, "GIF"), 6, "<HH", 65_535, 65_535),
    "BMP": with_size(encode(SMALL, "BMP"), 18, "<ii", 2**30, 2**30),
    "one row over the limit": encode(np.zeros((1001, 1000, 3), np.uint8)),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_security_06_image_bomb_is_rejected_by_its_header(open_server, bomb):
    message = open_server.rejection(image_data(bomb), code="media_too_large")
    assert re.fullmatch(r"The image has \d+ x \d+ pixels, more than the limit of \d+ \(.*\)\. Send .*", message)
    open_server.rejection(
        video([image_url(), data_url(bomb)]), param=f"{PART}.video_url.url[1]", code="media_too_large"
    )


def encoded(codec, mode="RGB"):
    return encode(SMALL.convert(mode), codec)


INVALID = {
    "text": b"hello",
    "nothing": b"",
    "HTML": b"<html><script>alert(1)</script></html>",
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run",
    "PDF": encoded("PDF"),
    "ICO": encoded("ICO"),
    "PPM": encoded("PPM"),
    "TGA": encoded("TGA"),
    "PCX": encoded("PCX"),
    "XBM": encoded("XBM", "1"),
    "JPEG 2000": encoded("JPEG2000"),
    "a ZIP archive": b"PK\x05\x06" + bytes(18),
    "a video": encode_video(2),
    "half a PNG": encode(UPRIGHT)[:200],
    "half a JPEG": encode(noise(64, 64), "JPEG")[:800],
    "half a WebP": encode(UPRIGHT, "WEBP")[:100],
    "half a TIFF": encode(UPRIGHT, "TIFF")[:300],
    "only a header": png(20, 30),
    "32-bit floats": encode(Image.new("F", (8, 8)), "TIFF"),
    "32-bit integers": encode(Image.new("I", (8, 8)), "TIFF"),
    "a damaged text chunk": encode(UPRIGHT)[:33] + chunk(b"iTXt", b"\xff" * 40) + encode(UPRIGHT)[33:60],
    "a text chunk bomb": encode(UPRIGHT)[:33]
    + chunk(b"zTXt", b"a\x00\x00" + zlib.compress(bytes(5_000_000)))
    + encode(UPRIGHT)[33:],
}


@pytest.mark.parametrize("file", INVALID.values(), ids=INVALID)
def test_security_06_invalid_image_gets_a_fixed_message(open_server, file):
    message = open_server.rejection(image_data(file), code="media_undecodable")
    assert message in {
        "This is not a complete PNG, JPEG, WebP, GIF, BMP or TIFF image. Save it again in one of these formats.",
        "The file of the image has 0 bytes. Save it again.",
        "An image of 32-bit integers or floats has no defined range. Convert it to RGB.",
    }


def archive():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("secret.html", "<script>")
    return buffer.getvalue()


POLYGLOTS = {
    "an archive after the image": encode(UPRIGHT) + archive(),
    "a page in a text chunk": encode(UPRIGHT)[:33]
    + chunk(b"tEXt", b"Comment\x00<script>alert(1)</script>")
    + encode(UPRIGHT)[33:],
    "an image after the end": encode(UPRIGHT) + encode(noise(40, 40, 1)),
}


@pytest.mark.parametrize("file", POLYGLOTS.values(), ids=POLYGLOTS)
@pytest.mark.parametrize("kind", ["image/png", "image/jpeg", "text/html", "video/mp4"])
def test_security_06_polyglot_is_read_as_its_image_only(open_server, file, kind):
    assert open_server.fingerprint(image_data(file, kind), WORDS) == open_server.fingerprint(
        image_data(encode(UPRIGHT)), WORDS
    )


def rotated(orientation):
    """Return UPRIGHT, stored so that the EXIF orientation restores it."""
    undo = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(SMALL.transpose(undo) if undo is not None else SMALL, exif=exif)


def flattened(stored):
    return encode(stored.convert("RGB"))


GRAY16 = np.arange(600, dtype=np.uint16).reshape(20, 30) * 109
HALF = Image.fromarray(np.dstack([UPRIGHT, np.full((20, 30), 128, np.uint8)]))
ON_WHITE = Image.new("RGB", HALF.size, "white")
ON_WHITE.paste(HALF, mask=HALF.getchannel("A"))
PALETTE = SMALL.quantize(16)
FIRST = PALETTE.getpixel((0, 0))
HOLES = np.where((np.asarray(PALETTE) == FIRST)[..., None], 255, np.asarray(PALETTE.convert("RGB"))).astype(np.uint8)
CMYK = SMALL.convert("CMYK")
TWO = {"save_all": True, "append_images": [Image.fromarray(noise(20, 30, 9))]}

# Name: (the file, the RGB image that a person sees in it)
EQUIVALENT = {
    **{f"EXIF orientation {number}": (rotated(number), encode(UPRIGHT)) for number in range(1, 9)},
    "palette": (encode(PALETTE), flattened(PALETTE)),
    "a transparent color (tRNS)": (encode(PALETTE, transparency=FIRST), encode(HOLES)),
    "half transparent": (encode(HALF), encode(ON_WHITE)),
    "16-bit grayscale": (
        encode(Image.fromarray(GRAY16)),
        encode(Image.fromarray((GRAY16 >> 8).astype(np.uint8)).convert("RGB")),
    ),
    "CMYK": (encode(CMYK, "TIFF"), flattened(CMYK)),
    "black and white": (encode(SMALL.convert("1")), flattened(SMALL.convert("1"))),
    "APNG": (encode(SMALL, **TWO), encode(UPRIGHT)),
    "animated WebP": (encode(SMALL, "WEBP", lossless=True, **TWO), encode(UPRIGHT)),
    "TIFF of two pages": (encode(SMALL, "TIFF", **TWO), encode(UPRIGHT)),
    "animated GIF": (
        encode(PALETTE, "GIF", save_all=True, append_images=[Image.fromarray(noise(20, 30, 9)).quantize(16)]),
        flattened(PALETTE),
    ),
}


@pytest.mark.parametrize(("stored", "shown"), EQUIVALENT.values(), ids=EQUIVALENT)
def test_security_06_model_sees_what_a_person_sees(open_server, stored, shown):
    assert open_server.fingerprint(image_data(stored), WORDS) == open_server.fingerprint(image_data(shown), WORDS)


def test_security_06_different_images_look_different(open_server):
    """Otherwise the tests above could not fail."""
    sideways = encode(SMALL.transpose(Image.Transpose.ROTATE_180))
    assert open_server.fingerprint(image_data(sideways), WORDS) != open_server.fingerprint(
        image_data(encode(UPRIGHT)), WORDS
    )


# Rule 7: videos and lists of frames

VIDEOS = {
    "too long": (lambda: encode_video(12, fps=2), {}, PART, "media_too_large"),
    "frames too large": (lambda: encode_video(2, height=1200, width=1600), {}, PART, "media_too_large"),
    "not a video": (lambda: encode(UPRIGHT), {}, PART, "media_undecodable"),
    "a playlist": (
        lambda: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        {},
        PART,
        "media_undecodable",
    ),
    "a list of files to join": (lambda: b"ffconcat version 1.0\nfile /etc/passwd\n", {}, PART, "media_undecodable"),
    "half a video": (lambda: encode_video(12)[:900], {}, PART, "media_undecodable"),
    "more frames than allowed": (lambda: encode_video(12), {"num_frames": 18}, f"{PART}.video_url.num_frames", ""),
    "an excessive frame rate": (lambda: encode_video(12), {"fps": 1e6}, f"{PART}.video_url.fps", ""),
}


@pytest.mark.parametrize(("make", "options", "param", "code"), VIDEOS.values(), ids=VIDEOS)
def test_security_07_video_over_the_limits_is_rejected(open_server, make, options, param, code):
    open_server.rejection(video_data(make(), **options), WORDS, param=param, code=code)


@pytest.mark.parametrize(("codec", "is_decoded"), [("ffvhuff", False), ("snow", False), ("mpeg4", True)])
def test_security_07_rare_codec_is_rejected(open_server, codec, is_decoded):
    """FFmpeg decodes all of them."""
    part = video_data(encode_video(4, container="avi", codec=codec))
    if is_decoded:
        assert open_server.chat(part, WORDS).status_code == 200
    else:
        open_server.rejection(part, WORDS, code="media_undecodable")


def test_security_07_codecs_are_tested():
    """The sample files have every codec. `av1` is the name of AV1 in builds of FFmpeg without dav1d."""
    samples = (file.read_bytes() for file in SAMPLES.iterdir() if file.stem not in {"image", "document"})
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(av.open(io.BytesIO(data))) for data in samples]
        assert {file.streams.video[0].codec_context.codec.name for file in files} == {*CODECS} - {"av1"}


def test_security_07_request_can_only_lower_frames(open_server):
    long = encode_video(40, fps=10)
    few, most, more = (
        open_server.fingerprint(video_data(long, **options), WORDS)[0]
        for options in ({"num_frames": 4}, {"fps": 4}, {"fps": 900})
    )
    assert few < most == more


def test_security_07_request_cannot_raise_frame_pixels(open_server):
    data = encode_video(8, height=200, width=300)
    usual = open_server.fingerprint(video_data(data), WORDS)
    for options in ({"max_pixels": 10**8}, {"total_pixels": 2 * 10**9}):
        assert open_server.fingerprint(video_data(data, **options), WORDS) == usual


@pytest.mark.parametrize("count", [17, 4097])
def test_security_07_lists_of_frames_are_limited(open_server, count):
    """The limit applies before decoding: these frames are not images."""
    for url in ([data_url(b"x")] * count, "data:video/jpeg;base64," + ",".join(["eA=="] * count)):
        open_server.rejection(video(url), param=f"{PART}.video_url.url")


def test_security_07_list_of_frames_has_the_byte_limit_of_a_video(open_server):
    frames = [encode(noise(170, 170, seed)) for seed in range(4)]
    assert max(map(len, frames)) < LIMITS["image_max_bytes"]
    assert sum(map(len, frames)) > LIMITS["video_max_bytes"]
    open_server.rejection(video([data_url(frame) for frame in frames]), code="media_too_large")


# Rule 8: extreme sizes

SIZES = {
    "1x1": (1, 1),
    "1x20000": (1, 20_000),
    "20000x1": (20_000, 1),
    "2x402": (2, 402),
    "402x2": (402, 2),
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_security_08_extreme_sizes_are_rejected(open_server, size):
    file = encode(Image.new("RGB", size))
    open_server.rejection(image_data(file), code="invalid_value")
    open_server.rejection(video([data_url(file)] * 2), param=f"{PART}.video_url.url[0]", code="invalid_value")


def test_security_08_empty_media_is_rejected(open_server):
    for size in ((0, 30), (20, 0), (0, 0)):
        open_server.rejection(image_data(png(*size)))
    open_server.rejection(video([]), param=f"{PART}.video_url.url")
    open_server.rejection(image(""), param=f"{PART}.image_url.url")


def test_security_08_extreme_allowed_sizes_are_accepted(open_server):
    for size in ((2, 2), (2, 400), (400, 2)):
        assert open_server.chat(image_data(encode(Image.new("RGB", size)))).status_code == 200
