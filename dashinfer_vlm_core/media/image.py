"""Bytes -> upright RGB pixels, by Pillow, for the six formats that the web uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

import numpy as np
from PIL import Image as PILImage

from ..errors import DashInferVLMError, InvalidParameter, MediaTooLarge, MediaUndecodable

MAX_ASPECT = 200
"""How many times longer one side of a picture may be than the other."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")

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


def decode_image(data: bytes, *, part: str, max_pixels: int, background: tuple[int, int, int]) -> PILImage.Image:
    """Decode the first frame of a PNG, JPEG, WebP, GIF, BMP or TIFF file.

    Whatever the file holds is brought to 8-bit RGB: palettes are looked up, of 16 bits the upper 8 are kept (as libpng
    and Pillow do for RGB), CMYK is converted without a colour profile, transparency is composed on `background`, and
    the EXIF orientation is applied.

    Args:
        data: the encoded file.
        part: names the picture in errors.
        max_pixels: most pixels, by the header, before anything is decoded.
        background: red, green and blue under transparent pixels.

    Returns:
        An upright picture of mode RGB, wholly in memory.

    Raises:
        MediaTooLarge: more pixels than `max_pixels`.
        InvalidParameter: a picture that is only one pixel high or wide.
        MediaUndecodable: another format, damaged or truncated data, or a pixel format without an agreed meaning.
    """
    with _errors(part), PILImage.open(BytesIO(data), formats=FORMATS) as image:
        return convert_image(image, part=part, max_pixels=max_pixels, background=background)


def convert_image(
    image: PILImage.Image, *, part: str, max_pixels: int, background: tuple[int, int, int]
) -> PILImage.Image:
    """As `decode_picture`, of a picture that is open already, which may be the result itself."""
    check_size(image.size, max_pixels, part)
    _check_coding(image, part)
    with _errors(part):
        image.load()
        if image.mode not in (*_OPAQUE, *_TRANSPARENT) and not image.mode.startswith("I;16"):
            raise MediaUndecodable(
                "A picture of 32-bit integers or floats has no agreed range; convert it to RGB.", param=part
            )
        return _upright(_to_rgb(image, background), _orientation(image))


def count_pixels(data: bytes, *, part: str, max_pixels: int) -> int:
    """The pixels of a picture as its header says, without decoding; raises as `decode_picture`."""
    with _errors(part), PILImage.open(BytesIO(data), formats=FORMATS) as image:
        width, height = size = (int(image.width), int(image.height))
        check_size(size, max_pixels, part)
        _check_coding(image, part)
        return width * height


def check_size(size: tuple[int, int], max_pixels: int, part: str) -> None:
    """Refuse a (width, height) of more than `max_pixels`, of a line, or of a strip.

    Raises:
        MediaTooLarge, InvalidParameter: it is.
    """
    width, height = size
    if width * height > max_pixels:
        raise MediaTooLarge(f"The picture has more than {max_pixels} pixels; send a smaller one.", param=part)
    if min(size) < 2:
        raise InvalidParameter(
            "The picture is only one pixel high or wide; send one with something to see.", param=part
        )
    if max(size) > MAX_ASPECT * min(size):
        raise InvalidParameter(
            f"One side of {width} x {height} pixels is more than {MAX_ASPECT} times the other; crop it.", param=part
        )


def _check_coding(image: PILImage.Image, part: str) -> None:
    """Pillow decodes run-length coded bitmaps in Python: a few kilobytes of one hold a thread for many seconds."""
    if image.format == "BMP" and any(tile[0] == "bmp_rle" for tile in getattr(image, "tile", ())):
        raise MediaUndecodable("Run-length coded BMP files are not read; save it as PNG.", param=part)


def _to_rgb(image: PILImage.Image, background: tuple[int, int, int]) -> PILImage.Image:
    if image.mode.startswith("I;16"):
        image = _to_8_bits(image)
    if image.mode in _TRANSPARENT or "transparency" in image.info:
        return _compose(image.convert("RGBA"), background)
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_8_bits(image: PILImage.Image) -> PILImage.Image:
    """16-bit grey to 8-bit grey with alpha, from which a transparent level (tRNS) can no longer be told otherwise."""
    levels = np.asarray(image)
    alpha = np.where(levels == image.info.get("transparency", -1), 0, 255)
    return PILImage.fromarray(np.stack([levels >> 8, alpha], axis=-1).astype(np.uint8))


def _compose(image: PILImage.Image, background: tuple[int, int, int]) -> PILImage.Image:
    canvas = PILImage.new("RGB", image.size, background)
    canvas.paste(image, mask=image.getchannel("A"))
    return canvas


def _orientation(image: PILImage.Image) -> int:
    """The EXIF orientation, 1 (upright) where there is none that can be read: a damaged note does not spoil a sound
    picture."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001  Pillow's EXIF parser raises whatever broken bytes lead it to
        return 1


def _upright(image: PILImage.Image, orientation: int) -> PILImage.Image:
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


@contextmanager
def _errors(part: str) -> Iterator[None]:
    """Pillow's failures in our words."""
    try:
        yield
    except DashInferVLMError:
        raise
    except (PILImage.DecompressionBombError, PILImage.DecompressionBombWarning) as error:
        raise MediaTooLarge("The picture has too many pixels; send a smaller one.", param=part) from error
    except Exception as error:  # Pillow's decoders raise whatever broken bytes lead them to
        raise MediaUndecodable(
            "This is no whole PNG, JPEG, WebP, GIF, BMP or TIFF picture; save it again in one of these formats.",
            param=part,
        ) from error
