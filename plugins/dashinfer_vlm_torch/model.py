"""The Qwen2 text model with M-RoPE: packed tokens of many requests in, logits of the rows that were asked for out.

After the published `modeling_qwen2_vl`; transformers' is the oracle. Weights that read the same input are fused into
one matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dashinfer_vlm_core.kernels import Activation, DecoderLayer, DecoderShape, Head, Kernels, Linear, Pass, Spans
from dashinfer_vlm_core.models.qwen2_vl.config import TextConfig
from dashinfer_vlm_core.models.qwen2_vl.weights import Weights

from .attention import KVCache


class Batch(NamedTuple):
    """New tokens of many requests, one request after the other; all but the positions as in `Pass`.

    Attributes:
        positions: int64 [3, tokens].
    """

    positions: Tensor
    slots: Tensor
    spans: Spans
    last: Tensor
    last_spans: Spans


class TextModel:
    """Embedding table, layers, final norm and output layer on one device, in one dtype."""

    def __init__(
        self,
        weights: Weights,
        config: TextConfig,
        kernels: Kernels,
        *,
        device: str,
        dtype: torch.dtype,
        int8: bool = False,
    ) -> None:
        """Read the model; with `int8`, which `kernels` must know, the matrices are rounded to 8 bits."""
        self.config = config
        self.device = device
        self.dtype = dtype
        self.kernels = kernels
        read = _Reader(weights, kernels, device, dtype, int8)
        hidden, vocab = config.hidden_size, config.vocab_size
        # A part after the other, so that others may compute meanwhile.
        self._embedding = kernels.compute(lambda: read.tensor("model.embed_tokens.weight", vocab, hidden))
        self._layers = kernels.decoder_layers(
            [
                kernels.compute(functools.partial(_read_layer, read, config, number))
                for number in range(config.num_hidden_layers)
            ],
            DecoderShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.rms_norm_eps),
        )
        self._norm = read.tensor("model.norm.weight", hidden)
        self._head = kernels.compute(lambda: _read_head(read, config, self._embedding))
        self._rotary = Rotary(config, device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[tokens, hidden_size] of int64 [tokens]; memory of its own, to be written to."""
        return F.embedding(token_ids, self._embedding)

    def forward(self, x: Tensor, batch: Batch, cache: KVCache) -> Tensor:
        """Hidden states after the last layer, not normalised, which `logits` does; see `DecoderLayers`."""
        cos, sin = self._rotary(batch.positions)
        return self._layers(x, Pass(cos, sin, *batch[1:], cache.pool))

    def logits(self, x: Tensor) -> Tensor:
        """float32 [rows, vocab_size] of hidden states [rows, hidden_size]."""
        return self._head(self._normalise(x))

    def likeliest(self, x: Tensor) -> Tensor | None:
        """int64 [rows], the token of each row's largest logit; None if `logits` is the way to find it."""
        return self._head.best(self._normalise(x))

    def _normalise(self, x: Tensor) -> Tensor:
        return self.kernels.norm(x, self._norm, None, self.config.rms_norm_eps)


class Turn(NamedTuple):
    """Cosines and sines, both float32 [tokens, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


class Rotary:
    """M-RoPE (Qwen2-VL, arXiv 2409.12191, section 2.1): each frequency turns with time, height or width."""

    def __init__(self, config: TextConfig, device: str) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._frequencies = (1.0 / config.rope_theta**exponents).to(device)
        self._axes = torch.arange(3).repeat_interleave(torch.tensor(config.mrope_section)).to(device)

    def __call__(self, positions: Tensor) -> Turn:
        """The turn of int64 positions [3, tokens]."""
        angles = positions[self._axes].T.contiguous() * self._frequencies
        return Turn(angles.cos(), angles.sin())


class _Reader(NamedTuple):
    weights: Weights
    kernels: Kernels
    device: str
    dtype: torch.dtype
    int8: bool

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.weights.tensor(name, shape, device=self.device, dtype=self.dtype)

    def fused(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> Tensor:
        """The named tensors one under the other, each read to where it belongs."""
        fused = self.weights.empty([sum(rows), *columns], device=self.device, dtype=self.dtype)
        for name, part in zip(names, torch.split(fused, list(rows)), strict=True):
            self.weights.read(name, part)
        return fused

    def linear(self, weight: Tensor, bias: Tensor | None = None, activation: Activation = Activation.NONE) -> Linear:
        return self.kernels.linear(weight, bias, activation=activation, int8=self.int8)


def _read_head(read: _Reader, config: TextConfig, embedding: Tensor) -> Head:
    tied = config.tie_word_embeddings
    weight = embedding if tied else read.tensor("lm_head.weight", config.vocab_size, config.hidden_size)
    return read.kernels.head(weight, int8=read.int8)


def _read_layer(read: _Reader, config: TextConfig, number: int) -> DecoderLayer:
    prefix = f"model.layers.{number}"
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    qkv = [f"{prefix}.self_attn.{name}_proj" for name in ("q", "k", "v")]
    gate_up = [f"{prefix}.mlp.{name}_proj.weight" for name in ("gate", "up")]
    return DecoderLayer(
        input_norm=read.tensor(f"{prefix}.input_layernorm.weight", hidden),
        qkv=read.linear(
            read.fused([f"{name}.weight" for name in qkv], [query, key, key], hidden),
            read.fused([f"{name}.bias" for name in qkv], [query, key, key]),
        ),
        output=read.linear(read.tensor(f"{prefix}.self_attn.o_proj.weight", hidden, query)),
        mlp_norm=read.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=read.linear(read.fused(gate_up, [inner, inner], hidden), activation=Activation.SILU_GATE),
        down=read.linear(read.tensor(f"{prefix}.mlp.down_proj.weight", hidden, inner)),
    )
