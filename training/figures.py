"""Draw what the model does not know: other shapes, outlines, letters, charts, faces, scribbles.

A `Figure` is plain data. Its details follow from its seed, so equal figures have equal pixels.
"""

from __future__ import annotations

import functools
import math
import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from PIL import Image, ImageDraw, ImageFont

from training.outlines import SHAPES, Point, Rgb, ellipse, outline, rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a kind of `KINDS`: center and `radius` in pixels, `tilt` in radians."""

    kind: str
    x: float
    y: float
    radius: float
    tilt: float
    rgb: Rgb
    seed: int


class Pen:
    """Draws in a square from -1 to 1 in both directions; y points down.

    Attributes:
        rng: the source of the details.
        rgb: the main color.
    """

    def __init__(self, layer: Image.Image, rgb: Rgb, rng: random.Random) -> None:
        self.rgb, self.rng = rgb, rng
        self._layer, self._draw, self._half = layer, ImageDraw.Draw(layer), layer.width / 2

    def fill(self, points: Sequence[Point], rgb: Rgb | None = None) -> None:
        """Fill a polygon."""
        self._draw.polygon(self._pixels(points), fill=rgb or self.rgb)

    def stroke(self, points: Sequence[Point], width: float, rgb: Rgb | None = None, *, closed: bool = False) -> None:
        """Draw a line through the points; `width` is in units of the square."""
        pixels = self._pixels([*points, *points[:2]] if closed else points)
        self._draw.line(pixels, fill=rgb or self.rgb, width=max(round(width * self._half), 1), joint="curve")

    def erase(self, points: Sequence[Point]) -> None:
        """Make a polygon transparent again."""
        self._draw.polygon(self._pixels(points), fill=(0, 0, 0, 0))

    def text(self, text: str, height: float, at: Point = (0, 0), stroke: float = 0.0) -> None:
        """Draw text, centered at a point; it becomes smaller than `height` if it would not fit."""
        size = height * self._half
        wide = _font(100).getlength(text) / 100
        size = min(size, 1.9 * self._half / max(wide, 0.1))
        x, y = self._pixels([at])[0]
        width = round(stroke * size)
        self._draw.text((x, y), text, self.rgb, _font(max(round(size), 4)), anchor="mm", stroke_width=width)

    def line_width(self) -> float:
        """Choose a width as people draw outlines."""
        return self.rng.uniform(0.04, 0.16)

    def _pixels(self, points: Sequence[Point]) -> list[Point]:
        return [(self._half * (1 + x), self._half * (1 + y)) for x, y in points]


def draw(image: Image.Image, figure: Figure) -> None:
    """Draw a figure onto an RGB image."""
    scale = 3 if figure.radius < 80 else 2
    side = max(round(2 * figure.radius), 4)
    layer = Image.new("RGBA", (side * scale, side * scale))
    KINDS[figure.kind](Pen(layer, figure.rgb, random.Random(figure.seed)))
    if figure.tilt:
        layer = layer.rotate(-math.degrees(figure.tilt), Image.Resampling.BILINEAR)
    layer = layer.reduce(scale)
    image.paste(layer, (round(figure.x - side / 2), round(figure.y - side / 2)), layer)


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)  # Pillow has one of its own if it is built with FreeType
    return font


def _regular(corners: int, pen: Pen) -> None:
    start = pen.rng.uniform(0, math.pi)
    angles = [start + 2 * math.pi * corner / corners for corner in range(corners)]
    points = [(0.95 * math.cos(angle), 0.95 * math.sin(angle)) for angle in angles]
    _fill_or_stroke(pen, points, outlines=0.25)


def _fill_or_stroke(pen: Pen, points: Sequence[Point], outlines: float = 0.3) -> None:
    if pen.rng.random() < outlines:
        pen.stroke(points, pen.line_width(), closed=True)
    else:
        pen.fill(points)


def _outline(shape: str, pen: Pen) -> None:
    points = [(0.9 * x, 0.9 * y) for x, y in outline(shape, pen.rng.uniform(-1, 1))]
    pen.stroke(points, pen.line_width(), closed=True)


def _ellipse(pen: Pen) -> None:
    _fill_or_stroke(pen, ellipse(0.95, pen.rng.uniform(0.3, 0.62)))


def _rectangle(pen: Pen) -> None:
    down = pen.rng.uniform(0.2, 0.58)
    _fill_or_stroke(pen, ((-0.95, -down), (0.95, -down), (0.95, down), (-0.95, down)))


def _diamond(pen: Pen) -> None:
    across = pen.rng.uniform(0.5, 0.95)
    _fill_or_stroke(pen, ((0, -0.95), (across, 0), (0, 0.95), (-across, 0)))


def _quadrilateral(pen: Pen) -> None:
    """A trapezoid or a parallelogram."""
    slant, down = pen.rng.uniform(0.25, 0.6), pen.rng.uniform(0.4, 0.8)
    upper, lower = pen.rng.choice(((0.9 - slant, 0.9), (0.9, 0.9 - slant)))
    _fill_or_stroke(pen, ((-0.9 + slant, -down), (upper, -down), (lower, down), (-0.9, down)))


def _part_of_circle(pen: Pen) -> None:
    start, length = pen.rng.uniform(0, 2 * math.pi), pen.rng.uniform(0.7, 1.35) * math.pi
    points = ellipse(0.95, 0.95, start, start + length)
    _fill_or_stroke(pen, points if pen.rng.random() < 0.5 else [*points, (0.0, 0.0)])


def _crescent(pen: Pen) -> None:
    pen.fill(ellipse(0.95, 0.95))
    shift = pen.rng.uniform(0.35, 0.7)
    pen.erase([(x + shift, y - 0.15) for x, y in ellipse(0.85, 0.85)])


def _heart(pen: Pen) -> None:
    angles = [2 * math.pi * step / 72 for step in range(72)]
    points = [
        (
            0.95 * math.sin(angle) ** 3,
            -(13 * math.cos(angle) - 5 * math.cos(2 * angle) - 2 * math.cos(3 * angle) - math.cos(4 * angle)) / 17,
        )
        for angle in angles
    ]
    _fill_or_stroke(pen, points, outlines=0.2)


def _arrow(pen: Pen) -> None:
    half, head, neck = pen.rng.uniform(0.12, 0.3), pen.rng.uniform(0.45, 0.8), pen.rng.uniform(0, 0.4)
    points = [(-0.95, -half), (neck, -half), (neck, -head), (0.95, 0), (neck, head), (neck, half), (-0.95, half)]
    turn = pen.rng.randrange(4) * math.pi / 2
    _fill_or_stroke(pen, [rotate(point, turn) for point in points])


def _ring(pen: Pen) -> None:
    pen.fill(ellipse(0.95, 0.95))
    hole = pen.rng.uniform(0.4, 0.85)
    pen.erase(ellipse(hole, hole))


def _drop(pen: Pen) -> None:
    points = [(0.0, -0.95), *((x, y + 0.3) for x, y in ellipse(0.6, 0.6, -0.6, math.pi + 0.6))]
    _fill_or_stroke(pen, points)


def _many_pointed(pen: Pen) -> None:
    """A star of six to twelve points."""
    points, inner = pen.rng.randint(6, 12), pen.rng.uniform(0.4, 0.75)
    radii = (0.95, inner)
    angles = [math.pi * corner / points for corner in range(2 * points)]
    pen.fill([(radii[i % 2] * math.cos(angle), radii[i % 2] * math.sin(angle)) for i, angle in enumerate(angles)])


def _polygon(pen: Pen) -> None:
    """An irregular polygon."""
    corners = pen.rng.randint(5, 9)
    angles = sorted(2 * math.pi * (corner + pen.rng.uniform(-0.3, 0.3)) / corners for corner in range(corners))
    _fill_or_stroke(pen, [_polar(pen.rng.uniform(0.35, 1), angle) for angle in angles])


def _blob(pen: Pen) -> None:
    waves = [(pen.rng.uniform(0.05, 0.2), pen.rng.uniform(0, 6.3)) for _ in range(4)]
    angles = [2 * math.pi * step / 90 for step in range(90)]
    radii = [0.6 + sum(size * math.sin(n * at + phase) for n, (size, phase) in enumerate(waves, 2)) for at in angles]
    _fill_or_stroke(pen, [_polar(min(radius, 1), at) for radius, at in zip(radii, angles, strict=True)])


def _polar(radius: float, angle: float) -> Point:
    return radius * math.cos(angle), radius * math.sin(angle)


def _scribble(pen: Pen) -> None:
    """One to four lines, straight or curved: parts of letters, signs and drawings."""
    for _ in range(pen.rng.randint(1, 4)):
        corners = [(pen.rng.uniform(-0.9, 0.9), pen.rng.uniform(-0.9, 0.9)) for _ in range(pen.rng.randint(2, 5))]
        pen.stroke(_curve(corners) if pen.rng.random() < 0.5 else corners, pen.line_width())


def _curve(corners: Sequence[Point]) -> list[Point]:
    """Return points of the Bézier curve of the corners, by de Casteljau's algorithm."""
    found = []
    for step in range(31):
        level = list(corners)
        while len(level) > 1:
            level = [(x + (x2 - x) * step / 30, y + (y2 - y) * step / 30) for (x, y), (x2, y2) in pairwise(level)]
        found += level
    return found


