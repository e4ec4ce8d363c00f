"""Compose images as users draw them: shapes of any size, cut by the border, many of them, or none that are known.

`compose.compose` draws shapes of a quarter to two fifths of the side; a user's first image is often one large shape.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from training import figures
from training.compose import Grid, backdrop, canvas, jpeg_quality, object_color
from training.drawing import COLORS, SHAPES, Backdrop, Rgb, Scene, SceneObject
from training.figures import Figure
from training.sizes import FACTOR

SMALLEST, LARGEST = 0.1, 0.95
SMALL, LARGE = 0.25, 0.75
"""Diameters, as shares of the shorter side: their limits, and those of small and large shapes."""
LEAST_PIXELS = 15
"""Diameters in pixels of the model's input; smaller shapes look alike."""
CUT = 0.35
"""The largest part of a radius beyond the border."""
CONTRAST = 60
"""The smallest difference of a figure from the background, in one of red, green and blue."""
MANY = (5, 9)
"""Numbers of objects that the model does not count."""

COMMON_COLORS: dict[str, tuple[Rgb, ...]] = {
    "red": ((255, 0, 0), (220, 20, 60), (214, 39, 40), (204, 0, 0)),
    "orange": ((255, 165, 0), (255, 140, 0), (255, 127, 14)),
    "yellow": ((255, 255, 0), (255, 215, 0), (255, 221, 51)),
    "green": ((0, 128, 0), (0, 255, 0), (44, 160, 44), (34, 139, 34)),
    "cyan": ((0, 255, 255), (0, 206, 209), (23, 190, 207)),
    "blue": ((0, 0, 255), (31, 119, 180), (65, 105, 225)),
    "purple": ((128, 0, 128), (148, 103, 189), (138, 43, 226)),
    "pink": ((255, 192, 203), (255, 105, 180), (227, 119, 194), (255, 20, 147)),
}
"""Colors of these names in CSS, matplotlib and drawing programs."""


class Extremes(NamedTuple):
    """How often a single shape is much smaller or much larger than usual.

    Attributes:
        share: share of the images with one shape where it is.
        small: share of these where it is smaller.
    """

    share: float
    small: float = 0.5


NEVER = Extremes(0.0)


def compose(rng: random.Random, grid: Grid, count: int, extremes: Extremes = NEVER) -> Scene:
    """Compose an image of up to four objects, or fewer if they do not fit."""
    width, height = canvas(rng, grid)
    while count:
        if count == 1:
            placed = _place_one(rng, width, height, grid, extremes)
        else:
            placed = _place(rng, width, height, grid, count)
        if placed:
            break
        count -= 1
    shapes = rng.sample(SHAPES, len(SHAPES))
    if count > 1 and rng.random() < 0.25:
        shapes[1] = shapes[0]
    colors = rng.sample(COLORS, max(count, 1))
    objects = tuple(_object(rng, *named) for named in zip(placed, colors, shapes, strict=False))
    return Scene(width=width, height=height, objects=objects, backdrop=_paper(rng), jpeg=jpeg_quality(rng))


def compose_many(rng: random.Random, grid: Grid) -> Scene | None:
    """Compose an image of more objects than the model counts; colors occur more than once. None if they do not fit."""
    width, height = canvas(rng, grid)
    placed = _place(rng, width, height, grid, rng.randint(*MANY))
    if not placed:
        return None
    objects = tuple(_object(rng, place, rng.choice(COLORS), rng.choice(SHAPES)) for place in placed)
    return Scene(width=width, height=height, objects=objects, backdrop=_paper(rng), jpeg=jpeg_quality(rng))


def compose_unknown(
    rng: random.Random,
    grid: Grid,
    kind: str | None = None,
    *,
    weights: Mapping[str, float] = figures.WEIGHTS,
    smallest: float = 0.3,
) -> Scene:
    """Compose an image of something that the model does not know: of a kind, or one or two chosen by their weights."""
    width, height = canvas(rng, grid)
    count, paper = 1 if kind or rng.random() < 0.8 else 2, _paper(rng)
    parts = [(width * number / count, width / count, height) for number in range(count)]
    shown = tuple(_figure(rng, part, kind or figures.choose_kind(rng, weights), smallest, paper) for part in parts)
    return Scene(width=width, height=height, objects=(), backdrop=paper, jpeg=jpeg_quality(rng), figures=shown)


def simplify(rng: random.Random, scene: Scene) -> Scene:
    """Draw the objects as a few lines of a program would: upright, in pure colors on white, with jagged edges."""
    objects = tuple(replace(item, tilt=0.0, rgb=rng.choice(COMMON_COLORS[item.color])) for item in scene.objects)
    return replace(scene, objects=objects, backdrop=Backdrop(rgb=(255, 255, 255)), jpeg=None, smooth=False)


