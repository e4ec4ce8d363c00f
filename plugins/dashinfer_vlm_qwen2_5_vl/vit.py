"""The vision encoder of Qwen2.5-VL (arXiv:2502.13923): that of Qwen2-VL, where most blocks attend within windows.

A merge unit is the square of patches that become one visual token; they are consecutive in patch order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dashinfer_vlm_core.kernels.streams import to_device
from dashinfer_vlm_core.media.types import Grid
from dashinfer_vlm_core.models.qwen2_vl.vision_weights import VisionLayout, VisionWeights, load_vision_model
from dashinfer_vlm_core.models.qwen2_vl.vit import VisionInputs, VisionModel, consecutive_spans

from .config import Qwen25VLVisionConfig

LAYOUT = VisionLayout(up=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj", norm_bias=False)


class WindowInputs(VisionInputs):
    """The inputs in window order, in which the patches of a window are consecutive."""

    def __init__(self, grids: Sequence[Grid], config: Qwen25VLVisionConfig, device: torch.device) -> None:
        super().__init__(grids, config, device)
        merge = config.spatial_merge_size
        self._unit = merge**2
        units, lengths = window_order(grids, merge=merge, window=config.window)
        self._order = to_device(torch.from_numpy(units), device)
        self._inverse = to_device(torch.from_numpy(np.argsort(units)), device)
        windows = consecutive_spans((self._unit * length for length in lengths), device)
        self.spans = [
            frames if number in config.fullatt_block_indexes else windows for number, frames in enumerate(self.spans)
        ]
        self.cos = self.apply(self.cos)
        self.sin = self.apply(self.sin)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, self._unit * x.shape[1])[self._order].view(x.shape)

    def restore(self, merged: torch.Tensor) -> torch.Tensor:
        return merged[self._inverse]


@dataclass(frozen=True, kw_only=True, eq=False)
class Qwen25VLVisionModel(VisionModel):
    """The published vision encoder."""

    config: Qwen25VLVisionConfig

    def inputs(self, grids: Sequence[Grid]) -> WindowInputs:
        return WindowInputs(grids, self.config, self.device)


def load(config: Qwen25VLVisionConfig, read: VisionWeights) -> Qwen25VLVisionModel:
    """See `load_vision_model`."""
    return load_vision_model(Qwen25VLVisionModel, config, read, LAYOUT)


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
