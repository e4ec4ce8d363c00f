"""Media -> Patches: resize, and cut into the patches that the vision tower reads. numpy and Pillow, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .media.types import Kind


class Grid(NamedTuple):
    """Patches of one picture or video along time, height and width."""

    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        return self.t * self.h * self.w


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Patches:
    """One picture or video, resized and cut, not yet normalised: the tower does that where it runs.

    Attributes:
        pixels: uint8 [t * h * w, 3 * temporal_patch_size * patch_size ** 2], in Qwen2-VL's patch order.
        grid: patches along time, height and width.
        tokens: visual tokens that the tower will make of them.
        kind: what they were.
        part: where it stands in the request.
        digest: 32 bytes; equal exactly for equal kind, grid and pixels.
    """

    pixels: npt.NDArray[np.uint8]
    grid: Grid
    tokens: int
    kind: Kind
    part: str
    digest: bytes
