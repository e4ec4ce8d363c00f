"""Draw colored shapes on backgrounds: a `Scene` is plain data, `render` draws an image of it.

All lengths are pixels of the scene's canvas, the origin is its top left corner, and y points down. Rendering is
deterministic: equal scenes have equal pixels.
"""

from __future__ import annotations

import colorsys
import functools
import io
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from training import figures
from training.figures import Figure
from training.outlines import SHAPES, Rgb, outline, rotate

__all__ = [
    "COLORS", "FIELD", "FIELDS", "SHAPES", "Backdrop", "Rgb", "Scene", "SceneObject", "paint", "render", "render_video",
]  # fmt: skip

HUES = {"red": 0, "orange": 28, "yellow": 55, "green": 120, "cyan": 183, "blue": 225, "purple": 272, "pink": 322}
"""Hue of each color name in degrees, far enough apart for a variation of 6 degrees."""
COLORS = tuple(HUES)
OVERSAMPLING = 4  # shapes are drawn larger by this factor and downsampled, for smooth edges and subpixel positions
FIELD = 320  # side of the precomputed noise fields in pixels; they repeat on a larger canvas
FIELDS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneObject:
    """One object: center (`x`, `y`) and `radius` in pixels, `tilt` in radians."""

    color: str
    shape: str
    x: float
    y: float
    radius: float
    tilt: float
    rgb: Rgb
    form: float = 0.0
    """Proportions of the shape, -1 to 1; see `outline`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backdrop:
    """The background. Amplitudes are gray levels; `field` and `offset` select a part of the noise."""

    rgb: Rgb
    slope: float = 0.0
    slope_angle: float = 0.0
    cloud: float = 0.0
    grain: float = 0.0
    colored: bool = False
    field: int = 0
    offset: tuple[int, int] = (0, 0)
    horizon: tuple[float, float, Rgb] | None = None
    """Height (share of the canvas), slope and color of a lower half plane, similar to the horizon of a photograph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A canvas of `width` x `height` pixels with objects on a backdrop; `jpeg` is the quality of lossy compression."""

    width: int
    height: int
    objects: tuple[SceneObject, ...]
    backdrop: Backdrop
    jpeg: int | None = None
    figures: tuple[Figure, ...] = ()
    """What the model does not know."""
    smooth: bool = True
    """Whether the edges of objects are smoothed; a program that draws with Pillow leaves them jagged."""


def paint(color: str, wobble: float, saturation: float, value: float) -> Rgb:
    """Return the RGB value of a color name; `wobble` is in degrees, the other arguments are 0 to 1."""
    red, green, blue = colorsys.hsv_to_rgb((HUES[color] + wobble) % 360 / 360, saturation, value)
    return round(red * 255), round(green * 255), round(blue * 255)


def render(scene: Scene) -> Image.Image:
    """Draw a scene as an RGB image of the scene's size."""
    return render_video([scene])[0]


def render_video(scenes: list[Scene]) -> list[Image.Image]:
    """Draw the frames of a video. All use the size and backdrop of the first scene, so the backdrop is drawn once."""
    still = _backdrop(scenes[0].backdrop, scenes[0].width, scenes[0].height)
    frames = []
    for scene in scenes:
        frame = still.copy()
        for item in scene.objects:
            _draw(frame, item, scene.smooth)
        for figure in scene.figures:
            figures.draw(frame, figure)
        frames.append(_lossy(frame, scene.jpeg) if scene.jpeg else frame)
    return frames


