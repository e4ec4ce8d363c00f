"""Sizes in pixels: the model's limits, and Qwen2-VL's rule for resizing images."""

from __future__ import annotations

import math

PATCH = 14
"""Side of a patch in pixels."""
FACTOR = 28
"""Side in pixels of the area of one token: 2 x 2 patches are merged."""
TEMPORAL_PATCH = 2
"""Frames per patch; an image counts as two equal frames."""
MIN_PIXELS = 84 * 84
MAX_PIXELS = 168 * 168
"""Between 9 and 36 tokens per image. Other sizes are scaled, as in the checkpoint's preprocessor configuration."""


def smart_resize(height: int, width: int) -> tuple[int, int]:
    """Apply Qwen2-VL's rule: both sides are multiples of 28, the area is within the limits, the aspect ratio is nearly
    preserved."""
    rows, columns = round(height / FACTOR) * FACTOR, round(width / FACTOR) * FACTOR
    if rows * columns > MAX_PIXELS:
        shrink = math.sqrt(height * width / MAX_PIXELS)
        rows = max(FACTOR, math.floor(height / shrink / FACTOR) * FACTOR)
        columns = max(FACTOR, math.floor(width / shrink / FACTOR) * FACTOR)
    elif rows * columns < MIN_PIXELS:
        grow = math.sqrt(MIN_PIXELS / (height * width))
        rows, columns = math.ceil(height * grow / FACTOR) * FACTOR, math.ceil(width * grow / FACTOR) * FACTOR
    return rows, columns
