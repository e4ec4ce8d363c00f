"""Sizes in pixels: the model's limits and Qwen2-VL's rule for the size that a picture is given before it is cut."""

from __future__ import annotations

import math

PATCH = 14
"""Side of a patch in pixels."""
FACTOR = 28
"""Side in pixels of what becomes one token: two by two patches are merged."""
TEMPORAL_PATCH = 2
"""Frames that share a patch; a picture counts as two equal frames."""
MIN_PIXELS = 84 * 84
MAX_PIXELS = 168 * 168
"""Between 9 and 36 tokens for a picture. Sizes outside are scaled, as the preprocessor files of the checkpoint say."""


def smart_resize(height: int, width: int) -> tuple[int, int]:
    """Qwen2-VL's rule: both sides multiples of 28, the area within the limits, the aspect ratio nearly kept."""
    rows, columns = round(height / FACTOR) * FACTOR, round(width / FACTOR) * FACTOR
    if rows * columns > MAX_PIXELS:
        shrink = math.sqrt(height * width / MAX_PIXELS)
        rows = max(FACTOR, math.floor(height / shrink / FACTOR) * FACTOR)
        columns = max(FACTOR, math.floor(width / shrink / FACTOR) * FACTOR)
    elif rows * columns < MIN_PIXELS:
        grow = math.sqrt(MIN_PIXELS / (height * width))
        rows, columns = math.ceil(height * grow / FACTOR) * FACTOR, math.ceil(width * grow / FACTOR) * FACTOR
    return rows, columns
