"""The vision encoder of Qwen3-VL: encodes many images and videos in one packed forward pass.

In shapes, `n` is the number of patches of all items and `d` is the encoder's hidden size. A visual token consists of an
embedding and one level per DeepStack merger (arXiv:2406.04334), which merges the output of an earlier block.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dashinfer_vlm_core.concurrency.compute import executor_for
from dashinfer_vlm_core.kernels.types import Activation, Linear
from dashinfer_vlm_core.media.types import Grid
from dashinfer_vlm_core.models.qwen2_vl.vit import (
    AttentionInputs,
    Block,
    Merger,
    PartDivider,
    VisionModel,
    VisionWeights,
    layer_norm,
    run_block,
)

from .config import VisionConfig
from .position_table import PositionTable

ACTIVATIONS = {"gelu_pytorch_tanh": Activation.GELU_TANH, "gelu": Activation.GELU}


class VisionInputs(NamedTuple):
    """What the blocks need of the grids of the items.

    Attributes:
        attention: spans and rotary tables of the patches.
        positions: [n, d], added to the embedded patches.
    """

    attention: AttentionInputs
    positions: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Qwen3VLVisionModel(VisionModel):
    """The published vision encoder; a `PackedVisionModel`.

    Attributes:
        positions: added to the embedded patches.
        deepstack: the mergers of earlier blocks by the index of the block; they normalize whole merge units.
    """

    config: VisionConfig
    positions: PositionTable
    blocks: Sequence[Block]
    deepstack: Mapping[int, Merger]

    def inputs(self, grids: Sequence[Grid]) -> VisionInputs:
        config = self.config
        attention = AttentionInputs(
            grids, head_dim=config.head_dim, merge=config.spatial_merge_size, device=self.device
        )
        return VisionInputs(attention, self.positions(grids).to(self.dtype))

    def parts(self, patches: torch.Tensor, inputs: VisionInputs) -> Generator[None, None, torch.Tensor]:
        """See `PackedVisionModel`.

        Returns:
            [n / spatial_merge_size ** 2, output_size * (1 + levels)]: the embedding, then the levels.
        """
        config = self.config
        x = self.patch_embed(patches)
        x += inputs.positions
        divider = PartDivider(24 * len(x) * config.hidden_size**2, self.device)
        levels = []
        for number, block in enumerate(self.blocks):
            run_block(self.kernels, block, x, inputs.attention, heads=config.num_heads)
            if number in self.deepstack:
                merger = self.deepstack[number]
                levels.append(merger.fc2(merger.fc1(layer_norm(self.kernels, self._units(x), merger.norm))))
            if divider.ends():
                yield
                divider.begin()
        embedding = self.merger.fc2(self.merger.fc1(self._units(layer_norm(self.kernels, x, self.merger.norm))))
        return torch.cat([embedding, *levels], dim=1)

    def _units(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, self.config.hidden_size * self.config.spatial_merge_size**2)


def load_vision_model(config: VisionConfig, read: VisionWeights) -> Qwen3VLVisionModel:
    """Load the vision encoder of an opened checkpoint in parts, so that other work may run in between.

    Raises:
        CheckpointError: a tensor is missing or has an unexpected shape.
    """
    run = executor_for(read.device).run
    cells = config.table_side**2
    width = config.hidden_size
    return Qwen3VLVisionModel(
        config=config,
        kernels=read.kernels,
        device=torch.device(read.device),
        dtype=read.dtype,
        patch_embed=run(lambda: _load_patch_embed(config, read)),
        positions=run(
            lambda: PositionTable(read.tensor("pos_embed.weight", cells, width), merge=config.spatial_merge_size)
        ),
        blocks=[
            run(functools.partial(_load_block, f"blocks.{number}", config, read)) for number in range(config.depth)
        ],
        merger=run(lambda: _load_merger("merger", config, read, norm_width=width)),
        deepstack={
            layer: run(functools.partial(_load_level, f"deepstack_merger_list.{number}", config, read))
            for number, layer in enumerate(config.deepstack_layers)
        },
    )


def _load_patch_embed(config: VisionConfig, read: VisionWeights) -> Linear:
    patch = (3, config.temporal_patch_size, config.patch_size, config.patch_size)
    weight = read.tensor("patch_embed.proj.weight", config.hidden_size, *patch).flatten(1)
    return read.kernels.linear(weight, read.tensor("patch_embed.proj.bias", config.hidden_size))


def _load_block(name: str, config: VisionConfig, read: VisionWeights) -> Block:
    width, inner = config.hidden_size, config.intermediate_size
    return Block(
        norm1=read.norm(f"{name}.norm1", width),
        qkv=read.linear(f"{name}.attn.qkv", 3 * width, width),
        proj=read.linear(f"{name}.attn.proj", width, width),
        norm2=read.norm(f"{name}.norm2", width),
        fc1=read.linear(f"{name}.mlp.linear_fc1", inner, width, ACTIVATIONS[config.hidden_act]),
        fc2=read.linear(f"{name}.mlp.linear_fc2", width, inner),
    )


def _load_level(name: str, config: VisionConfig, read: VisionWeights) -> Merger:
    return _load_merger(name, config, read, norm_width=config.hidden_size * config.spatial_merge_size**2)


def _load_merger(name: str, config: VisionConfig, read: VisionWeights, *, norm_width: int) -> Merger:
    width = config.hidden_size * config.spatial_merge_size**2
    return Merger(
        norm=read.norm(f"{name}.norm", norm_width),
        fc1=read.linear(f"{name}.linear_fc1", width, width, Activation.GELU),
        fc2=read.output(f"{name}.linear_fc2", config.output_size, width),
    )
