"""Lines 6 to 8: decoding. What a picture becomes is told by what the model makes of it."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.samples import data_url, encode, encode_video, image_url, noise
from tests.security.conftest import LIMITS, film, image, picture, text, video

PART = "messages[0].content[0]"
WORDS = text("What is this?")
UPRIGHT = noise(20, 30)


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, rows=b""):
    """A PNG file whose header says what the arguments say, whatever its rows hold."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def sized(data, place, layout, *size):
    """The file with another width and height in its header."""
    return data[:place] + struct.pack(layout, *size) + data[place + struct.calcsize(layout) :]


def jpeg_of(width, height):
    data = encode(UPRIGHT, "JPEG")
    return sized(data, data.index(b"\xff\xc0") + 5, ">HH", height, width)


SMALL = Image.fromarray(UPRIGHT)

# Line 6: pixels are counted before they are decoded

BOMBS = {
    "PNG of 900 million pixels": png(30_000, 30_000),
    "PNG whose rows are all there": png(4000, 4000, bytes(4000 * 12_001)),
    "PNG as large as its header can say": png(2**31 - 1, 2**31 - 1),
    "JPEG": jpeg_of(65_000, 65_000),
    "GIF": sized(encode(SMALL, "GIF"), 6, "<HH", 65_535, 65_535),
    "BMP": sized(encode(SMALL, "BMP"), 18, "<ii", 2**30, 2**30),
    "one row above the cap": encode(np.zeros((1001, 1000, 3), np.uint8)),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_security_06_a_bomb_is_refused_by_its_header(open_door, bomb):
    open_door.refuses(picture(bomb), code="media_too_large")
    open_door.refuses(video([image_url(), data_url(bomb)]), param=f"{PART}.video_url.url[1]", code="media_too_large")


def other(codec, mode="RGB"):
    return encode(SMALL.convert(mode), codec)


HOSTILE = {
    "text": b"hello",
    "nothing": b"",
    "HTML": b"<html><script>alert(1)</script></html>",
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/etc/passwd) run",
    "PDF": other("PDF"),
    "ICO": other("ICO"),
    "PPM": other("PPM"),
    "TGA": other("TGA"),
    "PCX": other("PCX"),
    "XBM": other("XBM", "1"),
    "JPEG 2000": other("JPEG2000"),
    "a ZIP archive": b"PK\x05\x06" + bytes(18),
    "a video": encode_video(2),
    "half a PNG": encode(UPRIGHT)[:200],
    "half a JPEG": encode(noise(64, 64), "JPEG")[:800],
    "half a WebP": encode(UPRIGHT, "WEBP")[:100],
    "half a TIFF": encode(UPRIGHT, "TIFF")[:300],
    "a header alone": png(20, 30),
    "32-bit floats": encode(Image.new("F", (8, 8)), "TIFF"),
    "32-bit integers": encode(Image.new("I", (8, 8)), "TIFF"),
    "a damaged note of text": encode(UPRIGHT)[:33] + chunk(b"iTXt", b"\xff" * 40) + encode(UPRIGHT)[33:60],
    "a bomb of text": encode(UPRIGHT)[:33]
    + chunk(b"zTXt", b"a\x00\x00" + zlib.compress(bytes(5_000_000)))
    + encode(UPRIGHT)[33:],
}


@pytest.mark.parametrize("file", HOSTILE.values(), ids=HOSTILE)
def test_security_06_what_is_no_whole_picture_is_refused_in_fixed_words(open_door, file):
    message = open_door.refuses(picture(file), code="media_undecodable")
    assert message in {
        "This is no whole PNG, JPEG, WebP, GIF, BMP or TIFF picture; save it again in one of these formats.",
        "A picture of 32-bit integers or floats has no agreed range; convert it to RGB.",
    }


def archive():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("secret.html", "<script>")
    return buffer.getvalue()


POLYGLOTS = {
    "the archive behind the picture": encode(UPRIGHT) + archive(),
    "the page in a note of the picture": encode(UPRIGHT)[:33]
    + chunk(b"tEXt", b"Comment\x00<script>alert(1)</script>")
    + encode(UPRIGHT)[33:],
    "the picture behind its end": encode(UPRIGHT) + encode(noise(40, 40, 1)),
}


@pytest.mark.parametrize("file", POLYGLOTS.values(), ids=POLYGLOTS)
@pytest.mark.parametrize("kind", ["image/png", "image/jpeg", "text/html", "video/mp4"])
def test_security_06_of_a_file_that_is_two_things_the_picture_alone_counts(open_door, file, kind):
    assert open_door.sees(picture(file, kind), WORDS) == open_door.sees(picture(encode(UPRIGHT)), WORDS)


def turned(orientation):
    """UPRIGHT, stored so that the EXIF orientation turns it back."""
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


GREY16 = np.arange(600, dtype=np.uint16).reshape(20, 30) * 109
HALF = Image.fromarray(np.dstack([UPRIGHT, np.full((20, 30), 128, np.uint8)]))
ON_WHITE = Image.new("RGB", HALF.size, "white")
ON_WHITE.paste(HALF, mask=HALF.getchannel("A"))
PALETTE = SMALL.quantize(16)
FIRST = PALETTE.getpixel((0, 0))
HOLES = np.where((np.asarray(PALETTE) == FIRST)[..., None], 255, np.asarray(PALETTE.convert("RGB"))).astype(np.uint8)
CMYK = SMALL.convert("CMYK")
TWO = {"save_all": True, "append_images": [Image.fromarray(noise(20, 30, 9))]}

