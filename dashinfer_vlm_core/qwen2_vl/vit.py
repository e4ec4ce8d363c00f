"""The vision tower (Qwen2-VL, arXiv:2409.12191): many pictures and videos in one packed pass.

Modules are named as the tensors of the published checkpoints. In shapes, `n` is the patches of all items, `d` the width
of the tower, `k` the number of heads and `c` the width of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from ..model import ModelSpec, PixelSpec
from ..patches import Grid, Patches
from .config import VisionConfig, read_vision_config
from .rope import rotary_tables, rotate
from .weights import Weights, torch_dtype

LAYER_NORM_EPS = 1e-6


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU, approximated by a sigmoid (arXiv:1606.08415, 2)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"quick_gelu": quick_gelu, "gelu": F.gelu}


class Frames:
    """Which patches attend to each other, and where they stand: made once per pass, used by every block.

    Attention stays within a frame, so a pass is a row of segments, one per frame. Neighbours of equal length form a
    group that is one batched attention: no mask, and no padding.

    Attributes:
        groups: (frames, patches per frame), in the order of the packed patches.
        cos: float32 [n, c / 2].
        sin: float32 [n, c / 2].
    """

    def __init__(self, grids: Sequence[Grid], config: VisionConfig, device: torch.device) -> None:
        neighbours = groupby(grids, key=frame_length)
        self.groups = [(sum(grid.t for grid in group), length) for length, group in neighbours]
        head_dim = config.embed_dim // config.num_heads
        self.cos, self.sin = rotary_tables(grids, head_dim=head_dim, merge=config.spatial_merge_size, device=device)


class PatchEmbed(nn.Module):
    """The published convolution strides by its own size: on patches that are cut already it is a matrix product."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        columns = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.proj = nn.Linear(columns, config.embed_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.proj(x)
        return embedded


class Attention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.embed_dim, 3 * config.embed_dim)
        self.proj = nn.Linear(config.embed_dim, config.embed_dim)

    def forward(self, x: torch.Tensor, frames: Frames) -> torch.Tensor:
        qkv: torch.Tensor = self.qkv(x).view(len(x), 3, self.num_heads, -1)
        query, key = rotate(qkv[:, :2], frames.cos, frames.sin).unbind(1)
        mixed: torch.Tensor = self.proj(attend(query, key, qkv[:, 2], frames.groups))
        return mixed


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Softmax attention within each frame: three times [n, k, c], and `Frames.groups`, to [n, d]."""
    sizes = [count * length for count, length in groups]
    attended = []
    for group, *packed in zip(groups, *(torch.split(x, sizes) for x in (query, key, value)), strict=True):
        q, k, v = (x.unflatten(0, group).transpose(1, 2) for x in packed)  # [frames, k, patches, c]
        attended.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1))
    return torch.cat(attended)


class MLP(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = int(config.embed_dim * config.mlp_ratio)
        self.fc1 = nn.Linear(config.embed_dim, width)
        self.fc2 = nn.Linear(width, config.embed_dim)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class Block(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.embed_dim, eps=LAYER_NORM_EPS)
        self.norm2 = nn.LayerNorm(config.embed_dim, eps=LAYER_NORM_EPS)
        self.attn = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, frames: Frames) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), frames)
        x += self.mlp(self.norm2(x))
        return x


class Merger(nn.Module):
    """Each window of patches, which stand together in patch order, becomes one visual token."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.width = config.embed_dim * config.spatial_merge_size**2
        self.ln_q = nn.LayerNorm(config.embed_dim, eps=LAYER_NORM_EPS)
        self.mlp = nn.Sequential(
            nn.Linear(self.width, self.width), nn.GELU(), nn.Linear(self.width, config.hidden_size)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = self.mlp(self.ln_q(x).view(-1, self.width))
        return tokens


class Tower(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.merger = Merger(config)

    def forward(self, patches: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """Normalised patches [n, columns] of items with `grids`, to [n / spatial_merge_size ** 2, hidden_size]."""
        frames = Frames(grids, self.config, patches.device)
        x = self.patch_embed(patches)
        for block in self.blocks:
            x = block(x, frames)
        tokens: torch.Tensor = self.merger(x)
        return tokens


class Qwen2VLEncoder:
    """The tower as a `VisionEncoder`.

    Rows of an item depend on the rest of its batch by rounding alone, since libraries may add up in another order for
    another number of rows: in float32 within 1e-5 of the largest value.
    """

    def __init__(self, tower: Tower, pixels: PixelSpec) -> None:
        weight = tower.patch_embed.proj.weight
        self.tower = tower
        self.device, self.dtype = weight.device, weight.dtype
        columns = weight.shape[1] // len(pixels.mean)
        self.mean = 255 * torch.tensor(pixels.mean, device=self.device).repeat_interleave(columns)
        self.std = 255 * torch.tensor(pixels.std, device=self.device).repeat_interleave(columns)

    @torch.inference_mode()
    def encode(self, batch: Sequence[Patches]) -> list[torch.Tensor]:
        # Sorted, so that equal frames become neighbours; cloned, so that an item does not hold its batch's memory.
        order = sorted(range(len(batch)), key=lambda index: frame_length(batch[index].grid))
        grids = [batch[index].grid for index in order]
        pixels = torch.from_numpy(np.concatenate([batch[index].pixels for index in order]))
        window = self.tower.config.spatial_merge_size**2
        rows = torch.split(self.tower(self.normalise(pixels), grids), [grid.patches // window for grid in grids])
        return [item.clone() for _, item in sorted(zip(order, rows, strict=True))]

    def adopt(self, rows: npt.NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(rows).to(self.device, self.dtype)

    def normalise(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 [n, columns] to the tower's dtype on its device, each channel around 0."""
        return ((pixels.to(self.device).float() - self.mean) / self.std).to(self.dtype)


def frame_length(grid: Grid) -> int:
    """Patches of one frame."""
    return grid.h * grid.w


def load_encoder(spec: ModelSpec, *, device: str, dtype: str) -> Qwen2VLEncoder:
    """The tower of a checkpoint; see `Architecture.load_vision`."""
    config = read_vision_config(spec.folder)
    with Weights.open(spec.folder) as weights:
        tower = load_tower(config, weights, device=device, dtype=torch_dtype(dtype))
    return Qwen2VLEncoder(tower, spec.pixels)


def load_tower(config: VisionConfig, weights: Weights, *, device: str, dtype: torch.dtype) -> Tower:
    """A tower whose parameters are read one by one, straight to where they stay.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    with torch.device("meta"):
        tower = Tower(config)
    state = {}
    for name, tensor in tower.state_dict().items():
        stored = weights.tensor(f"visual.{name}", stored_shape(name, tensor, config), device=device, dtype=dtype)
        state[name] = stored.view_as(tensor)
    tower.load_state_dict(state, assign=True)
    return tower.eval().requires_grad_(False)


def stored_shape(name: str, tensor: torch.Tensor, config: VisionConfig) -> tuple[int, ...]:
    """The shape of a parameter in the files: as here, but the patch embedding is stored as a convolution."""
    if name != "patch_embed.proj.weight":
        return tuple(tensor.shape)
    return (config.embed_dim, config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
