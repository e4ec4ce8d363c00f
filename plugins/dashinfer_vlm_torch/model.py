"""The Qwen2 text model with M-RoPE: packed tokens of many requests in, logits of the rows that were asked for out.

After the published `modeling_qwen2_vl`; transformers' is the oracle. Weights that read the same input are fused into
one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dashinfer_vlm_core.qwen2_vl.config import TextConfig
from dashinfer_vlm_core.qwen2_vl.weights import Weights

from .attention import KVCache, Segment


class Batch(NamedTuple):
    """New tokens of many requests, one request after the other.

    Attributes:
        positions: int64 [3, tokens].
        slots: int64 [tokens], the rows of the cache that take each token's keys and values.
        segments: one per request.
        cache: keys and values of all tokens before.
    """

    positions: Tensor
    slots: Tensor
    segments: list[Segment]
    cache: KVCache

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """The rows of each segment of [tokens, ...]."""
        return torch.split(x, [segment.tokens for segment in self.segments])


class Layer(NamedTuple):
    """Weights of one layer; a matrix is [outputs, inputs].

    Attributes:
        number: counts from 0.
        qkv: query, key and value heads, one under the other; `qkv_bias` likewise.
        gate_up: the gate's rows, then the up projection's.
    """

    number: int
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class TextModel:
    """Embedding table, layers, final norm and output layer on one device, in one dtype."""

    def __init__(self, weights: Weights, config: TextConfig, *, device: str, dtype: torch.dtype) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        load = _Loader(weights, device, dtype)
        hidden, vocab = config.hidden_size, config.vocab_size
        self._embedding = load.tensor("model.embed_tokens.weight", vocab, hidden)
        self._layers = [_load_layer(load, config, number) for number in range(config.num_hidden_layers)]
        self._norm = load.tensor("model.norm.weight", hidden)
        self._head = self._embedding if config.tie_word_embeddings else load.tensor("lm_head.weight", vocab, hidden)
        self._rotary = Rotary(config, device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[tokens, hidden_size] of int64 [tokens]; memory of its own, to be written to."""
        return F.embedding(token_ids, self._embedding)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Hidden states after the last layer; keys and values of the new tokens are written to the cache.

        Args:
            x: [tokens, hidden_size], embeddings of the segments' new tokens one after the other; overwritten.
            batch: what else there is to know of them.

        Returns:
            [tokens, hidden_size], not normalised: `logits` does that for the rows that it needs.
        """
        turn = self._rotary(batch.positions, self.dtype)
        for layer in self._layers:
            x += self._attention(layer, self._normalise(x, layer.input_norm), batch, turn)
            gate, up = F.linear(self._normalise(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            x += F.linear(F.silu(gate) * up, layer.down)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """float32 [rows, vocab_size] of hidden states [rows, hidden_size]."""
        return F.linear(self._normalise(x, self._norm), self._head).float()

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _attention(self, layer: Layer, x: Tensor, batch: Batch, turn: Turn) -> Tensor:
        heads = self.config.num_attention_heads
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, self.config.head_dim)
        rotate_(qkv[:, : heads + self.config.num_key_value_heads], turn)
        batch.cache.write(layer.number, batch.slots, qkv[:, heads:])
        mixed = [
            segment.attend(layer.number, q)
            for segment, q in zip(batch.segments, batch.split(qkv[:, :heads]), strict=True)
        ]
        return F.linear(torch.cat(mixed), layer.output)


class Turn(NamedTuple):
    """Cosines and sines, both [tokens, 1, head_dim]; the sines of the first half of head_dim are negated."""

    cos: Tensor
    sin: Tensor


class Rotary:
    """M-RoPE (Qwen2-VL, arXiv 2409.12191, section 2.1): each frequency turns with time, height or width."""

    def __init__(self, config: TextConfig, device: str) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._frequencies = (1.0 / config.rope_theta**exponents).to(device)
        self._axes = torch.arange(3).repeat_interleave(torch.tensor(config.mrope_section)).to(device)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Turn:
        """The turn of int64 positions [3, tokens]."""
        angles = positions[self._axes].T * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return Turn(torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype))


def rotate_(x: Tensor, turn: Turn) -> None:
    """Turn [tokens, heads, head_dim] in place; dimension i is paired with i + head_dim / 2."""
    torch.addcmul(x * turn.cos, x.roll(x.shape[-1] // 2, -1), turn.sin, out=x)


class _Loader(NamedTuple):
    weights: Weights
    device: str
    dtype: torch.dtype

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.weights.tensor(name, shape, device=self.device, dtype=self.dtype)

    def fused(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> Tensor:
        """The named tensors one under the other, each read to where it belongs."""
        fused = torch.empty(sum(rows), *columns, device=self.device, dtype=self.dtype)
        for name, part in zip(names, torch.split(fused, list(rows)), strict=True):
            self.weights.read(name, part)
        return fused


def _load_layer(load: _Loader, config: TextConfig, number: int) -> Layer:
    prefix = f"model.layers.{number}"
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    qkv = [f"{prefix}.self_attn.{name}_proj" for name in ("q", "k", "v")]
    return Layer(
        number=number,
        input_norm=load.tensor(f"{prefix}.input_layernorm.weight", hidden),
        qkv=load.fused([f"{name}.weight" for name in qkv], [query, key, key], hidden),
        qkv_bias=load.fused([f"{name}.bias" for name in qkv], [query, key, key]),
        output=load.tensor(f"{prefix}.self_attn.o_proj.weight", hidden, query),
        mlp_norm=load.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=load.fused([f"{prefix}.mlp.{name}_proj.weight" for name in ("gate", "up")], [inner, inner], hidden),
        down=load.tensor(f"{prefix}.mlp.down_proj.weight", hidden, inner),
    )
