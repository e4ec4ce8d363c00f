"""Learned positions of the vision encoder, interpolated to the grid of an item.

A table has one row per cell of a square. The corner patches of a frame get the values of the corner cells, and the
others are interpolated between the four nearest cells (bilinear, `align_corners`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from dashinfer_vlm_core.kernels.streams import to_device
from dashinfer_vlm_core.media.types import Grid
from dashinfer_vlm_core.models.qwen2_vl.vit import patch_positions


class PositionTable:
    """The table of a vision encoder.

    Args:
        table: [side * side, width]; kept in float32, in which positions are interpolated.
        merge: patches per side of a merge unit.
    """

    def __init__(self, table: torch.Tensor, *, merge: int) -> None:
        self._table = table.float()
        self._side = round(len(table) ** 0.5)
        self._merge = merge

    def __call__(self, grids: Sequence[Grid]) -> torch.Tensor:
        """Return the positions of all patches of `grids`, float32 [patches, width]; all frames have the same ones."""
        positions = []
        device = self._table.device
        for grid in grids:
            cells, weights = interpolation(grid.h, grid.w, side=self._side, merge=self._merge)
            frame = F.embedding_bag(
                to_device(cells, device), self._table, mode="sum", per_sample_weights=to_device(weights, device)
            )
            positions.append(frame.repeat(grid.t, 1))
        return torch.cat(positions)


def interpolation(h: int, w: int, *, side: int, merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how the positions of one frame of `h` x `w` patches are interpolated.

    Returns:
        In patch order, four cells of each patch, int64 [patches, 4], and their weights, float32 [patches, 4].
    """
    rows, columns = patch_positions(h, w, merge).unbind(1)
    top, bottom, down = _neighbors(rows, h, side)
    left, right, across = _neighbors(columns, w, side)
    cells = torch.stack((top * side + left, top * side + right, bottom * side + left, bottom * side + right), dim=1)
    weights = torch.stack(((1 - down) * (1 - across), (1 - down) * across, down * (1 - across), down * across), dim=1)
    return cells, weights


def _neighbors(index: torch.Tensor, size: int, side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the cells before and after each index along one axis of the table, and the share of the second."""
    at = index.float() * (side - 1) / max(size - 1, 1)
    before = at.floor().long()
    return before, (before + 1).clamp(max=side - 1), at - before
