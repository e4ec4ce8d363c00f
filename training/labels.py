"""Labels for every vision token, with which the vision encoder is pretrained.

The labels of a cell, in this order: color, shape, column and row (in twelfths of the image) of the center of the object
that covers it, and the object's motion within the temporal patch. -100 means that the label is ignored.
"""

from __future__ import annotations

import numpy as np

from training.compose import DIRECTIONS, Grid
from training.drawing import COLORS, SHAPES, Scene, SceneObject
from training.figures import Figure

TWELFTHS = 12
BACKGROUND, NOT_KNOWN = len(SHAPES), len(SHAPES) + 1
"""Values of the label "shape"."""
CELLS = (len(COLORS) + 1, len(SHAPES) + 2, TWELFTHS, TWELFTHS, len(DIRECTIONS) + 1)
"""Number of values of each label; the last color means background, motion 0 means no motion."""
PLACES = (4, 4, 4)
"""Labels of a vision token in the language model: vertical quarter, horizontal quarter, image number or time step."""
UNKNOWN = -100
COVERED, TOUCHED = 0.3, 0.06  # overlap as a share of the cell, or of the object if that is smaller


def cells(first: Scene, second: Scene, grid: Grid) -> np.ndarray:
    """Return the labels of the two frames of a temporal patch, (rows * columns, 5); an image is two equal frames."""
    labels = _cells(first, grid)
    if first is not second and first.objects != second.objects:
        labels[labels != _cells(second, grid)] = UNKNOWN
        _mark_motion(labels, first, second, grid)
    return labels.reshape(-1, len(CELLS))


def _cells(scene: Scene, grid: Grid) -> np.ndarray:
    labels = np.full((*grid, len(CELLS)), UNKNOWN, np.int64)
    labels[..., 0], labels[..., 1] = len(COLORS), BACKGROUND
    best = np.zeros(grid, np.float32)
    for item in scene.objects:
        share = _overlap(scene, item, grid)
        labels[(share > TOUCHED) & (share <= COVERED) & (best < COVERED)] = UNKNOWN
        labels[share > np.maximum(best, COVERED)] = _values(scene, item)
        best = np.maximum(best, share)
    for figure in scene.figures:
        share = _overlap(scene, figure, grid)
        labels[share > TOUCHED] = UNKNOWN
        labels[share > COVERED, 1] = NOT_KNOWN
    return labels


def _values(scene: Scene, item: SceneObject) -> tuple[int, ...]:
    column, row = item.x / scene.width * TWELFTHS, item.y / scene.height * TWELFTHS
    middle = (min(max(int(column), 0), TWELFTHS - 1), min(max(int(row), 0), TWELFTHS - 1))
    return COLORS.index(item.color), SHAPES.index(item.shape), *middle, 0


def _mark_motion(labels: np.ndarray, first: Scene, second: Scene, grid: Grid) -> None:
    for old, new in zip(first.objects, second.objects, strict=True):
        dx, dy = new.x - old.x, new.y - old.y
        if max(abs(dx), abs(dy)) < 0.02 * max(first.width, first.height):
            continue
        horizontal = abs(dx) > abs(dy)
        step = (int(np.sign(dx)), 0) if horizontal else (0, int(np.sign(dy)))
        seen = np.maximum(_overlap(first, old, grid), _overlap(second, new, grid)) > COVERED
        labels[seen, 4] = 1 + list(DIRECTIONS.values()).index(step)


def _overlap(scene: Scene, item: SceneObject | Figure, grid: Grid) -> np.ndarray:
    """Return the overlap of an object's box with each cell, as a share of the smaller of the two, (rows, columns)."""
    height, width, reach = scene.height / grid[0], scene.width / grid[1], 0.9 * item.radius
    tops, lefts = np.arange(grid[0]) * height, np.arange(grid[1]) * width
    down = np.minimum(tops + height, item.y + reach) - np.maximum(tops, item.y - reach)
    across = np.minimum(lefts + width, item.x + reach) - np.maximum(lefts, item.x - reach)
    area = np.clip(down, 0, None)[:, None] * np.clip(across, 0, None)[None]
    return np.asarray(area / min(height * width, 4 * reach * reach))