def _letter(pen: Pen) -> None:
    _one_character(pen, string.ascii_uppercase + string.ascii_lowercase.replace("l", "").replace("o", ""))


def _digit(pen: Pen) -> None:
    _one_character(pen, string.digits + "?!&%@#$")


def _one_character(pen: Pen, characters: str) -> None:
    # A capital O and a zero are drawn too: they are outlines of a circle or an ellipse.
    pen.text(pen.rng.choice(characters), 2.3, stroke=pen.rng.choice((0, 0, 0.02, 0.05)))


def _word(pen: Pen) -> None:
    for line in range(lines := pen.rng.choice((1, 1, 2, 3))):
        letters = "".join(pen.rng.choices(string.ascii_letters, k=pen.rng.randint(3, 9)))
        text = pen.rng.choice((letters, letters.title(), f"{letters[:4]} {letters[4:]}", str(pen.rng.randrange(10**6))))
        pen.text(text, 1.3 / lines, (0, (line - (lines - 1) / 2) * 1.3 / lines), pen.rng.choice((0, 0, 0.03)))


def _axes(pen: Pen) -> None:
    dark = (60, 60, 60)
    pen.stroke(((-0.9, -0.9), (-0.9, 0.9), (0.95, 0.9)), 0.03, dark)
    if pen.rng.random() < 0.3:
        pen.stroke(((0.95, 0.9), (0.95, -0.9), (-0.9, -0.9)), 0.03, dark)
    for step in range(pen.rng.choice((0, 0, 4, 5))):
        level = 0.9 - 1.7 * step / 5
        pen.stroke(((-0.96, level), (-0.9, level)), 0.03, dark)