# Name: (the file, the plain RGB picture that people see in it)
LOOKS = {
    **{f"EXIF orientation {number}": (turned(number), encode(UPRIGHT)) for number in range(1, 9)},
    "palette": (encode(PALETTE), flattened(PALETTE)),
    "a transparent colour (tRNS)": (encode(PALETTE, transparency=FIRST), encode(HOLES)),
    "half transparent": (encode(HALF), encode(ON_WHITE)),
    "grey of 16 bits": (
        encode(Image.fromarray(GREY16)),
        encode(Image.fromarray((GREY16 >> 8).astype(np.uint8)).convert("RGB")),
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


@pytest.mark.parametrize(("stored", "shown"), LOOKS.values(), ids=LOOKS)
def test_security_06_the_model_sees_what_people_see(open_door, stored, shown):
    assert open_door.sees(picture(stored), WORDS) == open_door.sees(picture(shown), WORDS)


def test_security_06_what_the_model_sees_differs_where_the_pictures_do(open_door):
    """Else the tests above could not fail."""
    sideways = encode(SMALL.transpose(Image.Transpose.ROTATE_180))
    assert open_door.sees(picture(sideways), WORDS) != open_door.sees(picture(encode(UPRIGHT)), WORDS)


# Line 7: videos and lists of frames

FILMS = {
    "too long": (lambda: encode_video(12, fps=2), {}, PART, "media_too_large"),
    "frames too large": (lambda: encode_video(2, height=1200, width=1600), {}, PART, "media_too_large"),
    "no video": (lambda: encode(UPRIGHT), {}, PART, "media_undecodable"),
    "a playlist": (
        lambda: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        {},
        PART,
        "media_undecodable",
    ),
    "a list of files to join": (lambda: b"ffconcat version 1.0\nfile /etc/passwd\n", {}, PART, "media_undecodable"),
    "half a video": (lambda: encode_video(12)[:900], {}, PART, "media_undecodable"),
    "more frames than allowed": (lambda: encode_video(12), {"num_frames": 18}, f"{PART}.video_url.num_frames", ""),
    "a rate beyond all rates": (lambda: encode_video(12), {"fps": 1e6}, f"{PART}.video_url.fps", ""),
}


@pytest.mark.parametrize(("made", "options", "param", "code"), FILMS.values(), ids=FILMS)
def test_security_07_a_video_beyond_the_limits_is_refused(open_door, made, options, param, code):
    open_door.refuses(film(made(), **options), WORDS, param=param, code=code)


def test_security_07_a_request_lowers_the_number_of_frames_and_cannot_raise_it(open_door):
    long = encode_video(40, fps=10)
    few, most, more = (
        open_door.sees(film(long, **asked), WORDS)[0] for asked in ({"num_frames": 4}, {"fps": 4}, {"fps": 900})
    )
    assert few < most == more


def test_security_07_a_request_cannot_raise_the_pixels_of_frames(open_door):
    clip = encode_video(8, height=200, width=300)
    usual = open_door.sees(film(clip), WORDS)
    for asked in ({"max_pixels": 10**8}, {"total_pixels": 2 * 10**9}):
        assert open_door.sees(film(clip, **asked), WORDS) == usual


@pytest.mark.parametrize("count", [17, 4097])
def test_security_07_lists_of_frames_are_capped_as_well(open_door, count):
    """Before one is decoded: these are no pictures at all."""
    for url in ([data_url(b"x")] * count, "data:video/jpeg;base64," + ",".join(["eA=="] * count)):
        open_door.refuses(video(url), param=f"{PART}.video_url.url")


def test_security_07_frames_of_a_list_have_the_byte_cap_of_one_video(open_door):
    frames = [encode(noise(170, 170, seed)) for seed in range(4)]
    assert max(map(len, frames)) < LIMITS["image_max_bytes"]
    assert sum(map(len, frames)) > LIMITS["video_max_bytes"]
    open_door.refuses(video([data_url(frame) for frame in frames]), code="media_too_large")


# Line 8: extreme sizes

SIZES = {
    "1x1": (1, 1),
    "1x20000": (1, 20_000),
    "20000x1": (20_000, 1),
    "2x402": (2, 402),
    "402x2": (402, 2),
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_security_08_extreme_sizes_are_refused(open_door, size):
    file = encode(Image.new("RGB", size))
    open_door.refuses(picture(file), code="invalid_value")
    open_door.refuses(video([data_url(file)] * 2), param=f"{PART}.video_url.url[0]", code="invalid_value")


def test_security_08_nothing_to_see_is_refused(open_door):
    for size in ((0, 30), (20, 0), (0, 0)):
        open_door.refuses(picture(png(*size)))
    open_door.refuses(video([]), param=f"{PART}.video_url.url")
    open_door.refuses(image(""), param=f"{PART}.image_url.url")


def test_security_08_the_extremes_that_are_allowed_are_seen(open_door):
    for size in ((2, 2), (2, 400), (400, 2)):
        assert open_door.ask(picture(encode(Image.new("RGB", size)))).status_code == 200
