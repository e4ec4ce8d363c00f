"""2-D rotary embedding of the vision encoder (Qwen2-VL, arXiv:2409.12191, section 2.1; RoPE: arXiv:2104.09864)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels.streams import to_device
from ...media.types import Grid
from .config import VISION_ROPE_THETA


def patch_positions(h: int, w: int, merge: int) -> torch.Tensor:
    """Return the row and column of each patch of one frame, in patch order: by windows of `merge` x `merge` patches.

    Returns:
        int64 [h * w, 2].
    """
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    windows = torch.stack((rows, columns), dim=-1).view(h // merge, merge, w // merge, merge, 2)
    return windows.transpose(1, 2).reshape(-1, 2)


def rotary_tables(
    grids: Sequence[Grid], *, head_dim: int, merge: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cosines and sines for all patches of `grids`; all frames of an item have the same values.

    The first half of a table's columns encodes the row, the second half the column.

    Returns:
        Two float32 tensors [patches, head_dim // 2].
    """
    positions = torch.cat([patch_positions(grid.h, grid.w, merge).repeat(grid.t, 1) for grid in grids])
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=device) / (head_dim // 2)
    angles = (to_device(positions, device)[:, :, None] / VISION_ROPE_THETA**exponents).flatten(1)
    return angles.cos(), angles.sin()