def centered(rng: random.Random, radius: float, side: int = 224, shape: str = "") -> Scene:
    """Compose one shape, of any kind unless one is named, in the middle of a white image."""
    item = _object(rng, (side / 2, side / 2, radius), rng.choice(COLORS), shape or rng.choice(SHAPES))
    return Scene(width=side, height=side, objects=(item,), backdrop=Backdrop(rgb=(255, 255, 255)))


def _figure(
    rng: random.Random, part: tuple[float, float, float], kind: str, smallest: float, paper: Backdrop
) -> Figure:
    """Place a figure in a part of the canvas: its left edge, width and height."""
    left, width, height = part
    radius = rng.uniform(smallest, LARGEST) * min(width, height) / 2
    return Figure(
        kind=kind,
        x=left + rng.uniform(radius, width - radius),
        y=rng.uniform(radius, height - radius),
        radius=radius,
        tilt=rng.choice((0.0, rng.uniform(-0.15, 0.15))),
        rgb=_figure_color(rng, kind, paper),
        seed=rng.randrange(1 << 30),
    )


def _figure_color(rng: random.Random, kind: str, paper: Backdrop) -> Rgb:
    """Choose a color that differs from the background."""
    while True:
        if kind == figures.COLORLESS:
            found = figures.dull_color(rng)
        else:
            found = _color(rng, rng.choice(COLORS)) if rng.random() < 0.6 else figures.any_color(rng)
        if max(abs(one - other) for one, other in zip(found, paper.rgb, strict=True)) > CONTRAST:
            return found


def _object(rng: random.Random, place: tuple[float, float, float], color: str, shape: str) -> SceneObject:
    x, y, radius = place
    tilt, form = rng.choice((0.0, rng.uniform(-0.12, 0.12))), rng.uniform(-1, 1)
    return SceneObject(color=color, shape=shape, x=x, y=y, radius=radius, tilt=tilt, rgb=_color(rng, color), form=form)


def _color(rng: random.Random, name: str) -> Rgb:
    if rng.random() < 0.6:
        return object_color(rng, name)
    red, green, blue = (min(max(value + rng.randint(-6, 6), 0), 255) for value in rng.choice(COMMON_COLORS[name]))
    return red, green, blue


def _paper(rng: random.Random) -> Backdrop:
    """Choose a background, white for half of the images."""
    return Backdrop(rgb=(255, 255, 255)) if rng.random() < 0.5 else backdrop(rng, busy=rng.random() < 0.5)


def _smallest(width: int, height: int, grid: Grid) -> float:
    """Return the smallest diameter in pixels of the canvas."""
    return max(SMALLEST * min(width, height), LEAST_PIXELS * width / (grid[1] * FACTOR))


def _place_one(
    rng: random.Random, width: int, height: int, grid: Grid, extremes: Extremes
) -> list[tuple[float, float, float]]:
    """Choose center and radius of a single object: in the middle, anywhere inside, or cut by the border."""
    short = min(width, height)
    least, most = _smallest(width, height, grid), LARGEST * short
    if extremes.share and rng.random() < extremes.share:
        is_small = rng.random() < extremes.small
        least, most = (least, max(least, SMALL * short)) if is_small else (LARGE * short, most)
    radius = rng.uniform(least, most) / 2
    kind = rng.random()
    if kind < 0.3:
        return [(width / 2 + rng.uniform(-0.02, 0.02) * short, height / 2 + rng.uniform(-0.02, 0.02) * short, radius)]
    if kind < 0.8:
        return [(rng.uniform(radius, width - radius), rng.uniform(radius, height - radius), radius)]
    keep = (1 - CUT) * radius
    return [(rng.uniform(keep, width - keep), rng.uniform(keep, height - keep), radius)]


def _place(rng: random.Random, width: int, height: int, grid: Grid, count: int) -> list[tuple[float, float, float]]:
    """Choose centers and radii of objects of different sizes that do not touch; empty if they do not fit."""
    mean, least = math.sqrt(width * height), _smallest(width, height, grid)
    largest = min({2: 0.6, 3: 0.48, 4: 0.42}.get(count, 0.3) * mean, LARGEST * min(width, height))
    for _ in range(12):
        found = _try_place(rng, width, height, (least, max(largest, least)), count)
        if len(found) == count:
            return found
    return []


def _try_place(
    rng: random.Random, width: int, height: int, diameters: tuple[float, float], count: int
) -> list[tuple[float, float, float]]:
    found: list[tuple[float, float, float]] = []
    for _ in range(count * 12):
        radius = rng.uniform(*diameters) / 2
        x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
        if _apart((x, y, radius), found, 0.02 * math.sqrt(width * height)):
            found.append((x, y, radius))
            if len(found) == count:
                break
    return found


def _apart(place: tuple[float, float, float], others: Sequence[tuple[float, float, float]], gap: float) -> bool:
    x, y, radius = place
    return all(math.hypot(x - x2, y - y2) > radius + radius2 + gap for x2, y2, radius2 in others)
