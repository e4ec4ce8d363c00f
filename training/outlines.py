"""The shapes that the model knows, as polygons of radius 1 around the origin; y points down."""

from __future__ import annotations

import functools
import math

SHAPES = ("circle", "square", "triangle", "star", "cross")

Point = tuple[float, float]
Rgb = tuple[int, int, int]


def rotate(point: Point, angle: float) -> Point:
    """Rotate a point around the origin by `angle` in radians."""
    cos, sin = math.cos(angle), math.sin(angle)
    return point[0] * cos - point[1] * sin, point[0] * sin + point[1] * cos


@functools.cache
def outline(shape: str, form: float = 0.0) -> tuple[Point, ...]:
    """Return the vertices of a shape; `form`, -1 to 1, changes its proportions as people draw them."""
    if shape == "square":
        return ((-0.84, -0.84), (0.84, -0.84), (0.84, 0.84), (-0.84, 0.84))
    if shape == "triangle":
        base, half = 0.8 - 0.15 * form, 0.95 - 0.08 * abs(form)
        return ((0.0, -0.95), (half, base), (-half, base))
    if shape == "star":
        radii = (1.02, 0.42 + 0.05 * form)
        angles = [-math.pi / 2 + corner * math.pi / 5 for corner in range(10)]
        return tuple((radii[i % 2] * math.cos(angle), radii[i % 2] * math.sin(angle)) for i, angle in enumerate(angles))
    if shape == "cross":
        arm, half = 0.97, 0.34 + 0.1 * form
        quarter = [(-half, -arm), (half, -arm), (half, -half)]
        return tuple(rotate(point, turn * math.pi / 2) for turn in range(4) for point in quarter)
    return tuple(ellipse(0.94, 0.94))


def ellipse(across: float, down: float, start: float = 0.0, end: float = 2 * math.pi) -> list[Point]:
    """Return points on an ellipse around the origin from the angle `start` to `end`."""
    steps = 72
    angles = [start + (end - start) * step / steps for step in range(steps + (end - start < 2 * math.pi))]
    return [(across * math.cos(angle), down * math.sin(angle)) for angle in angles]