def _bar_chart(pen: Pen) -> None:
    _axes(pen)
    bars = pen.rng.randint(3, 7)
    width, gap = 1.7 / bars, pen.rng.uniform(0.55, 0.95)
    several = pen.rng.random() < 0.35
    for bar in range(bars):
        left, top = -0.85 + bar * width, 0.88 - pen.rng.uniform(0.25, 1.7)
        right = left + gap * width
        pen.fill(((left, 0.88), (left, top), (right, top), (right, 0.88)), any_color(pen.rng) if several else None)


def _line_chart(pen: Pen) -> None:
    _axes(pen)
    for line in range(pen.rng.choice((1, 1, 2, 3))):
        points = pen.rng.randint(4, 12)
        heights = [pen.rng.uniform(-0.8, 0.8) for _ in range(points)]
        path = [(-0.85 + 1.7 * n / (points - 1), height) for n, height in enumerate(heights)]
        rgb = any_color(pen.rng) if line else None
        pen.stroke(path, pen.rng.uniform(0.03, 0.07), rgb)
        if pen.rng.random() < 0.3:
            for x, y in path:
                pen.fill([(x + a, y + b) for a, b in ellipse(0.05, 0.05)], rgb)


def _pie_chart(pen: Pen) -> None:
    ends = sorted(pen.rng.uniform(0, 2 * math.pi) for _ in range(pen.rng.randint(2, 5)))
    for start, end in zip(ends, [*ends[1:], ends[0] + 2 * math.pi], strict=True):
        pen.fill([(0, 0), *ellipse(0.95, 0.95, start, end)], any_color(pen.rng))


def _face(pen: Pen) -> None:
    dark: Rgb = pen.rng.choice(((0, 0, 0), (40, 30, 30), (90, 60, 40)))
    head = ellipse(pen.rng.uniform(0.75, 0.95), 0.95)
    if pen.rng.random() < 0.6:
        pen.fill(head)
    else:
        pen.stroke(head, pen.rng.uniform(0.04, 0.1), closed=True)
    for side in (-1, 1):
        size = pen.rng.uniform(0.07, 0.16)
        pen.fill([(0.35 * side + x, -0.25 + y) for x, y in ellipse(size, size)], dark)
    smile, low = pen.rng.uniform(-0.25, 0.35), pen.rng.uniform(0.35, 0.5)
    pen.stroke(_curve([(-0.45, low - smile / 2), (0, low + smile), (0.45, low - smile / 2)]), 0.08, dark)


