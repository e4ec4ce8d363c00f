"""Images of every kind, and files that pretend to be images."""

from __future__ import annotations

import struct
import zlib
from contextlib import suppress
from io import BytesIO

import numpy as np
import pytest
from PIL import Image, ImageOps

from dashinfer_vlm_core.errors import InvalidParameter, MediaTooLarge, MediaUndecodable
from dashinfer_vlm_core.media.image import count_pixels, decode_image
from tests.cases import cases
from tests.samples import encode, noise

PART = "messages[0].content[0]"
WHITE = (255, 255, 255)


def decoded(data, *, max_pixels=1_000_000, background=WHITE):
    return np.asarray(decode_image(data, path=PART, max_pixels=max_pixels, background=background))


def png(width, height, *, depth=8, rows=b""):
    """Return a PNG file with a header of these arguments, regardless of its rows."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("codec", ["PNG", "BMP", "TIFF", "WEBP"])
def test_lossless_formats_round_trip(codec):
    picture = noise(21, 33)
    options = {"lossless": True} if codec == "WEBP" else {}
    pixels = decoded(encode(picture, codec, **options))
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, picture)


def test_jpeg_is_decoded_as_in_pillow():
    data = encode(noise(300, 500), "JPEG")
    with Image.open(BytesIO(data)) as image:
        np.testing.assert_array_equal(decoded(data), np.asarray(image))


@pytest.mark.parametrize("mode", ["1", "L", "P"])
def test_other_modes_are_converted_to_rgb(mode):
    image = Image.fromarray(noise(16, 16)).convert(mode)
    np.testing.assert_array_equal(decoded(encode(image)), np.asarray(image.convert("RGB")))


def test_cmyk_jpeg_and_tiff_are_converted_to_rgb():
    image = Image.new("CMYK", (8, 8), (255, 0, 0, 0))
    for codec in ("JPEG", "TIFF"):
        assert np.abs(decoded(encode(image, codec)).astype(int) - (0, 255, 255)).max() <= 2


def test_16_bit_gray_keeps_upper_8_bits():
    levels = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16) + 77
    for codec in ("PNG", "TIFF"):
        pixels = decoded(encode(Image.fromarray(levels), codec))
        np.testing.assert_array_equal(pixels, np.repeat((levels >> 8)[..., None], 3, axis=-1))


def test_big_endian_16_bit_gray_keeps_upper_8_bits():
    levels = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16) + 77
    image = Image.frombytes("I;16B", (16, 16), levels.astype(">u2").tobytes())
    np.testing.assert_array_equal(decoded(encode(image, "TIFF"))[..., 0], levels >> 8)


def test_16_bit_rgb_keeps_upper_8_bits():
    levels = np.random.default_rng(0).integers(0, 65536, (4, 5, 3))
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in levels)
    np.testing.assert_array_equal(decoded(png(5, 4, depth=16, rows=rows)), levels >> 8)


def test_32_bit_image_is_rejected():
    for dtype in (np.int32, np.float32):
        with pytest.raises(MediaUndecodable):
            decoded(encode(Image.fromarray(np.ones((4, 4), dtype)), "TIFF"))


@pytest.mark.parametrize("background", [WHITE, (0, 0, 0), (10, 200, 30)])
def test_transparency_is_composited_on_background(background):
    rgba = np.dstack([noise(4, 4), np.array([0, 64, 128, 255] * 4, np.uint8).reshape(4, 4)])
    alpha = rgba[..., 3:] / 255
    expected = rgba[..., :3] * alpha + np.array(background) * (1 - alpha)
    for codec, options in (("PNG", {}), ("WEBP", {"lossless": True, "exact": True}), ("TIFF", {})):
        pixels = decoded(encode(Image.fromarray(rgba), codec, **options), background=background)
        assert np.abs(pixels - expected).max() <= 1


def test_gray_with_alpha_is_composited_on_background():
    pixels = decoded(encode(Image.fromarray(np.array([[[9, 255], [9, 0]]] * 2, np.uint8), "LA")))
    assert pixels[0].tolist() == [[9, 9, 9], [255, 255, 255]]


@pytest.mark.parametrize(
    ("mode", "opaque", "clear"),
    [("P", 1, 0), ("L", 7, 9), ("RGB", (1, 2, 3), (9, 9, 9)), ("1", 0, 255), ("I;16", 7, 9)],
)
def test_transparent_color_of_png_shows_background(mode, opaque, clear):
    image = Image.new("L" if mode == "I;16" else mode, (2, 2))
    if mode == "I;16":
        image = Image.fromarray(np.full((2, 2), 7, np.uint16))
    if mode == "P":
        image.putpalette([50, 60, 70, 1, 2, 3])
    for y in range(2):
        image.putpixel((0, y), opaque)
        image.putpixel((1, y), clear)
    pixels = decoded(encode(image, transparency=1 if mode == "1" else clear), background=(250, 0, 0))
    assert pixels[0, 1].tolist() == [250, 0, 0]
    assert pixels[0, 0].tolist() != [250, 0, 0]


def test_palette_with_partial_transparency():
    image = Image.new("P", (2, 2), 1)
    image.putpalette([0, 0, 0, 100, 100, 100])
    pixels = decoded(encode(image, transparency=bytes([255, 51])))
    assert np.abs(pixels.astype(int) - (255 * 0.8 + 100 * 0.2)).max() <= 1


@cases("codec", ["JPEG", "PNG", "WEBP", "TIFF"])
@cases("orientation", range(1, 9))
def test_exif_orientation_is_applied(codec, orientation):
    image = Image.fromarray(np.kron(noise(3, 4), np.ones((16, 16, 1), np.uint8)))
    options = {"quality": 100, "subsampling": 0} if codec == "JPEG" else {}
    stored = Image.fromarray(decoded(encode(image, codec, **options)))
    exif = stored.getexif()
    exif[0x0112] = orientation
    upright = np.asarray(ImageOps.exif_transpose(stored))
    np.testing.assert_array_equal(decoded(encode(image, codec, exif=exif, **options)), upright)


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\x7f", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"]
)
def test_damaged_exif_is_ignored(exif):
    picture = noise(8, 8)
    np.testing.assert_array_equal(decoded(encode(picture, exif=exif)), picture)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_unknown_orientation_is_ignored(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert decoded(encode(noise(8, 9), exif=exif)).shape == (8, 9, 3)


@pytest.mark.parametrize("codec", ["GIF", "PNG", "WEBP", "TIFF"])
def test_first_of_several_frames_is_used(codec):
    frames = [Image.new("RGB", (9, 7), color) for color in ((250, 0, 0), (0, 250, 0), (0, 0, 250))]
    options = {"lossless": True} if codec == "WEBP" else {}
    data = encode(frames[0], codec, save_all=True, append_images=frames[1:], **options)
    assert decoded(data).tolist() == [[[250, 0, 0]] * 9] * 7


def test_decompression_bomb_is_rejected_by_header():
    for width, height in ((30_000, 30_000), (8001, 8000), (2**31 - 1, 2**31 - 1), (2, 2**30)):
        for read in (decode_image, count_pixels):
            options = {"background": WHITE} if read is decode_image else {}
            with pytest.raises(MediaTooLarge, match=f"{width} x {height} pixels, .* 64000000") as caught:
                read(png(width, height), path=PART, max_pixels=64_000_000, **options)
            assert caught.value.param == PART


def test_extreme_aspect_ratio_is_rejected_by_header():
    for width, height in ((402, 2), (2, 402), (20_000, 99)):
        with pytest.raises(InvalidParameter, match="200 times"):
            decode_image(png(width, height), path=PART, max_pixels=64_000_000, background=WHITE)


def test_run_length_encoded_bitmap_is_rejected():
    """Pillow decodes them in Python and would take many seconds for 33 kilobytes."""
    header = struct.pack("<IiiHHIIiiII", 40, 8, 8, 1, 8, 1, 0, 0, 0, 256, 0)
    pixels = b"\x08\x01\x00\x00" * 8 + b"\x00\x01"
    start = 14 + len(header) + 1024  # after the palette
    data = b"BM" + struct.pack("<IHHI", start + len(pixels), 0, 0, start) + header + bytes(1024) + pixels
    assert Image.open(BytesIO(data)).size == (8, 8)
    with pytest.raises(MediaUndecodable, match="Run-length"):
        decoded(data)


def test_pixel_limit_is_exact():
    data = encode(noise(10, 10))
    assert decoded(data, max_pixels=100).shape == (10, 10, 3)
    with pytest.raises(MediaTooLarge):
        decoded(data, max_pixels=99)


@pytest.mark.parametrize("shape", [(1, 1), (1, 100), (20_000, 1)])
def test_one_pixel_wide_image_is_rejected(shape):
    with pytest.raises(InvalidParameter) as caught:
        decoded(encode(noise(*shape)))
    assert caught.value.param == PART


def test_smallest_image_is_two_by_two():
    assert decoded(encode(noise(2, 2))).shape == (2, 2, 3)


@cases("codec", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
@cases("share", [0.02, 0.5, 0.97])
def test_truncated_files_are_undecodable(codec, share):
    data = encode(noise(64, 64), codec)
    with pytest.raises(MediaUndecodable) as caught:
        decoded(data[: int(len(data) * share)])
    assert caught.value.param == PART


@cases(
    "data",
    [
        b"",
        b"\x00",
        b"\xff\xd8",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7",
        b"<!DOCTYPE html>",
        b"RIFF\x00\x00\x00\x00WEBP",
        b"\x89PNG\r\n\x1a\n",
        b"GIF89a",
        b"BM",
        b"II*\x00",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    ],
)
def test_non_image_is_undecodable(data):
    with pytest.raises(MediaUndecodable):
        decoded(data)


@cases("codec", ["PPM", "TGA", "PCX", "ICO", "JPEG2000", "EPS", "PDF", "DDS", "SGI"])
def test_other_formats_are_not_tried(codec):
    with pytest.raises(MediaUndecodable):
        decoded(encode(noise(16, 16), codec))


@cases("codec", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
def test_damaged_file_is_decoded_or_rejected(codec):
    rng = np.random.default_rng(1)
    sound = encode(noise(24, 24), codec)
    for _ in range(150):
        damaged = bytearray(sound)
        for position in rng.integers(0, len(damaged), 3):
            damaged[position] = rng.integers(0, 256)
        with suppress(MediaUndecodable, MediaTooLarge, InvalidParameter):
            assert decoded(bytes(damaged)).shape[2] == 3
