"""Decode PNG, JPEG, WebP, GIF, BMP and TIFF images to upright RGB with Pillow."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

import numpy as np
from PIL import Image as PILImage

from ..errors import DashInferVLMError, InvalidParameter, MediaTooLarge, MediaUndecodable

MAX_ASPECT = 200
"""Maximum ratio of the longer side of an image to the shorter one."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_JPEG_SCANS = 500
"""Maximum number of scans of a JPEG, the limit that libjpeg-turbo sets for untrusted files in its fuzzers (libtiff's is
100). Encoders write about ten. A decoder goes through the whole image in each."""
MAX_JPEG_SEGMENTS = 1000
"""Maximum number of marker segments before the first scan. A color profile has at most 255, and other metadata of 20 MB
are about 300 segments of 64 kB, the maximum size. Pillow joins EXIF segments in quadratic time."""
MAX_JPEG_PADDING = 1 << 16
"""Maximum number of bytes between marker segments. There are usually none, and Pillow reads them one by one."""

_ORIENTATION = 0x0112
_UPRIGHT = {
    2: PILImage.Transpose.FLIP_LEFT_RIGHT,
    3: PILImage.Transpose.ROTATE_180,
    4: PILImage.Transpose.FLIP_TOP_BOTTOM,
    5: PILImage.Transpose.TRANSPOSE,
    6: PILImage.Transpose.ROTATE_270,
    7: PILImage.Transpose.TRANSVERSE,
    8: PILImage.Transpose.ROTATE_90,
}
_OPAQUE = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
_TRANSPARENT = ("LA", "La", "PA", "RGBA", "RGBa")

_METADATA_WARNINGS = ("ignore", None, UserWarning, re.compile(r"PIL\."), 0)
"""An entry of `warnings.filters`."""


def out_of_memory_error(kind: str, path: str) -> MediaTooLarge:
    return MediaTooLarge(
        f"Decoding the {kind} needs more memory than is allowed. Send a smaller {kind}, or save it again.", param=path
    )


def deadline_error(kind: str, path: str, seconds: float) -> MediaTooLarge:
    step = "Select fewer pages with `pages`" if kind == "document" else f"Send a smaller {kind}"
    return MediaTooLarge(
        f"Decoding the {kind} takes more than {seconds:g} seconds. {step}, or save it again.", param=path
    )


def decode_image(data: bytes, *, path: str, max_pixels: int, background: tuple[int, int, int]) -> PILImage.Image:
    """Decode the first frame of a PNG, JPEG, WebP, GIF, BMP or TIFF file.

    Every pixel format is converted to 8-bit RGB: palettes are resolved, 16-bit channels keep their upper 8 bits (as
    libpng and Pillow do for RGB), CMYK is converted without a color profile, transparency is composited on
    `background`, and the EXIF orientation is applied.

    Args:
        data: the encoded file.
        path: the image's path in the request, used in errors.
        max_pixels: maximum pixels, checked against the header before decoding.
        background: red, green and blue under transparent pixels.

    Returns:
        An upright image of mode RGB, fully loaded.

    Raises:
        MediaTooLarge: the image has more than `max_pixels` pixels.
        InvalidParameter: the image is only one pixel high or wide, or one side exceeds `MAX_ASPECT` times the other.
        MediaUndecodable: another format, damaged or truncated data, or a pixel format without a defined range.
    """
    with _errors(path), _open(data, path, max_pixels) as image:
        return convert_image(image, path=path, max_pixels=max_pixels, background=background)


def convert_image(
    image: PILImage.Image, *, path: str, max_pixels: int, background: tuple[int, int, int]
) -> PILImage.Image:
    """Convert an open image as `decode_image` does; may return `image` itself."""
    check_size(image.size, max_pixels, path)
    _check_coding(image, path)
    with _errors(path):
        image.load()
        if image.mode not in (*_OPAQUE, *_TRANSPARENT) and not image.mode.startswith("I;16"):
            raise MediaUndecodable(
                "An image of 32-bit integers or floats has no defined range. Convert it to RGB.", param=path
            )
        transpose = _UPRIGHT.get(_orientation(image))
        upright = _to_rgb(image, background)
        return upright if transpose is None else upright.transpose(transpose)


def count_pixels(data: bytes, *, path: str, max_pixels: int) -> int:
    """Count an image's pixels from its header, without decoding it. Raises the same errors as `decode_image`."""
    with _errors(path), _open(data, path, max_pixels) as image:
        check_size(image.size, max_pixels, path)
        _check_coding(image, path)
        return int(image.width * image.height)


def check_size(size: tuple[int, int], max_pixels: int, path: str) -> None:
    """Check the (width, height) of an image.

    Raises:
        MediaTooLarge: more than `max_pixels` pixels.
        InvalidParameter: only one pixel high or wide, or one side exceeds `MAX_ASPECT` times the other.
    """
    width, height = size
    if width * height > max_pixels:
        raise MediaTooLarge(
            f"The image has {width} x {height} pixels, more than the limit of {max_pixels} (`limits.max_decoded_pixels`"
            " of the engine). Send a smaller one.",
            param=path,
        )
    if min(size) < 2:
        raise InvalidParameter(
            f"The image has {width} x {height} pixels. Send one that is at least 2 pixels high and wide.", param=path
        )
    if max(size) > MAX_ASPECT * min(size):
        raise InvalidParameter(
            f"One side of {width} x {height} pixels is more than {MAX_ASPECT} times the other. Crop the image.",
            param=path,
        )