def _house(pen: Pen) -> None:
    pen.fill(((-0.7, -0.1), (0.7, -0.1), (0.7, 0.9), (-0.7, 0.9)))
    pen.fill(((-0.9, -0.1), (0, -0.9), (0.9, -0.1)), any_color(pen.rng))
    pen.fill(((-0.2, 0.9), (-0.2, 0.3), (0.2, 0.3), (0.2, 0.9)), any_color(pen.rng))


def _person(pen: Pen) -> None:
    """A stick figure."""
    width, up = pen.rng.uniform(0.06, 0.14), pen.rng.uniform(-0.3, 0.3)
    _fill_or_stroke(pen, [(x, y - 0.65) for x, y in ellipse(0.25, 0.25)], outlines=0.6)
    pen.stroke(((0, -0.4), (0, 0.3), (-0.4, 0.95)), width)
    pen.stroke(((0, 0.3), (0.4, 0.95)), width)
    pen.stroke(((-0.5, -up), (0, -0.15), (0.5, -up)), width)


def _grid(pen: Pen) -> None:
    """A table or a checkerboard."""
    cells, filled = pen.rng.randint(3, 6), pen.rng.random() < 0.5
    step = 1.8 / cells
    for row in range(cells):
        for column in range(cells):
            left, top = -0.9 + column * step, -0.9 + row * step
            cell = ((left, top), (left + step, top), (left + step, top + step), (left, top + step))
            if not filled:
                pen.stroke(cell, 0.03, closed=True)
            elif (row + column) % 2:
                pen.fill(cell)


def _spiral(pen: Pen) -> None:
    turns = pen.rng.uniform(2, 4)
    path = [_polar(0.92 * step / 120, 2 * math.pi * turns * step / 120) for step in range(121)]
    pen.stroke(path, pen.rng.uniform(0.05, 0.1))


def _known_shape(pen: Pen) -> None:
    pen.fill(outline(pen.rng.choice(SHAPES), pen.rng.uniform(-1, 1)))


def any_color(rng: random.Random) -> Rgb:
    """Choose any color, often a dark or gray one as in charts and texts."""
    if rng.random() < 0.35:
        return dull_color(rng)
    return rng.randrange(256), rng.randrange(256), rng.randrange(256)


def dull_color(rng: random.Random) -> Rgb:
    """Choose black, a gray or a brown."""
    gray = rng.choice((0, 0, 20, 50, 90, 130))
    return rng.choice(((gray, gray, gray), (gray // 2 + 90, gray // 2 + 45, 20)))


COLORLESS = "colorless"
"""A known shape in a color that is not known."""
KINDS: dict[str, Callable[[Pen], None]] = {
    **{f"{corners} corners": functools.partial(_regular, corners) for corners in (5, 6, 8)},
    **{f"{shape} outline": functools.partial(_outline, shape) for shape in SHAPES},
    "ellipse": _ellipse, "rectangle": _rectangle, "diamond": _diamond, "quadrilateral": _quadrilateral,
    "part of a circle": _part_of_circle, "crescent": _crescent, "heart": _heart, "arrow": _arrow, "ring": _ring,
    "drop": _drop, "many-pointed star": _many_pointed, "polygon": _polygon, "blob": _blob, "scribble": _scribble,
    "letter": _letter, "digit": _digit, "word": _word, "bar chart": _bar_chart, "line chart": _line_chart,
    "pie chart": _pie_chart, "face": _face, "house": _house, "person": _person, "grid": _grid, "spiral": _spiral,
    COLORLESS: _known_shape,
}  # fmt: skip
"""The function that draws each kind."""
WEIGHTS = {
    "letter": 4.0, "word": 3, "scribble": 3, "digit": 2, "bar chart": 2, "line chart": 2, "face": 2, COLORLESS: 2,
    "heart": 0, "person": 0, "spiral": 0,
}  # fmt: skip
"""Weights of kinds in training; 1 for all others. Evaluation measures what the model makes of those that it has not
seen."""
LIKE_SHAPES = {
    "letter": 5.0, "face": 4, "heart": 3, "bar chart": 3, "5 corners": 4, "6 corners": 5, "8 corners": 3, COLORLESS: 2,
    "person": 0, "spiral": 0,
}  # fmt: skip
"""Weights with which kinds that resemble known shapes are more frequent."""


def choose_kind(rng: random.Random, weights: Mapping[str, float]) -> str:
    """Choose a kind; the weight of kinds that are missing is 1."""
    return rng.choices(list(KINDS), [weights.get(kind, 1.0) for kind in KINDS])[0]
