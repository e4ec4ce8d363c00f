"""The text model: from packed tokens of many sequences to the logits of the requested rows.

Its layers are built from a `TextModelSpec`; transformers' models are the reference. Weights that multiply the same
input are fused into one matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dashinfer_vlm_core.concurrency.compute import Executor
from dashinfer_vlm_core.kernels import mmap_buffer
from dashinfer_vlm_core.kernels.experts import Expert, GroupedExperts, MixtureOfExperts
from dashinfer_vlm_core.kernels.linears import create_head, create_linear
from dashinfer_vlm_core.kernels.quantization import Quantization, QuantizedWeight, has_8_bits
from dashinfer_vlm_core.kernels.streams import HIGH_PRIORITY, stream_executor
from dashinfer_vlm_core.kernels.types import (
    Activation,
    Additions,
    DecoderLayer,
    DecoderShape,
    Experts,
    ForwardBatch,
    Kernels,
    KVSpans,
    Linear,
    LMHead,
    LoraRows,
    Norm,
)
from dashinfer_vlm_core.models.lora import LoraWeights
from dashinfer_vlm_core.models.weights import Weights
from dashinfer_vlm_core.text_spec import ExpertsSpec, RotarySpec, TextModelSpec

from .key_balance import balance_norms, balance_projection
from .kv_cache import KVCache
from .lora import HeadChange, LoraReader, TextLora


class PackedBatch(NamedTuple):
    """New tokens of many sequences, one sequence after the other; all fields but the positions as in `ForwardBatch`.

    Attributes:
        positions: int64 [3, tokens].
    """

    positions: Tensor
    slots: Tensor
    spans: KVSpans
    last: Tensor
    last_spans: KVSpans
    additions: Additions | None = None
    loras: tuple[LoraRows, ...] = ()


class TextQuantization(NamedTuple):
    """How the matrices of a text model are quantized; None keeps the model's dtype.

    Attributes:
        layers: for the matrices of most layers.
        outer: for the first and the last layer, see `has_8_bits`.
        head: for the output layer.
    """

    layers: Quantization | None = None
    outer: Quantization | None = None
    head: Quantization | None = None

    def of_layer(self, number: int, count: int) -> Quantization | None:
        """For layer `number` of `count` layers."""
        return self.outer if has_8_bits(number, count) else self.layers


class TextModel:
    """Embedding table, layers, final norm and output layer on one device, in one dtype."""

    def __init__(
        self,
        weights: Weights,
        config: TextModelSpec,
        kernels: Kernels,
        *,
        device: str,
        dtype: torch.dtype,
        quantization: TextQuantization,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """Load the model.

        Args:
            weights: the checkpoint's tensors.
            config: the architecture.
            kernels: the kernels that run the model.
            device: torch's name of the device.
            dtype: the dtype of weights and hidden states.
            quantization: how the matrices are quantized, which `kernels` must support.
            cache_dtype: the dtype of the KV cache; that of the hidden states by default.
        """
        self.config = config
        self.device = device
        self.dtype = dtype
        self.kernels = kernels
        self.executor: Executor = stream_executor(device, priority=HIGH_PRIORITY)
        run = self.executor.run
        self._qkv_scales: dict[int, Tensor] = {}
        read = _Reader(weights, kernels, device, dtype, None, config, cache_dtype == torch.int8, self._qkv_scales)
        names, hidden, vocab = config.weights, config.hidden_size, config.vocab_size
        count = config.num_hidden_layers
        readers = [read.quantized(quantization.of_layer(number, count)) for number in range(count)]
        # One task per part, so that other tasks can run in between.
        self._embedding = run(lambda: read.tensor(f"{names.embedding}.weight", vocab, hidden))
        layers = [run(functools.partial(_read_layer, reader, config, number)) for number, reader in enumerate(readers)]
        shape = DecoderShape(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.norm_eps,
            config.visual_levels,
        )
        self._layers = kernels.decoder_layers(layers, shape)
        self.loops_over_experts: bool = any(isinstance(layer.experts, MixtureOfExperts) for layer in layers)
        self._norm = read.norm(names.norm, hidden)
        self._head = run(lambda: _read_head(read.quantized(quantization.head), config, self._embedding))
        self._rotary = Rotary(config.rotary, config.head_dim, device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Look up int64 [tokens]; returns a new, writable tensor [tokens, hidden_size]."""
        return F.embedding(token_ids, self._embedding)

    def forward(self, x: Tensor, batch: PackedBatch, cache: KVCache) -> Tensor:
        """Compute hidden states after the last layer, without the final norm, which `logits` applies; see
        `DecoderLayers`."""
        cos, sin = self._rotary(batch.positions)
        forward = ForwardBatch(cos, sin, *batch[1:5], cache.pool, batch.additions, cache.scales, batch.loras)
        return self._layers(x, forward)

    def logits(self, x: Tensor, heads: Sequence[tuple[slice, HeadChange]] = ()) -> Tensor:
        """Compute float32 [rows, vocab_size] from hidden states [rows, hidden_size]; `heads` are the rows for which an
        adapter changes the output layer."""
        normed = self._normalize(x)
        logits = self._head(normed)
        for rows, head in heads:
            head.apply(normed[rows], logits[rows])
        return logits

    def argmax(self, x: Tensor) -> Tensor | None:
        """Return int64 [rows], the token of each row's largest logit; None if the caller has to use `logits`."""
        return self._head.argmax(self._normalize(x))

    def load_lora(self, lora: LoraWeights) -> TextLora:
        """Read the text model's part of an adapter.

        Raises:
            CheckpointError: the adapter's file is damaged.
        """
        neighbors = self.config.rotary.pairs == "neighbors"
        reader = LoraReader(
            lora,
            self.config,
            self.kernels,
            device=self.device,
            dtype=self.dtype,
            qkv_scales=self._qkv_scales,
            as_halves=functools.partial(_as_halves, head_dim=self.config.head_dim) if neighbors else None,
        )
        return reader.read(self.executor)

    def _normalize(self, x: Tensor) -> Tensor:
        return self.kernels.norm(x, self._norm.weight, self._norm.bias, self.config.norm_eps)


