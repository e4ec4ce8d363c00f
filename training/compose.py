"""Compose random scenes: one image, a set of images, a video. All randomness comes from the given `random.Random`.

A `Grid` is (rows, columns) of the image's tokens; all images of a training batch have the same grid.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from training.drawing import COLORS, FIELD, FIELDS, SHAPES, Backdrop, Rgb, Scene, SceneObject, paint
from training.sizes import FACTOR, smart_resize

Grid = tuple[int, int]

IMAGE_GRIDS: dict[Grid, float] = {
    (4, 4): 9, (3, 3): 2.5, (5, 5): 2, (6, 6): 2.5, (4, 6): 1.5, (6, 4): 1.5, (3, 4): 1.5, (4, 3): 1.5, (3, 5): 1,
    (5, 3): 1, (4, 5): 1, (5, 4): 1, (5, 6): 1.7, (6, 5): 1, (4, 7): 1, (7, 4): 0.8, (4, 8): 1, (8, 4): 0.7,
    (5, 7): 0.5, (7, 5): 0.5, (2, 5): 0.6, (5, 2): 0.6, (2, 8): 0.5, (8, 2): 0.5,
}  # fmt: skip
"""Image sizes in tokens, with their weights in training. A photograph of 4:3 becomes (5, 6), one of 16:9 (4, 8)."""
VIDEO_GRIDS: dict[Grid, float] = {
    (4, 4): 4, (3, 3): 2.5, (3, 4): 1, (4, 3): 1, (5, 5): 0.7, (3, 5): 0.7, (5, 3): 0.7, (4, 5): 0.5, (5, 4): 0.5,
    (5, 6): 0.5, (6, 6): 0.5, (4, 8): 0.4,
}  # fmt: skip
VIDEO_FRAMES, VIDEO_TOKENS = 8, 112
"""Maximum length of videos in frames and in vision tokens."""

CENTRE_MARGIN = 0.1
"""An object closer than this share of the canvas to a center line is in no corner, and no question is about it."""
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
MOTIONS: dict[str, float] = {"steady": 3, "pairs": 1.5, "jump": 2.2, "still": 2.6, "recolour": 2.4, "empty": 0.3}
"""Kinds of videos, with their weights in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """A video whose first object moves, rests or changes its color; a second object, if any, rests."""

    scenes: tuple[Scene, ...]
    direction: str | None
    recolored: tuple[str, str] | None = None


def choose(rng: random.Random, weights: Mapping[Grid, float]) -> Grid:
    """Choose a random grid by weight."""
    return rng.choices(list(weights), list(weights.values()))[0]


