"""Sizes in pixels: the model's limits, and Qwen2-VL's rule for resizing images."""

from __future__ import annotations

from functools import partial

from dashinfer_vlm_core.models import patches

PATCH = 14
"""Side of a patch in pixels."""
FACTOR = 28
"""Side in pixels of the area of one token: 2 x 2 patches are merged."""
TEMPORAL_PATCH = 2
"""Frames per patch; an image counts as two equal frames."""
MIN_PIXELS = 84 * 84
MAX_PIXELS = 168 * 168
"""Between 9 and 36 tokens per image. Other sizes are scaled, as in the checkpoint's preprocessor configuration."""

smart_resize = partial(patches.smart_resize, factor=FACTOR, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)
"""(height, width) -> the size to which the engine resizes an image."""