class RotaryTables(NamedTuple):
    """Cosines and sines, both float32 [tokens, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


class Rotary:
    """M-RoPE (arXiv 2409.12191, section 2.1): each frequency is rotated by the time, height or width
    position."""

    def __init__(self, rotary: RotarySpec, head_dim: int, device: str) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self._frequencies = (1.0 / rotary.theta**exponents).to(device)
        self._axes = torch.tensor(rotary.axes).to(device)

    def __call__(self, positions: Tensor) -> RotaryTables:
        """Compute the tables of int64 positions [3, tokens]."""
        angles = positions[self._axes].T.contiguous() * self._frequencies
        return RotaryTables(angles.cos(), angles.sin())


class _Reader(NamedTuple):
    weights: Weights
    kernels: Kernels
    device: str
    dtype: torch.dtype
    quantization: Quantization | None
    spec: TextModelSpec
    balances_keys: bool
    qkv_scales: dict[int, Tensor]

    def quantized(self, quantization: Quantization | None) -> _Reader:
        """Return a reader of matrices with this quantization."""
        return self._replace(quantization=quantization)

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.weights.tensor(name, shape, device=self.device, dtype=self.dtype)

    def matrix(self, module: str, outputs: int, inputs: int) -> Tensor | QuantizedWeight:
        """Read the weights of a linear layer, which the checkpoint may store quantized."""
        return self.fused_matrix([module], [outputs], inputs)

    def fused_matrix(self, modules: Sequence[str], rows: Sequence[int], inputs: int) -> Tensor | QuantizedWeight:
        """Read the weights of several linear layers, concatenated along the rows."""
        return self.weights.matrix(modules, rows, inputs, device=self.device, dtype=self.dtype)

    def fused(self, names: Sequence[str], rows: Sequence[int], *columns: int) -> Tensor:
        """Read the named tensors into one tensor, concatenated along the rows."""
        fused = mmap_buffer.empty([sum(rows), *columns], self.dtype, self.device)
        for name, part in zip(names, torch.split(fused, list(rows)), strict=True):
            self.weights.read(name, part)
        return fused

    def groups_experts(self, *inputs: int) -> bool:
        """Whether the kernels compute all experts of a layer at once; `inputs` of their linear layers."""
        return self.quantization is None and self.kernels.groups_experts(self.dtype, inputs)

    def experts(self, shapes: Mapping[str, tuple[int, int, int]]) -> list[Tensor]:
        """Read the named weights of all experts, [experts, outputs, inputs]; published checkpoints store each of them
        transposed."""
        transposed = any(self.weights.shape(f"{name}.weight") != shape for name, shape in shapes.items())
        tensors = [mmap_buffer.empty(shape, self.dtype, self.device) for shape in shapes.values()]
        for name, tensor in zip(shapes, tensors, strict=True):
            self.weights.read_experts(name, tensor, transposed=transposed)
        return tensors

    def norm(self, name: str, width: int) -> Norm:
        weight = self.tensor(f"{name}.weight", width)
        return Norm(weight, None if self.spec.norm == "rms_norm" else torch.zeros_like(weight))

    def linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None, activation: Activation = Activation.NONE
    ) -> Linear:
        quantization = self.quantization
        return create_linear(
            self.kernels, weight, bias, dtype=self.dtype, activation=activation, quantization=quantization
        )

    def head(self, weight: Tensor | QuantizedWeight) -> LMHead:
        return create_head(self.kernels, weight, dtype=self.dtype, quantization=self.quantization)


def _read_head(read: _Reader, config: TextModelSpec, embedding: Tensor) -> LMHead:
    if config.tie_word_embeddings:
        return read.head(embedding)
    return read.head(read.matrix(config.weights.head, config.vocab_size, config.hidden_size))


def _read_layer(read: _Reader, config: TextModelSpec, number: int) -> DecoderLayer:
    names, prefix = config.weights, config.weights.layer.format(number)
    hidden = config.hidden_size
    query = config.num_attention_heads * config.head_dim
    gate_up, down = None, None
    experts: Experts | None = None
    if config.experts and number not in config.experts.dense_layers:
        experts = _read_experts(read, config, config.experts, prefix)
    else:
        gate_up, down = _read_mlp(read, config, prefix)
    query_norm, key_norm = _read_head_norms(read, config, prefix)
    return DecoderLayer(
        input_norm=read.norm(f"{prefix}.{names.input_norm}", hidden),
        qkv=_read_qkv(read, config, number),
        output=read.linear(read.matrix(f"{prefix}.{names.output}", hidden, query)),
        mlp_norm=read.norm(f"{prefix}.{names.mlp_norm}", hidden),
        gate_up=gate_up,
        down=down,
        query_norm=query_norm,
        key_norm=key_norm,
        experts=experts,
    )


def _read_mlp(read: _Reader, config: TextModelSpec, prefix: str) -> tuple[Linear, Linear]:
    """Return the gate and up projection, and the projection back to the hidden size."""
    names, hidden, inner = config.weights, config.hidden_size, config.intermediate_size
    gate_up = [f"{prefix}.{name}" for name in (names.gate, names.up)]
    return (
        read.linear(read.fused_matrix(gate_up, [inner, inner], hidden), activation=Activation.SILU_GATE),
        read.linear(read.matrix(f"{prefix}.{names.down}", hidden, inner)),
    )


def _read_experts(read: _Reader, config: TextModelSpec, spec: ExpertsSpec, prefix: str) -> Experts:
    """Return the experts of a layer. The router is not quantized: a wrong expert costs more than a rounded weight."""
    names, hidden, count = config.weights, config.hidden_size, spec.num_experts
    router = read.kernels.linear(read.tensor(f"{prefix}.{names.router}.weight", count, hidden), fp32_output=True)
    if f"{prefix}.{names.experts_gate_up}.weight" not in read.weights.names:
        experts = [_read_expert(read, config, spec, prefix, number) for number in range(count)]
    elif read.groups_experts(hidden, spec.intermediate_size):
        gate_up, down = _fused_weights(read, config, spec, prefix)
        return GroupedExperts(router, gate_up, down, spec.experts_per_token)
    else:
        experts = _read_fused_experts(read, config, spec, prefix)
    return MixtureOfExperts(router, experts, spec.experts_per_token)


def _fused_weights(read: _Reader, config: TextModelSpec, spec: ExpertsSpec, prefix: str) -> list[Tensor]:
    """Read the weights of all experts, stored together: gate and up projection, and the projection back to the hidden
    size; both [experts, outputs, inputs]."""
    names, hidden, inner, count = config.weights, config.hidden_size, spec.intermediate_size, spec.num_experts
    shapes = {
        f"{prefix}.{names.experts_gate_up}": (count, 2 * inner, hidden),
        f"{prefix}.{names.experts_down}": (count, hidden, inner),
    }
    return read.experts(shapes)


def _read_fused_experts(read: _Reader, config: TextModelSpec, spec: ExpertsSpec, prefix: str) -> list[Expert]:
    gate_up, down = _fused_weights(read, config, spec, prefix)
    return [
        Expert(read.linear(weights[0], activation=Activation.SILU_GATE), read.linear(weights[1]))
        for weights in zip(gate_up, down, strict=True)
    ]


def _read_expert(read: _Reader, config: TextModelSpec, spec: ExpertsSpec, prefix: str, number: int) -> Expert:
    names, hidden, inner = config.weights, config.hidden_size, spec.intermediate_size
    gate, up, down = (
        f"{prefix}.{name.format(number)}" for name in (names.expert_gate, names.expert_up, names.expert_down)
    )
    return Expert(
        read.linear(read.fused_matrix([gate, up], [inner, inner], hidden), activation=Activation.SILU_GATE),
        read.linear(read.matrix(down, hidden, inner)),
    )


def _read_qkv(read: _Reader, config: TextModelSpec, number: int) -> Linear:
    names, prefix, hidden = config.weights, config.weights.layer.format(number), config.hidden_size
    query, key = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    modules, rows = [f"{prefix}.{name}" for name in (names.query, names.key, names.value)], [query, key, key]
    weight = read.fused_matrix(modules, rows, hidden)
    bias = read.fused([f"{name}.bias" for name in modules], rows) if config.qkv_bias else None
    if config.rotary.pairs == "neighbors":
        rows_in_halves = _as_halves(torch.arange(query + key, device=read.device), config.head_dim)
        order = torch.cat([rows_in_halves, torch.arange(query + key, query + 2 * key, device=read.device)])
        weight = weight.take_rows(order) if isinstance(weight, QuantizedWeight) else weight[order]
        bias = None if bias is None else bias[order]
    if read.balances_keys and not config.qk_norm:
        gain = read.tensor(f"{prefix}.{names.input_norm}.weight", hidden)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        read.qkv_scales[number] = balance_projection(weight, bias, gain, heads=heads, kv_heads=kv_heads)
    return read.linear(weight, bias)


def _read_head_norms(read: _Reader, config: TextModelSpec, prefix: str) -> tuple[Norm | None, Norm | None]:
    """Read the norms of query heads and of key heads, if the model has them."""
    query, key = (
        _read_head_norm(read, config, f"{prefix}.{name}")
        for name in (config.weights.query_norm, config.weights.key_norm)
    )
    return balance_norms(query, key) if read.balances_keys and query and key else (query, key)


def _read_head_norm(read: _Reader, config: TextModelSpec, name: str) -> Norm | None:
    if not config.qk_norm:
        return None
    norm = read.norm(name, config.head_dim)
    if config.rotary.pairs == "halves":
        return norm
    weight, bias = (None if part is None else _as_halves(part, config.head_dim) for part in norm)
    assert weight is not None
    return Norm(weight, bias)


def _as_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Permute rows [heads * head_dim, ...] in which neighbors are rotated together to the order that the kernels
    rotate: the even rows of each head, then the odd ones. Products of queries and keys do not change."""
    return torch.cat([torch.unflatten(rows, 0, (-1, head_dim))[:, start::2] for start in (0, 1)], dim=1).flatten(0, 1)