def _open(data: bytes, path: str, max_pixels: int) -> PILImage.Image:
    check_jpeg(data, path)
    _ignore_metadata_warnings()
    try:
        return PILImage.open(BytesIO(data), formats=FORMATS)
    except (PILImage.DecompressionBombError, PILImage.DecompressionBombWarning):
        check_size(_read_size(data), max_pixels, path)
        raise


def _read_size(data: bytes) -> tuple[int, int]:
    """Read the size of an image that has too many pixels for `PILImage.open`, whose error does not contain it."""
    for name in FORMATS:
        create, accept = PILImage.OPEN[name]
        if accept is not None and accept(data[:16]):
            with create(BytesIO(data), "") as image:
                return int(image.width), int(image.height)
    raise PILImage.DecompressionBombError


def check_jpeg(data: bytes, path: str) -> None:
    """Count what takes a decoder of JPEG files long, before one reads the file. Other files are not checked.

    Raises:
        MediaTooLarge: too many scans, too many marker segments, or too many bytes between these.
    """
    if not data.startswith(b"\xff\xd8\xff"):
        return
    # This marker cannot occur in coded data. It can in metadata, but hardly more often than 300 times in 20 MB.
    if data.count(b"\xff\xda") > MAX_JPEG_SCANS:
        raise _jpeg_error(f"more than {MAX_JPEG_SCANS} scans", path)
    segments, padding = _count_jpeg_segments(data)
    if segments > MAX_JPEG_SEGMENTS:
        raise _jpeg_error(f"more than {MAX_JPEG_SEGMENTS} segments of metadata", path)
    if padding > MAX_JPEG_PADDING:
        raise _jpeg_error(f"more than {MAX_JPEG_PADDING} bytes between its segments", path)


def _jpeg_error(reason: str, path: str) -> MediaTooLarge:
    return MediaTooLarge(f"The JPEG file has {reason}. Save the image again, without metadata.", param=path)


def _count_jpeg_segments(data: bytes) -> tuple[int, int]:
    """Count marker segments before the first scan, and the bytes between them, at most until one exceeds its limit.

    Markers are found as Pillow and libjpeg do: other bytes before them are skipped.
    """
    position = 2
    segments = 0
    padding = 0
    while segments <= MAX_JPEG_SEGMENTS and padding <= MAX_JPEG_PADDING:
        start = data.find(b"\xff", position)
        marker = data[start + 1 : start + 2]
        if start < 0 or marker in (b"", b"\xda"):
            break
        padding += start - position
        if marker in (b"\x00", b"\xff"):  # no marker: an escaped byte, or a fill byte
            padding += 1
            position = start + 2 - ord(marker) // 255
            continue
        segments += 1
        has_length = not 0xD0 <= marker[0] <= 0xD9
        length = max(2, int.from_bytes(data[start + 2 : start + 4], "big")) if has_length else 0
        position = start + 2 + length
    return segments, padding


def _ignore_metadata_warnings() -> None:
    """Ignore Pillow's warnings about damaged metadata, of which one file can cause tens of thousands.

    The filter is global: one that applies to a thread or a context exists only from Python 3.14 on. It is inserted
    again after an application has replaced the filters; a filter that an application inserts later takes precedence.
    """
    if _METADATA_WARNINGS not in warnings.filters:
        warnings.filterwarnings("ignore", category=UserWarning, module=_METADATA_WARNINGS[3].pattern)


def _check_coding(image: PILImage.Image, path: str) -> None:
    """Reject run-length encoded BMP: Pillow decodes it in Python, and a few kilobytes occupy a thread for many
    seconds."""
    if image.format == "BMP" and any(tile[0] == "bmp_rle" for tile in getattr(image, "tile", ())):
        raise MediaUndecodable("Run-length encoded BMP files are not supported. Save the image as PNG.", param=path)


def _to_rgb(image: PILImage.Image, background: tuple[int, int, int]) -> PILImage.Image:
    if image.mode.startswith("I;16"):
        image = _to_8_bits(image)
    if image.mode in _TRANSPARENT or "transparency" in image.info:
        return _compose(image.convert("RGBA"), background)
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_8_bits(image: PILImage.Image) -> PILImage.Image:
    # 8 bits alone cannot represent the transparent level (tRNS).
    levels = np.asarray(image)
    alpha = np.where(levels == image.info.get("transparency", -1), 0, 255)
    return PILImage.fromarray(np.stack([levels >> 8, alpha], axis=-1).astype(np.uint8))


def _compose(image: PILImage.Image, background: tuple[int, int, int]) -> PILImage.Image:
    canvas = PILImage.new("RGB", image.size, background)
    canvas.paste(image, mask=image.getchannel("A"))
    return canvas


def _orientation(image: PILImage.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001  Pillow's EXIF parser raises arbitrary exceptions on damaged data
        return 1


@contextmanager
def _errors(path: str) -> Iterator[None]:
    try:
        yield
    except DashInferVLMError:
        raise
    except MemoryError as error:
        raise out_of_memory_error("image", path) from error
    except (PILImage.DecompressionBombError, PILImage.DecompressionBombWarning) as error:
        raise MediaTooLarge("The image has too many pixels. Send a smaller one.", param=path) from error
    except Exception as error:  # Pillow's decoders raise arbitrary exceptions on damaged data
        raise MediaUndecodable(
            "This is not a complete PNG, JPEG, WebP, GIF, BMP or TIFF image. Save it again in one of these formats.",
            param=path,
        ) from error
