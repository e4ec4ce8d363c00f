"""Qwen2-VL for training: the published architecture with the parameter names of published checkpoints.

Two things differ from an inference engine without changing the computed function. A row contains one prompt and many
questions about it as branches; `segments` determine the attention mask. All images of a batch have the same size, so
the vision encoder needs no variable-length attention.

Shapes: B rows of L tokens; N temporal patches ("frames") of P patches each; P patches become P / 4 tokens.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes of the model; names as in Qwen2-VL's config.json."""

    vocab_size: int = 768
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 4
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100.0
    """Not the usual 1e6: with it, the width axis, which has the slowest third of the frequencies, would rotate by less
    than 0.001 rad over a whole image, and the model could not use it. Much smaller values fail too: at 10 all
    frequencies are fast, and a word attends to the object that it names only at the distances seen in training."""
    mrope_section: tuple[int, int, int] = (16, 24, 24)
    embed_dim: int = 128
    depth: int = 4
    num_heads: int = 4
    patch_values: int = 3 * 2 * 14 * 14

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Packed rows, the network's input; created by `batches.py`."""

    tokens: Tensor
    """(B, L) indices into the vocabulary followed by the vision tokens of this batch."""
    positions: Tensor
    """(3, B, L) time, row and column of every token, the M-RoPE positions."""
    segments: Tensor
    """(B, L) 0 for the shared prompt, k for branch k, -1 for padding."""
    targets: Tensor
    """(B, L) the token to predict after this one, -100 if none."""
    patches: Tensor
    """(N, P, 1176) normalized pixels."""
    grid: tuple[int, int]
    """Rows and columns in patches, both even; P is their product."""
    cells: Tensor
    """(N * P / 4, 5) labels of each vision token, see `labels.py`; -100 for unknown."""
    places: Tensor
    """(n, 5) for vision tokens of the prompt: batch row, index in it, vertical and horizontal quarter, ordinal."""
    pointers: Tensor
    """(n, 2) row and index of tokens of answers about one object."""
    spots: Tensor
    """(n, L) true at the tokens of that object."""
    owners: Tensor
    """(B, L) the question of each target, an index into `tasks`; undefined where there is no target."""
    tasks: tuple[str, ...]


class VisionAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        frames, patches, width = x.shape
        qkv = self.qkv(x).view(frames, patches, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(qkv[:2], cos, sin).unbind(0)
        out: Tensor = self.proj((attention(q, k) @ qkv[2]).transpose(1, 2).reshape(frames, patches, width))
        return out


class VisionMlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        out: Tensor = self.fc2(x * torch.sigmoid(1.702 * x))  # quick GELU
        return out


class VisionBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = VisionAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = VisionMlp(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Merger(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.ln_q = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(4 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, hidden))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.ln_q(x).view(-1, 4 * x.shape[-1]))
        return out


class PatchEmbed(nn.Module):
    def __init__(self, values: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(values, width, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        out: Tensor = self.proj(patches)
        return out


class Vision(nn.Module):
    """Patches (N, P, 1176) -> vision tokens (N * P / 4, hidden)."""

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.head_dim = sizes.embed_dim // sizes.num_heads
        self.patch_embed = PatchEmbed(sizes.patch_values, sizes.embed_dim)
        self.blocks = nn.ModuleList(VisionBlock(sizes.embed_dim, sizes.num_heads) for _ in range(sizes.depth))
        self.merger = Merger(sizes.embed_dim, sizes.hidden_size)

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        cos, sin = vision_rotation(grid, self.head_dim)
        x = self.patch_embed(patches)
        for block in self.blocks:
            x = block(x, cos.to(x.dtype), sin.to(x.dtype))
        out: Tensor = self.merger(x)
        return out


class TextAttention(nn.Module):
    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim = (
            sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim,
        )  # fmt: skip
        self.q_proj = nn.Linear(sizes.hidden_size, self.heads * self.head_dim)
        self.k_proj = nn.Linear(sizes.hidden_size, self.groups * self.head_dim)
        self.v_proj = nn.Linear(sizes.hidden_size, self.groups * self.head_dim)
        self.o_proj = nn.Linear(self.heads * self.head_dim, sizes.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        rows, length, _ = x.shape
        parts = (self.q_proj, self.k_proj, self.v_proj)
        weight, offset = torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
        qkv = F.linear(x, weight, offset).view(rows, length, -1, self.head_dim).transpose(1, 2)
        rotated = rotate(qkv[:, : self.heads + self.groups], cos, sin)
        q, k, v = rotated[:, : self.heads], rotated[:, self.heads :], qkv[:, self.heads + self.groups :]
        shared = self.heads // self.groups
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        shares = attention(q, k, bias)
        return self.o_proj((shares @ v).transpose(1, 2).reshape(rows, length, -1)), shares


class TextMlp(nn.Module):
    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight])).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class FastRmsNorm(torch.autograd.Function):
    """RMSNorm with a fused backward pass: torch's makes many passes over memory and is four times slower here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.rsqrt(norm * norm / x.shape[-1] + eps).to(x.dtype)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        (gradient,) = gradients
        normed = x * scale
        outer = gradient * normed
        inner = outer @ weight[:, None] / x.shape[-1]  # mean over the width of gradient * weight * normed
        return (gradient * weight - normed * inner) * scale, outer.flatten(0, -2).sum(0), None


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = FastRmsNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


class TextLayer(nn.Module):
    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.self_attn = TextAttention(sizes)
        self.post_attention_layernorm = RmsNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.mlp = TextMlp(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the new hidden states and this layer's attention weights, (B, heads, L, L)."""
        change, shares = self.self_attn(self.input_layernorm(x), cos, sin, bias)
        x = x + change
        if kept is not None:
            x = x[kept]
        return x + self.mlp(self.post_attention_layernorm(x)), shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The text model's output for a batch of rows."""

    last: Tensor
    """(n, hidden) final hidden states of the tokens that have a target."""
    halfway: Tensor
    """(B, L, hidden) hidden states after half of the layers."""
    pointing: Tensor
    """(B, L, L) attention weights of the first head after that, which is trained to attend to the question's object."""


class Text(nn.Module):
    """The text model: maps embedded rows (B, L, hidden) to a `Reading`.

    After the last attention, only the tokens that `kept` (B, L) selects are computed.
    """

    def __init__(self, sizes: Architecture) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(TextLayer(sizes) for _ in range(sizes.num_hidden_layers))
        self.norm = RmsNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor, kept: Tensor) -> Reading:
        cos, sin = (part.to(x.dtype) for part in text_rotation(positions, self.sizes))
        bias = torch.zeros(mask.shape, dtype=x.dtype).masked_fill_(~mask, float("-inf"))
        halfway, last = x, len(self.layers) - 1
        attended = []
        for index, layer in enumerate(self.layers):
            x, shares = layer(x, cos, sin, bias, kept if index == last else None)
            attended.append(shares)
            if 2 * (index + 1) == len(self.layers):
                halfway = x
        return Reading(last=self.norm(x), halfway=halfway, pointing=attended[len(self.layers) // 2][:, 0])


class Heads(nn.Module):
    """Auxiliary outputs for training the vision encoder; they are not exported."""

    def __init__(self, hidden: int, cells: tuple[int, ...], places: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes = {"cells": cells, "places": places}
        self.cells = nn.Linear(hidden, sum(cells))
        self.places = nn.Linear(hidden, sum(places))


class Network(nn.Module):
    """The model to train: `visual.*` and `model.*` are published, `heads.*` are for training only."""

    def __init__(self, sizes: Architecture, cells: tuple[int, ...], places: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes = sizes
        self.visual = Vision(sizes)
        self.model = Text(sizes)
        self.heads = Heads(sizes.hidden_size, cells, places)

    def see(self, batch: Batch) -> Tensor:
        """Return the vision tokens, (N * P / 4, hidden)."""
        if not len(batch.patches):
            return torch.zeros((0, self.sizes.hidden_size), dtype=self.visual.patch_embed.proj.weight.dtype)
        out: Tensor = self.visual(batch.patches.to(self.visual.patch_embed.proj.weight.dtype), batch.grid)
        return out

    def read(self, batch: Batch, seen: Tensor) -> Reading:
        # The embedding table stays fp32: the gradient of a frequent token is a sum of thousands, too long for bf16.
        vectors = torch.cat([self.model.embed_tokens.weight, seen.float()])
        x = F.embedding(batch.tokens, vectors).to(seen.dtype)
        mask, kept = attention_mask(batch.segments), batch.targets != -100
        out: Reading = self.model(x, batch.positions, mask, kept)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Map (n, hidden) to fp32 logits (n, vocabulary); input and output embeddings are tied."""
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype)).float()


def attention(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return attention weights, (..., heads, length, length); much faster than torch's for short rows."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    shares: Tensor = (scores if bias is None else scores + bias).softmax(-1)
    return shares


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to the two halves of the last axis."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def attention_mask(segments: Tensor) -> Tensor:
    """Return the mask (B, 1, L, L) of earlier tokens in the shared prompt and in the same branch."""
    length = segments.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool).tril()
    own = segments[:, :, None] == segments[:, None, :]
    return ((own | (segments[:, None, :] == 0)) & earlier)[:, None]


@functools.cache
def vision_rotation(grid: tuple[int, int], head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, (P, head_dim), in patch order: windows of 2 x 2, row by row."""
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    order = [part.view(grid[0] // 2, 2, grid[1] // 2, 2).transpose(1, 2).flatten() for part in (rows, columns)]
    frequencies = 10000.0 ** -(torch.arange(0, head_dim // 2, 2) / (head_dim // 2))
    angles = torch.cat([part[:, None] * frequencies for part in order], dim=-1)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def text_rotation(positions: Tensor, sizes: Architecture) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, (B, 1, L, head_dim); each section of the frequencies uses its axis of the positions."""
    frequencies = sizes.rope_theta ** -(torch.arange(0, sizes.head_dim, 2) / sizes.head_dim)
    sections = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes.mrope_section))
    angles = positions[sections].permute(1, 2, 0) * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos(), angles.sin()


def initialize(network: Network) -> None:
    """Initialize weights scaled by fan-in: at these sizes with the usual deviation of 0.02 attention is nearly uniform
    and training stalls."""
    depths = {"visual": network.sizes.depth, "model": network.sizes.num_hidden_layers}
    for name, parameter in network.named_parameters():
        if parameter.ndim < 2:
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            continue
        deviation = 0.02 if "embed_tokens" in name else 1 / math.sqrt(parameter.shape[1])
        if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight", "fc2.weight")):
            deviation /= math.sqrt(2 * depths[name.split(".")[0]])
        nn.init.normal_(parameter, 0, deviation)
    for index, block in enumerate(network.visual.blocks):
        assert isinstance(block, VisionBlock)
        _initialize_local_attention(block.attn, 1 if index % 2 == 0 else -1)


@torch.no_grad()
def _initialize_local_attention(attention: VisionAttention, step: int, sharpness: float = 14.0) -> None:
    """Set query and key biases so that three heads initially attend to their own patch and to two neighbors.

    With axial rotary embedding, a constant query and key have a score of a^2 cos(frequency * (distance - shift)), whose
    peak is at the chosen shift. Shapes are learned much sooner than with uniform attention. The last head is unchanged.
    """
    head_dim = attention.qkv.in_features // attention.heads
    axis = head_dim // 4  # frequencies per axis
    biases = torch.zeros(3, attention.heads, head_dim)
    for head, shift in enumerate(((0, 0), (0, step), (step, 0))):
        for place, distance in enumerate(shift):
            for index, share in enumerate((1.0, 0.8)):
                slot, length = place * axis + index, math.sqrt(sharpness * share)
                angle = distance * 10000.0 ** (-index / axis)
                biases[0, head, slot] = length
                biases[1, head, slot] = length * math.cos(angle)
                biases[1, head, slot + head_dim // 2] = -length * math.sin(angle)
    attention.qkv.bias.copy_(biases.flatten())
