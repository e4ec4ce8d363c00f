"""Positions of objects in an image: from the model's coordinates to pixels of the original image, and back.

Boxes and points are found in text by their notation:

    "bbox_2d": [x1, y1, x2, y2]     JSON, with one of `NAMES`, and two or four numbers
    data-bbox="x1 y1 x2 y2"         HTML of Qwen2.5-VL and Qwen3-VL
    (x,y)                           plain text of Qwen2-VL; a box is two of them: (x1,y1),(x2,y2)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

BOX_NAMES = ("bbox_2d", "bbox", "box")
POINT_NAMES = ("point_2d", "point", "coordinate")
NAMES: tuple[str, ...] = (*BOX_NAMES, *POINT_NAMES)
"""Names of JSON properties that have a box (left, top, right, bottom) or a point (x, y)."""

_NUMBER = r"-?\d{1,6}(?:\.\d{1,6})?"
_SPACE = r"\s{0,32}"


def _numbers(count: int, separator: str) -> str:
    return f"{_NUMBER}(?:{separator}{_NUMBER}){{{count - 1}}}"


_LISTS = "|".join(_numbers(count, f"{_SPACE},{_SPACE}") for count in (4, 2))
_JSON = rf"""["'](?:{"|".join(NAMES)})["']{_SPACE}:{_SPACE}\[{_SPACE}(?P<list>{_LISTS}){_SPACE}\]"""
_HTML = rf"""data-bbox=["'](?P<attribute>{_numbers(4, " ")}|{_numbers(2, " ")})["']"""
_PAIR = rf"\({_SPACE}(?P<pair>{_numbers(2, f'{_SPACE},{_SPACE}')}){_SPACE}\)"


def _optional(*steps: str) -> str:
    """Return the expression of any beginning of `steps`, the first of which is required."""
    rest = ""
    for step in reversed(steps[1:]):
        rest = f"(?:{step}{rest})?"
    return steps[0] + rest


# What may still become one of the notations. They accept more than that, which only delays text by a few characters.
_JSON_BEGIN = _optional("[\"']", "[a-z0-9_]{1,12}", "[\"']", _SPACE, ":", _SPACE, r"\[", r"[\d\s.,-]{0,400}")
_HTML_BEGIN = _optional(*"data-bbox=", "[\"']", r"[\d .-]{0,80}")
_PAIR_BEGIN = _optional(r"\(", r"[\d\s.,-]{0,200}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinateSpec:
    """How a model writes positions in images.

    Attributes:
        extent: the coordinate of the right and of the bottom edge; None if coordinates are pixels of the resized image.
        pairs: whether the model writes points of plain text as `(x,y)`.
    """

    extent: int | None
    pairs: bool = False

    @property
    def maximum(self) -> int:
        """The largest coordinate in an image of any size."""
        return 99_999 if self.extent is None else self.extent

    def for_image(self, source_size: tuple[int, int], size: tuple[int, int]) -> ImageCoordinates:
        """Return the coordinates of one image.

        Args:
            source_size: width and height before resizing, in pixels.
            size: width and height after resizing, in pixels.
        """
        extent = size if self.extent is None else (self.extent, self.extent)
        return ImageCoordinates(source_size=source_size, extent=extent, pairs=self.pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageCoordinates:
    """The coordinates of one image: pixels of the original image, and those that the model writes.

    Attributes:
        source_size: width and height of the original image in pixels, rotated as its EXIF orientation says.
        extent: the model's coordinates of its right and bottom edge.
        pairs: whether text has points written as `(x,y)`, which are converted too.
    """

    source_size: tuple[int, int]
    extent: tuple[int, int]
    pairs: bool = True

    def to_original(self, values: Sequence[float]) -> tuple[int, ...]:
        """Convert a point (x, y) or a box (x1, y1, x2, y2) of the model to pixels within the original image."""
        return _scale(values, self.extent, self.source_size)

    def to_model(self, values: Sequence[float]) -> tuple[int, ...]:
        """Convert a point or a box in pixels of the original image to the model's coordinates."""
        return _scale(values, self.source_size, self.extent)

    def text_to_original(self, text: str) -> str:
        """Convert the boxes and points in a response of the model; other text is unchanged."""
        return _convert(text, self, to_model=False)

    def text_to_model(self, text: str) -> str:
        """Convert the boxes and points in a text for the model, such as a prompt; other text is unchanged."""
        return _convert(text, self, to_model=True)


class CoordinateStream:
    """Converts a response of the model that arrives in pieces.

    All pieces together equal `ImageCoordinates.text_to_original` of the whole text. Text that may become a box or a
    point is held back.
    """

    def __init__(self, image: ImageCoordinates) -> None:
        self._image = image
        self._begin = _BEGIN_WITH_PAIRS if image.pairs else _BEGIN
        self._pending = ""

    def feed(self, text: str) -> str:
        """Add a piece; return the text that is final."""
        text = self._pending + text
        end = max((match.end() for match in _notations(self._image).finditer(text)), default=0)
        held = self._begin.search(text, end)
        final = held.start() if held else len(text)
        self._pending = text[final:]
        return self._image.text_to_original(text[:end]) + text[end:final]

    def flush(self) -> str:
        """Return the text that was held back."""
        text = self._pending
        self._pending = ""
        return text


_NOTATIONS = re.compile(f"{_JSON}|{_HTML}", re.ASCII)
_NOTATIONS_WITH_PAIRS = re.compile(f"{_JSON}|{_HTML}|{_PAIR}", re.ASCII)
_BEGIN = re.compile(rf"(?:{_JSON_BEGIN}|{_HTML_BEGIN})\Z", re.ASCII)
_BEGIN_WITH_PAIRS = re.compile(rf"(?:{_JSON_BEGIN}|{_HTML_BEGIN}|{_PAIR_BEGIN})\Z", re.ASCII)
_ONE_NUMBER = re.compile(_NUMBER, re.ASCII)


def _notations(image: ImageCoordinates) -> re.Pattern[str]:
    return _NOTATIONS_WITH_PAIRS if image.pairs else _NOTATIONS


def _convert(text: str, image: ImageCoordinates, *, to_model: bool) -> str:
    scale = image.to_model if to_model else image.to_original

    def replace(match: re.Match[str]) -> str:
        group = match.lastgroup or ""
        written = match[group]
        values = iter(scale([float(number) for number in _ONE_NUMBER.findall(written)]))
        converted = _ONE_NUMBER.sub(lambda _: str(next(values)), written)
        start, end = match.start(group) - match.start(), match.end(group) - match.start()
        return match[0][:start] + converted + match[0][end:]

    return _notations(image).sub(replace, text)


def _scale(values: Sequence[float], old: tuple[int, int], new: tuple[int, int]) -> tuple[int, ...]:
    return tuple(
        min(max(round(value * new[index % 2] / old[index % 2]), 0), new[index % 2])
        for index, value in enumerate(values)
    )