def longest_video(grid: Grid) -> int:
    """Return the maximum number of frames for a grid. With more time steps than tokens on the longer side, engines
    would disagree on the position of the text after the video (see the model card)."""
    return min(VIDEO_FRAMES, 2 * max(grid), 2 * (VIDEO_TOKENS // (grid[0] * grid[1])))


def canvas(rng: random.Random, grid: Grid, odd: float = 0.2) -> tuple[int, int]:
    """Choose a width and height in pixels that result in this grid; a share `odd` differs from the grid's size."""
    height, width = grid[0] * FACTOR, grid[1] * FACTOR
    if rng.random() < odd:
        for _ in range(6):
            scale = rng.choice((1.0, rng.uniform(1, 1.6), rng.uniform(1, 2.6)))
            tried = round(height * scale + rng.uniform(-9, 9)), round(width * scale + rng.uniform(-9, 9))
            if smart_resize(*tried) == (height, width):
                return tried[1], tried[0]
    return width, height


def compose(rng: random.Random, grid: Grid, count: int, *, clear: bool = False, busy: bool = True) -> Scene:
    """Compose an image of `count` objects, or fewer if they do not fit; `clear` keeps them off the center lines."""
    width, height = canvas(rng, grid)
    objects = _objects(rng, width, height, count, clear)
    behind = photo(rng) if busy and not objects and rng.random() < 0.5 else backdrop(rng, busy)
    return Scene(width=width, height=height, objects=objects, backdrop=behind, jpeg=jpeg_quality(rng))


def compose_set(rng: random.Random, grid: Grid, images: int, *, pairs: float = 0.35) -> list[Scene]:
    """Compose unrelated images with one object each or, for a share `pairs`, with two."""
    return [compose(rng, grid, rng.choices((1, 2), (1 - pairs, pairs))[0]) for _ in range(images)]


def compose_change(rng: random.Random, grid: Grid) -> list[Scene]:
    """Compose a scene twice; in the second image one object may have another color or another shape."""
    before = compose(rng, grid, rng.choices((1, 2, 3), (0.4, 0.45, 0.15))[0])
    objects = list(before.objects)
    index, kind = rng.randrange(len(objects)), rng.random()
    if kind < 0.42:
        color = rng.choice([word for word in COLORS if word not in {item.color for item in objects}])
        objects[index] = replace(objects[index], color=color, rgb=object_color(rng, color))
    elif kind < 0.84:
        free = [word for word in SHAPES if word not in {item.shape for item in objects}]
        objects[index] = replace(objects[index], shape=rng.choice(free))
    return [before, replace(before, objects=tuple(objects), jpeg=jpeg_quality(rng))]


def compose_video(rng: random.Random, grid: Grid, frames: int, motion: str) -> Video:
    """Compose a video: `steady` moves in every frame, `pairs` only between pairs of frames, `jump` once."""
    if motion == "empty":
        nothing = compose(rng, grid, 0)
        return Video(scenes=(nothing,) * frames, direction=None)
    base = compose(rng, grid, 1, busy=rng.random() < 0.5)
    radius = min(rng.uniform(0.24, 0.38) * math.sqrt(base.width * base.height), 0.6 * min(base.width, base.height)) / 2
    mover = replace(base.objects[0], radius=radius)
    if motion in ("still", "recolour"):
        return _resting_video(rng, base, mover, frames, motion)
    direction = rng.choice(list(DIRECTIONS))
    points = _path(rng, replace(base, objects=(mover,)), direction, frames, motion)
    moved = [replace(mover, x=x, y=y) for x, y in points]
    return Video(scenes=_with_witness(rng, base, moved), direction=direction)


def photo(rng: random.Random) -> Backdrop:
    """Create a backdrop of strong colored noise, often with a horizon, for images without shapes."""
    shade = [rng.randint(30, 225) for _ in range(6)]
    horizon = (rng.uniform(0.2, 0.8), rng.uniform(-0.4, 0.4), (shade[3], shade[4], shade[5]))
    return Backdrop(
        rgb=(shade[0], shade[1], shade[2]),
        slope=rng.uniform(0, 60),
        slope_angle=rng.uniform(0, 2 * math.pi),
        cloud=rng.uniform(15, 70),
        grain=rng.choice((0.0, rng.uniform(0, 40))),
        colored=rng.random() < 0.7,
        field=rng.randrange(FIELDS),
        offset=(rng.randrange(FIELD), rng.randrange(FIELD)),
        horizon=horizon if rng.random() < 0.5 else None,
    )


def compose_photo(rng: random.Random, grid: Grid) -> Scene:
    """Compose an image without shapes: similar to a photograph, or strong noise."""
    width, height = canvas(rng, grid)
    behind = photo(rng) if rng.random() < 0.7 else _noise(rng)
    return Scene(width=width, height=height, objects=(), backdrop=behind, jpeg=jpeg_quality(rng))


def _noise(rng: random.Random) -> Backdrop:
    gray = rng.randint(60, 200)
    return Backdrop(
        rgb=(gray, gray, gray),
        grain=rng.uniform(30, 110),
        colored=rng.random() < 0.6,
        field=rng.randrange(FIELDS),
        offset=(rng.randrange(FIELD), rng.randrange(FIELD)),
    )


def backdrop(rng: random.Random, busy: bool) -> Backdrop:
    """Create a background of one color, with a gradient or, if `busy`, with clouds and noise."""
    gray = rng.choice((255, 255, 248, 240, 230, 215, 200, 150, 90, 45, 25, 10))
    tint = rng.choice((0, 0, 8, 15))
    red, green, blue = (max(0, min(255, gray + rng.randint(-tint, tint))) for _ in range(3))
    plain = Backdrop(rgb=(red, green, blue))
    kind = rng.random()
    if kind < 0.5:
        return plain
    slope = rng.uniform(10, 60) if rng.random() < 0.6 else 0.0
    plain = replace(plain, slope=slope, slope_angle=rng.uniform(0, 2 * math.pi))
    if kind < 0.65 or not busy:
        return plain
    return replace(
        plain,
        cloud=rng.choice((rng.uniform(3, 12), rng.uniform(5, 25), rng.uniform(10, 40))) if kind < 0.9 else 0.0,
        grain=rng.uniform(1, 15) if kind > 0.85 else 0.0,
        colored=rng.random() < 0.4,
        field=rng.randrange(FIELDS),
        offset=(rng.randrange(FIELD), rng.randrange(FIELD)),
    )


def jpeg_quality(rng: random.Random) -> int | None:
    """Choose the quality of lossy compression; None for most images."""
    return rng.randint(50, 95) if rng.random() < 0.12 else None


def object_color(rng: random.Random, color: str) -> Rgb:
    """Choose a shade of a color."""
    # Dark orange looks brown, dark yellow looks olive and dark pink looks purple: these colors stay bright.
    darkest = 0.86 if color in ("orange", "yellow", "pink") else 0.72
    return paint(color, rng.uniform(-6, 6), rng.uniform(0.78, 1), rng.uniform(darkest, 1))


def _objects(rng: random.Random, width: int, height: int, count: int, clear: bool) -> tuple[SceneObject, ...]:
    colors = rng.sample(COLORS, max(count, 1))
    shapes = rng.sample(SHAPES, len(SHAPES))
    if count > 1 and rng.random() < 0.25:
        shapes[1] = shapes[0]
    objects = []
    for (x, y, radius), color, shape in zip(
        _place_objects(rng, width, height, count, clear), colors, shapes, strict=False
    ):
        tilt = rng.uniform(-0.12, 0.12)
        objects.append(
            SceneObject(color=color, shape=shape, x=x, y=y, radius=radius, tilt=tilt, rgb=object_color(rng, color))
        )
    return tuple(objects)


def _place_objects(
    rng: random.Random, width: int, height: int, count: int, clear: bool
) -> list[tuple[float, float, float]]:
    """Choose centers and radii of objects that do not touch; reduces the number of objects until they fit."""
    while count:
        for _ in range(12):
            centers = _try_place_objects(rng, width, height, count, clear)
            if len(centers) == count:
                return centers
        count -= 1
    return []


def _try_place_objects(
    rng: random.Random, width: int, height: int, count: int, clear: bool
) -> list[tuple[float, float, float]]:
    mean, largest = math.sqrt(width * height), {1: 0.42, 2: 0.42, 3: 0.36}.get(count, 0.32)
    limit = min(width, height) * (0.55 if clear else 0.86)
    centers: list[tuple[float, float, float]] = []
    for _ in range(count * 12):
        radius = min(rng.uniform(0.24, largest) * mean, limit) / 2
        x, y = rng.uniform(radius + 1, width - radius - 1), rng.uniform(radius + 1, height - radius - 1)
        if clear and (abs(x / width - 0.5) < CENTRE_MARGIN + 0.01 or abs(y / height - 0.5) < CENTRE_MARGIN + 0.01):
            continue
        if all(math.hypot(x - x2, y - y2) > (radius + radius2) * 1.12 + 0.01 * mean for x2, y2, radius2 in centers):
            centers.append((x, y, radius))
            if len(centers) == count:
                break
    return centers


def _resting_video(rng: random.Random, base: Scene, mover: SceneObject, frames: int, motion: str) -> Video:
    if motion == "still" or frames < 4:
        return Video(scenes=_with_witness(rng, base, [mover] * frames), direction=None)
    color = rng.choice([word for word in COLORS if word != mover.color])
    later = replace(mover, color=color, rgb=object_color(rng, color))
    cut = 2 * rng.randint(1, frames // 2 - 1)  # between two pairs of frames, so that no temporal patch has both colors
    scenes = tuple(replace(base, objects=(item,)) for item in [mover] * cut + [later] * (frames - cut))
    return Video(scenes=scenes, direction=None, recolored=(mover.color, color))


def _path(
    rng: random.Random, start_scene: Scene, direction: str, frames: int, motion: str
) -> list[tuple[float, float]]:
    """Return the center of the first object in every frame, in pixels."""
    base, radius = start_scene, start_scene.objects[0].radius
    dx, dy = DIRECTIONS[direction]
    length, breadth = (base.width, base.height) if dx else (base.height, base.width)
    free = length - 2 * radius
    # Two frames share their patches: the two positions must be close enough to be recognized as one object.
    span = free * rng.uniform(0.55, 1) if frames > 3 and motion != "jump" else min(free, length * rng.uniform(0.2, 0.5))
    start = radius + rng.uniform(0, free - span)
    shares = _shares(rng, frames, motion)
    along = [start + span * (share if dx + dy > 0 else 1 - share) for share in shares]
    across, drift = rng.uniform(radius, breadth - radius), rng.uniform(-0.06, 0.06) * breadth
    side = [min(max(across + drift * share, radius), breadth - radius) for share in shares]
    return list(zip(along, side, strict=True)) if dx else list(zip(side, along, strict=True))


def _shares(rng: random.Random, frames: int, motion: str) -> list[float]:
    """Return the share of the path completed in every frame, 0 to 1."""
    if motion == "pairs" and frames >= 4:
        pairs = (frames + 1) // 2
        return [pair / (pairs - 1) for pair in range(pairs) for _ in (0, 1)][:frames]
    if motion == "jump":
        last = rng.randrange(1, frames)
        return [float(frame >= last) for frame in range(frames)]
    return [frame / (frames - 1) for frame in range(frames)]


def _with_witness(rng: random.Random, base: Scene, moved: list[SceneObject]) -> tuple[Scene, ...]:
    """Create one scene per frame, sometimes with a second, resting object off the path of the first."""
    rest: tuple[SceneObject, ...] = ()
    if rng.random() < 0.2:
        for item in _objects(rng, base.width, base.height, 1, clear=False):
            apart = all(
                math.hypot(item.x - step.x, item.y - step.y) > (item.radius + step.radius) * 1.1 for step in moved
            )
            if apart and item.color != moved[0].color and item.shape != moved[0].shape:
                rest = (item,)
    return tuple(replace(base, objects=(step, *rest)) for step in moved)