def _draw(image: Image.Image, item: SceneObject, smooth: bool) -> None:
    left, top = math.floor(item.x - item.radius) - 1, math.floor(item.y - item.radius) - 1
    side = math.ceil(2 * item.radius) + 4
    scale = (OVERSAMPLING if side < 160 else 2) if smooth else 1
    x, y, radius = (item.x - left) * scale, (item.y - top) * scale, item.radius * scale
    mask = Image.new("L", (side * scale, side * scale))
    pen = ImageDraw.Draw(mask)
    if item.shape == "circle":
        pen.ellipse((x - 0.94 * radius, y - 0.94 * radius, x + 0.94 * radius, y + 0.94 * radius), fill=255)
    else:
        corners = [rotate(corner, item.tilt) for corner in outline(item.shape, item.form)]
        pen.polygon([(x + radius * dx, y + radius * dy) for dx, dy in corners], fill=255)
    image.paste(item.rgb, (left, top), mask.reduce(scale))


def _backdrop(backdrop: Backdrop, width: int, height: int) -> Image.Image:
    if not (backdrop.slope or backdrop.cloud or backdrop.grain or backdrop.horizon):
        return Image.new("RGB", (width, height), backdrop.rgb)
    ground = np.empty((height, width, 3), np.float32)
    ground[:] = backdrop.rgb
    if backdrop.horizon:
        _lay_horizon(ground, backdrop.horizon)
    if backdrop.slope:
        ground += _slope(width, height, backdrop.slope_angle)[..., None] * np.float32(backdrop.slope)
    for amplitude, fields in ((backdrop.cloud, _clouds()), (backdrop.grain, _grains())):
        if amplitude:
            ground += _crop(fields, backdrop, width, height) * np.float32(amplitude)
    return Image.fromarray(np.clip(ground, 0, 255).astype(np.uint8))


def _lay_horizon(ground: np.ndarray, horizon: tuple[float, float, Rgb]) -> None:
    level, slant, rgb = horizon
    height, width = ground.shape[:2]
    edge = height * (level + slant * (np.arange(width, dtype=np.float32) / width - 0.5))
    ground[np.arange(height, dtype=np.float32)[:, None] > edge[None]] = rgb


def _slope(width: int, height: int, angle: float) -> np.ndarray:
    """Return a linear gradient from about -0.7 to 0.7 over the canvas, (height, width)."""
    across = (np.arange(width, dtype=np.float32) / width - 0.5) * np.float32(math.cos(angle))
    down = (np.arange(height, dtype=np.float32) / height - 0.5) * np.float32(math.sin(angle))
    return np.asarray(down[:, None] + across[None])


def _crop(fields: np.ndarray, backdrop: Backdrop, width: int, height: int) -> np.ndarray:
    """Crop a part of the noise, (height, width, 1 or 3), with unit standard deviation."""
    rows = (np.arange(height) + backdrop.offset[1]) % FIELD
    columns = (np.arange(width) + backdrop.offset[0]) % FIELD
    chosen = [(backdrop.field + step) % FIELDS for step in range(3 if backdrop.colored else 1)]
    return np.stack([fields[index][rows[:, None], columns[None]] for index in chosen], axis=-1)


@functools.cache
def _clouds() -> np.ndarray:
    """Generate periodic 1/f noise like that of photographs, (FIELDS, FIELD, FIELD), with unit standard deviation."""
    rng = np.random.default_rng(20)
    frequency = np.hypot(np.fft.fftfreq(FIELD)[:, None], np.fft.rfftfreq(FIELD)[None]) * FIELD
    falloff = 1 / np.maximum(frequency, 2.0) ** rng.uniform(1.0, 1.6, (FIELDS, 1, 1))
    waves = np.fft.rfft2(rng.normal(size=(FIELDS, FIELD, FIELD))) * falloff
    fields = np.fft.irfft2(waves, (FIELD, FIELD))
    return np.asarray(fields / fields.std(axis=(1, 2), keepdims=True), np.float32)


@functools.cache
def _grains() -> np.ndarray:
    """Generate white noise, (FIELDS, FIELD, FIELD), with unit standard deviation."""
    return np.random.default_rng(21).normal(size=(FIELDS, FIELD, FIELD)).astype(np.float32)


def _lossy(image: Image.Image, quality: int) -> Image.Image:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return Image.open(stream).convert("RGB")
