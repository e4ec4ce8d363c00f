"""The vision encoder of Qwen2.5-VL (arXiv:2502.13923): encodes many images and videos in one packed forward pass.

In shapes, `n` is the number of patches of all items, `d` is `hidden_size` and `c` is the head dimension. A merge unit
is the `spatial_merge_size` squared patches that become one visual token.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dashinfer_vlm_core.concurrency.compute import executor_for
from dashinfer_vlm_core.kernels.streams import to_device
from dashinfer_vlm_core.kernels.types import Activation, KVSpan, KVSpans, Linear, Norm
from dashinfer_vlm_core.media.types import Grid
from dashinfer_vlm_core.models.qwen2_vl.rope import rotary_tables
from dashinfer_vlm_core.models.qwen2_vl.vit import (
    Merger,
    PartDivider,
    VisionModel,
    VisionWeights,
    attend,
)

from .config import VisionConfig
from .windows import window_order

NORM_EPS = 1e-6


class Block(NamedTuple):
    """One block of the vision encoder; its norms are RMSNorms."""

    norm1: Norm
    qkv: Linear
    proj: Linear
    norm2: Norm
    gate_up: Linear
    down: Linear


class AttentionInputs:
    """The order of the patches, attention spans and rotary tables: computed once per forward pass.

    Attributes:
        order: int64 [n / merge unit]: the index of each merge unit in window order.
        restore: int64 [n / merge unit]: the inverse of `order`.
        windows: one span per window.
        frames: one span per frame, for the blocks with full attention.
        cos: float32 [n, c / 2], in window order.
        sin: float32 [n, c / 2], in window order.
    """

    def __init__(self, grids: Sequence[Grid], config: VisionConfig, device: torch.device) -> None:
        merge = config.spatial_merge_size
        head_dim = config.hidden_size // config.num_heads
        self._unit = merge**2
        units, windows, frames = window_order(grids, merge=merge, window=config.window)
        self.order: torch.Tensor = to_device(torch.from_numpy(units), device)
        self.restore: torch.Tensor = to_device(torch.from_numpy(np.argsort(units)), device)
        self.windows: KVSpans = self._spans(windows, device)
        self.frames: KVSpans = self._spans(frames, device)
        cos, sin = rotary_tables(grids, head_dim=head_dim, merge=merge, device=device)
        self.cos: torch.Tensor = self.reorder(cos)
        self.sin: torch.Tensor = self.reorder(sin)

    def reorder(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of x [n, columns] in window order."""
        return x.view(-1, self._unit * x.shape[1])[self.order].view(x.shape)

    def _spans(self, lengths: Sequence[int], device: torch.device) -> KVSpans:
        patches = [self._unit * length for length in lengths]
        starts = np.cumsum([0, *patches[:-1]]).tolist()
        spans = [KVSpan(start, count, start, count) for start, count in zip(starts, patches, strict=True)]
        return KVSpans(spans, device=device)


@dataclass(frozen=True, kw_only=True, eq=False)
class Qwen25VLVisionModel(VisionModel):
    """The published vision encoder; a `PackedVisionModel`."""

    config: VisionConfig
    blocks: Sequence[Block]

    def inputs(self, grids: Sequence[Grid]) -> AttentionInputs:
        return AttentionInputs(grids, self.config, self.device)

    def parts(self, patches: torch.Tensor, inputs: AttentionInputs) -> Generator[None, None, torch.Tensor]:
        """See `PackedVisionModel`.

        Returns:
            [n / spatial_merge_size ** 2, out_hidden_size], in the order of the patches.
        """
        x = inputs.reorder(self.patch_embed(patches))
        divider = PartDivider(len(x) * self._flop_per_patch(), self.device)
        for number, block in enumerate(self.blocks):
            block.proj.add_to(x, self._attend(number, x, inputs))
            block.down.add_to(x, block.gate_up(self._norm(x, block.norm2)))
            if divider.ends():
                yield
                divider.begin()
        width = self.config.hidden_size * self.config.spatial_merge_size**2
        merged = self.merger.fc2(self.merger.fc1(self._norm(x, self.merger.norm).view(-1, width)))
        return merged[inputs.restore]

    def _flop_per_patch(self) -> int:
        width = self.config.hidden_size
        return 2 * width * (4 * width + 3 * self.config.intermediate_size)

    def _norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self.kernels.norm(x, norm.weight, norm.bias, NORM_EPS)

    def _attend(self, number: int, x: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        block = self.blocks[number]
        spans = inputs.frames if number in self.config.fullatt_block_indexes else inputs.windows
        qkv = block.qkv(self._norm(x, block.norm1))
        return attend(self.kernels, qkv, inputs.cos, inputs.sin, spans, heads=self.config.num_heads)


def load_vision_model(config: VisionConfig, read: VisionWeights) -> Qwen25VLVisionModel:
    """Load the vision encoder of an opened checkpoint in parts, so that other work may run in between.

    Raises:
        CheckpointError: a tensor is missing or has an unexpected shape.
    """
    patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    run = executor_for(read.device).run
    return Qwen25VLVisionModel(
        config=config,
        kernels=read.kernels,
        device=torch.device(read.device),
        dtype=read.dtype,
        patch_embed=run(lambda: read.convolution("patch_embed.proj", config.hidden_size, *patch)),
        blocks=[
            run(functools.partial(_load_block, f"blocks.{number}", config, read)) for number in range(config.depth)
        ],
        merger=run(lambda: _load_merger(config, read)),
    )


def _load_block(name: str, config: VisionConfig, read: VisionWeights) -> Block:
    width = config.hidden_size
    return Block(
        norm1=_load_norm(f"{name}.norm1", width, read),
        qkv=read.linear(f"{name}.attn.qkv", 3 * width, width),
        proj=read.linear(f"{name}.attn.proj", width, width),
        norm2=_load_norm(f"{name}.norm2", width, read),
        gate_up=_load_gate_up(f"{name}.mlp", config, read),
        down=read.linear(f"{name}.mlp.down_proj", width, config.intermediate_size),
    )


def _load_merger(config: VisionConfig, read: VisionWeights) -> Merger:
    width = config.hidden_size * config.spatial_merge_size**2
    return Merger(
        norm=_load_norm("merger.ln_q", config.hidden_size, read),
        fc1=read.linear("merger.mlp.0", width, width, Activation.GELU),
        fc2=read.output("merger.mlp.2", config.out_hidden_size, width),
    )


def _load_norm(name: str, width: int, read: VisionWeights) -> Norm:
    return Norm(read.tensor(f"{name}.weight", width))


def _load_gate_up(name: str, config: VisionConfig, read: VisionWeights) -> Linear:
    inner = config.intermediate_size
    parts = [f"{name}.{part}" for part in ("gate_proj", "up_proj")]
    weight = read.matrix(parts, [inner, inner], config.hidden_size)
    bias = torch.cat([read.tensor(f"{part}.bias", inner) for part in parts])
    return read.layer(weight, bias, Activation.SILU_GATE)
