"""The vision encoder of Qwen3-VL: that of Qwen2-VL with learned positions, and with DeepStack mergers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dashinfer_vlm_core.concurrency.compute import executor_for
from dashinfer_vlm_core.media.types import Grid
from dashinfer_vlm_core.models.qwen2_vl.vision_weights import VisionLayout, VisionWeights, load_vision_model
from dashinfer_vlm_core.models.qwen2_vl.vit import VisionInputs, VisionModel

from .config import Qwen3VLVisionConfig
from .position_table import PositionTable

LAYOUT = VisionLayout(
    up=("mlp.linear_fc1",),
    down="mlp.linear_fc2",
    merger=("norm", "linear_fc1", "linear_fc2"),
    patch_bias=True,
)


class PositionInputs(VisionInputs):
    """The inputs with the learned positions of the patches, [patches, hidden size]."""

    positions: torch.Tensor

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        x += self.positions
        return x


@dataclass(frozen=True, kw_only=True, eq=False)
class Qwen3VLVisionModel(VisionModel):
    """The published vision encoder."""

    positions: PositionTable

    def inputs(self, grids: Sequence[Grid]) -> PositionInputs:
        inputs = PositionInputs(grids, self.config, self.device)
        inputs.positions = self.positions(grids).to(self.dtype)
        return inputs


def load(config: Qwen3VLVisionConfig, read: VisionWeights) -> Qwen3VLVisionModel:
    """See `load_vision_model`."""
    mergers = {layer: f"deepstack_merger_list.{number}" for number, layer in enumerate(config.deepstack_layers)}
    positions = executor_for(read.device).run(
        lambda: PositionTable(
            read.tensor("pos_embed.weight", config.table_side**2, config.hidden_size), merge=config.spatial_merge_size
        )
    )
    return load_vision_model(Qwen3VLVisionModel, config, read, LAYOUT, deepstack=mergers, positions=positions)
