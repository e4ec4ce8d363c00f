"""The attention windows of the vision encoder (Qwen2.5-VL, arXiv:2502.13923, section 2.1.1).

A merge unit is the square of patches that become one visual token; they are consecutive in patch order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dashinfer_vlm_core.media.types import Grid


class WindowOrder(NamedTuple):
    """The merge units of many items, ordered so that those of a window are consecutive, within their frame.

    Attributes:
        units: int64 [units]: the index in patch order of each merge unit.
        lengths: number of merge units of each window.
    """

    units: npt.NDArray[np.int64]
    lengths: list[int]


def window_order(grids: Sequence[Grid], *, merge: int, window: int) -> WindowOrder:
    """Divide each frame into windows from its upper left corner, with smaller ones at the right and lower edges.

    Args:
        grids: patches of the items.
        merge: patches per side of a merge unit.
        window: merge units per side of a window.
    """
    units: list[npt.NDArray[np.int64]] = []
    lengths: list[int] = []
    start = 0
    for grid in grids:
        frame, counts = _frame_windows(grid.h // merge, grid.w // merge, window)
        for _ in range(grid.t):
            units.append(frame + start)
            start += len(frame)
        lengths += counts * grid.t
    return WindowOrder(np.concatenate(units), lengths)


def _frame_windows(height: int, width: int, window: int) -> tuple[npt.NDArray[np.int64], list[int]]:
    row, column = np.divmod(np.arange(height * width), width)
    number = row // window * -(-width // window) + column // window
    return np.argsort(number, kind="stable"), np.bincount(number).tolist()
