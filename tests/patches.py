"""Patches of random pixels: input for the vision encoder without an image or a video; and their normalization."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dashinfer_vlm_core.media import Grid
from dashinfer_vlm_core.media.types import Pixels
from dashinfer_vlm_core.models.interface import Patches
from dashinfer_vlm_core.models.patches import with_digest
from dashinfer_vlm_core.models.spec import PixelSpec


def random_patches(
    t: int, h: int, w: int, *, seed: int = 0, part: str = "messages[0].content[0]", side: int = 14
) -> Patches:
    """Return random patches of `side` pixels squared that depend on all arguments but `part`."""
    grid = Grid(t, h, w)
    pixels = np.random.default_rng([seed, *grid]).integers(0, 256, (grid.patches, 3 * 2 * side * side), dtype=np.uint8)
    return Patches(
        pixels=pixels,
        grid=grid,
        tokens=grid.patches // 4,
        kind="image" if t == 1 else "video",
        path=part,
        digest=hashlib.sha256(repr(grid).encode() + pixels.tobytes()).digest(),
    )


def normalize(pixels: Pixels, spec: PixelSpec) -> npt.NDArray[np.float32]:
    """Return `(x / 255 - mean) / std` per channel for rows as in `Patches.pixels`; float32 of the same shape."""
    mean, std = (np.array(values, dtype=np.float32)[:, np.newaxis] for values in (spec.mean, spec.std))
    channels = pixels.reshape(len(pixels), 3, -1).astype(np.float32)
    normalized: npt.NDArray[np.float32] = ((channels / np.float32(255) - mean) / std).reshape(pixels.shape)
    return normalized


def clip(start: int, stop: int, *, h: int = 4, w: int = 4, side: int = 14) -> Patches:
    """Return a video of these temporal patches of a random recording, with their digests."""
    units = [random_patches(1, h, w, seed=index, side=side).pixels for index in range(start, stop)]
    grid = Grid(stop - start, h, w)
    whole = replace(random_patches(1, h, w, side=side), kind="video", pixels=np.concatenate(units), grid=grid)
    return with_digest(replace(whole, tokens=grid.patches // 4))
