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
from dashinfer_vlm_core.kernels.experts import GroupedExperts, MixtureOfExperts
from dashinfer_vlm_core.kernels.linears import create_head, create_linear
from dashinfer_vlm_core.kernels.quantization import INT8, Quantization, QuantizedWeight, has_8_bits
from dashinfer_vlm_core.kernels.streams import HIGH_PRIORITY, stream_executor
from dashinfer_vlm_core.kernels.types import (
    Activation,
    Attention,
    DecoderLayer,
    DecoderShape,
    Experts,
    ForwardBatch,
    Kernels,
    Linear,
    LMHead,
    Mlp,
    Norm,
)
from dashinfer_vlm_core.models.lora import LoraWeights
from dashinfer_vlm_core.models.weights import Weights
from dashinfer_vlm_core.progress import Progress
from dashinfer_vlm_core.text_spec import AttentionSpec, ExpertsSpec, MlpSpec, RotarySpec, TextModelSpec

from .head_order import column_order, row_orders
from .key_balance import balance_norms, balance_projection
from .lora import HeadChange, LoraReader, TextLora


def layer_quantization(quantization: Quantization | None, number: int, count: int) -> Quantization | None:
    """Return how the matrices of layer `number` of `count` layers are quantized if those of most layers are quantized
    by `quantization`."""
    return INT8 if quantization and has_8_bits(number, count) else quantization


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
        quantization: Quantization | None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """Load the model.

        Args:
            weights: the checkpoint's tensors.
            config: the architecture.
            kernels: the kernels that run the model.
            device: torch's name of the device.
            dtype: the dtype of weights and hidden states.
            quantization: how the matrices of most layers are quantized, which `kernels` must support; some keep 8 bits,
                see `has_8_bits`. None keeps the dtype.
            cache_dtype: the dtype of the KV cache; that of the hidden states by default.
        """
        self.config = config
        self.device = device
        self.dtype = dtype
        self.kernels = kernels
        self.executor: Executor = stream_executor(device, priority=HIGH_PRIORITY)
        run = self.executor.run
        self._qkv_scales: dict[int, Tensor] = {}
        read = _Reader(weights, config, kernels, device, dtype, cache_dtype == torch.int8, self._qkv_scales)
        names = config.weights
        count = len(config.layers)
        readers = [
            read._replace(quantization=layer_quantization(quantization, number, count)) for number in range(count)
        ]
        # One task per part, so that other tasks can run in between.
        self._embedding = run(lambda: read.tensor(f"{names.embedding}.weight", config.vocab_size, config.hidden_size))
        with Progress(readers, desc="Loading layers of the text model", unit="") as progress:
            layers = [run(functools.partial(reader.layer, number)) for number, reader in enumerate(progress)]
        self._layers = kernels.decoder_layers(layers, _decoder_shape(config))
        self.loops_over_experts: bool = any(isinstance(layer.mlp, MixtureOfExperts) for layer in layers)
        self._norm = read.norm(names.norm, config.hidden_size)
        head = read._replace(quantization=INT8 if quantization else None)
        self._head = run(lambda: head.head(self._embedding))
        self.rotary: Rotary = Rotary(config.attention.rotary, config.attention.head_dim, device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Look up int64 [tokens]; returns a new, writable tensor [tokens, hidden_size]."""
        return F.embedding(token_ids, self._embedding)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute hidden states after the last layer, without the final norm, which `logits` applies; see
        `DecoderLayers`."""
        return self._layers(x, batch)

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
        reader = LoraReader(lora, self.config, self.kernels, self.device, self.dtype, self._qkv_scales)
        return reader.read(self.executor)

    def _normalize(self, x: Tensor) -> Tensor:
        return self.kernels.norm(x, self._norm.weight, self._norm.bias, self.config.norm_eps)


class Rotary:
    """M-RoPE (arXiv 2409.12191, section 2.1): each frequency is rotated by the time, height or width
    position."""

    def __init__(self, rotary: RotarySpec, head_dim: int, device: str) -> None:
        exponents = torch.arange(0, rotary.columns, 2, dtype=torch.float32) / rotary.columns
        others = (0, (head_dim - rotary.columns) // 2)
        self._frequencies = F.pad(1.0 / rotary.theta**exponents, others).to(device)
        self._axes = F.pad(torch.tensor(rotary.axes), others).to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the cosines and sines, float32 [tokens, head_dim / 2], of int64 positions [3, tokens]."""
        angles = positions[self._axes].T.contiguous() * self._frequencies
        return angles.cos(), angles.sin()


def _decoder_shape(spec: TextModelSpec) -> DecoderShape:
    attention = spec.attention
    return DecoderShape(
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        eps=spec.norm_eps,
        levels=spec.visual_levels,
    )


class _Reader(NamedTuple):
    """Reads the parts of a model from a checkpoint.

    Attributes:
        quantization: how matrices are quantized; None keeps the dtype.
        balances_keys: whether the channels of keys are balanced, for an int8 KV cache.
        qkv_scales: the factors of balanced projections by layer, which it sets.
    """

    weights: Weights
    spec: TextModelSpec
    kernels: Kernels
    device: str
    dtype: torch.dtype
    balances_keys: bool
    qkv_scales: dict[int, Tensor]
    quantization: Quantization | None = None

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.weights.tensor(name, shape, device=self.device, dtype=self.dtype)

    def norm(self, name: str, width: int) -> Norm:
        stored = self.weights.tensor(f"{name}.weight", (width,), device=self.device, dtype=torch.float32)
        weight = (stored + self.spec.norm_offset).to(self.dtype)
        return Norm(weight, None if self.spec.norm == "rms_norm" else torch.zeros_like(weight))

    def head(self, embedding: Tensor) -> LMHead:
        weight: Tensor | QuantizedWeight = embedding
        if not self.spec.tie_word_embeddings:
            weight = self._matrix([self.spec.weights.head], [self.spec.vocab_size], self.spec.hidden_size)
        return create_head(self.kernels, weight, dtype=self.dtype, quantization=self.quantization)

    def layer(self, number: int) -> DecoderLayer:
        names = self.spec.weights
        prefix = names.layer.format(number)
        hidden = self.spec.hidden_size
        mixer, mlp = self.spec.layers[number].mixer, self.spec.layers[number].mlp
        assert isinstance(mixer, AttentionSpec)
        modules = [f"{prefix}.{name}" for name in (names.gate, names.up, names.down)]
        return DecoderLayer(
            input_norm=self.norm(f"{prefix}.{names.input_norm}", hidden),
            mixer=self._attention(number, mixer),
            mlp_norm=self.norm(f"{prefix}.{names.mlp_norm}", hidden),
            mlp=self._mlp(modules, mlp) if isinstance(mlp, MlpSpec) else self._experts(mlp, prefix),
        )

    def _attention(self, number: int, spec: AttentionSpec) -> Attention:
        names = self.spec.weights
        prefix = names.layer.format(number)
        query_norm, key_norm = self._head_norms(prefix, spec)
        return Attention(
            qkv=self._qkv(number, spec),
            output=self._linear(self._matrix([f"{prefix}.{names.output}"], [self.spec.hidden_size], spec.width)),
            query_norm=query_norm,
            key_norm=key_norm,
        )

    def _matrix(
        self, modules: Sequence[str], rows: Sequence[int], inputs: int, *, changed: bool = False
    ) -> Tensor | QuantizedWeight:
        """Read the weights of a layer, with `changed` to change them first."""
        mapped = self.kernels.copies_weights and not changed
        return self.weights.matrix(modules, rows, inputs, device=self.device, dtype=self.dtype, mapped=mapped)

    def _linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None = None, activation: Activation = Activation.NONE
    ) -> Linear:
        quantization = self.quantization
        return create_linear(
            self.kernels, weight, bias, dtype=self.dtype, activation=activation, quantization=quantization
        )

    def _mlp(self, modules: Sequence[str], spec: MlpSpec | ExpertsSpec) -> Mlp:
        *gate_up, down = modules
        inner = spec.intermediate_size
        hidden = self.spec.hidden_size
        return Mlp(
            self._linear(self._matrix(gate_up, [inner, inner], hidden), activation=Activation.SILU_GATE),
            self._linear(self._matrix([down], [hidden], inner)),
        )

    def _experts(self, experts: ExpertsSpec, prefix: str) -> Experts:
        # The router is not quantized: a wrong expert costs more than a rounded weight.
        names = self.spec.weights
        hidden = self.spec.hidden_size
        inner = experts.intermediate_size
        count = experts.num_experts
        router = self.kernels.linear(self.tensor(f"{prefix}.{names.router}.weight", count, hidden), fp32_output=True)
        if f"{prefix}.{names.experts_gate_up}.weight" not in self.weights.names:
            modules = [f"{prefix}.{name}" for name in (names.expert_gate, names.expert_up, names.expert_down)]
            separate = [self._mlp([module.format(number) for module in modules], experts) for number in range(count)]
            return MixtureOfExperts(router, separate, experts.experts_per_token)
        gate_up, down = self._fused_experts({
            f"{prefix}.{names.experts_gate_up}": (count, 2 * inner, hidden),
            f"{prefix}.{names.experts_down}": (count, hidden, inner),
        })  # fmt: skip
        if self.quantization is None and self.kernels.groups_experts(self.dtype, (hidden, inner)):
            return GroupedExperts(router, gate_up, down, experts.experts_per_token)
        fused = [
            Mlp(self._linear(first, activation=Activation.SILU_GATE), self._linear(second))
            for first, second in zip(gate_up, down, strict=True)
        ]
        return MixtureOfExperts(router, fused, experts.experts_per_token)

    def _fused_experts(self, shapes: Mapping[str, tuple[int, int, int]]) -> list[Tensor]:
        """Read the named weights of all experts, [experts, outputs, inputs]; published checkpoints store each of them
        transposed."""
        transposed = any(self.weights.shape(f"{name}.weight") != shape for name, shape in shapes.items())
        tensors = [mmap_buffer.empty(shape, self.dtype, self.device) for shape in shapes.values()]
        for name, tensor in zip(shapes, tensors, strict=True):
            self.weights.read_experts(name, tensor, transposed=transposed)
        return tensors

    def _qkv(self, number: int, spec: AttentionSpec) -> Linear:
        names = self.spec.weights
        prefix = names.layer.format(number)
        rows = spec.outputs
        modules = [f"{prefix}.{name}" for name in (names.query, names.key, names.value)]
        weight = self._matrix(modules, rows, self.spec.hidden_size, changed=self.balances_keys)
        bias = self._biases(modules, rows) if spec.bias else None
        starts = (0, rows[0], rows[0] + rows[1])
        order = torch.cat([start + part for start, part in zip(starts, row_orders(spec), strict=True)]).to(self.device)
        if not torch.equal(order, order.sort().values):
            weight = weight.take_rows(order) if isinstance(weight, QuantizedWeight) else weight[order]
            bias = None if bias is None else bias[order]
        if self.balances_keys and not spec.head_norms:
            gain = self.norm(f"{prefix}.{names.input_norm}", self.spec.hidden_size).weight
            self.qkv_scales[number] = balance_projection(
                weight, bias, gain, heads=spec.num_heads, kv_heads=spec.num_kv_heads
            )
        return self._linear(weight, bias)

    def _biases(self, modules: Sequence[str], rows: Sequence[int]) -> Tensor:
        fused = mmap_buffer.empty([sum(rows)], self.dtype, self.device)
        for module, part in zip(modules, torch.split(fused, list(rows)), strict=True):
            self.weights.read(f"{module}.bias", part)
        return fused

    def _head_norms(self, prefix: str, spec: AttentionSpec) -> tuple[Norm | None, Norm | None]:
        if not spec.head_norms:
            return None, None
        names = (self.spec.weights.query_norm, self.spec.weights.key_norm)
        stored = (self.norm(f"{prefix}.{name}", spec.head_dim) for name in names)
        order = column_order(spec).to(self.device)
        query, key = (norm._replace(weight=norm.weight[order]) for norm in stored)  # the bias has zeros only
        return balance_norms(query, key) if self.balances_keys else (query, key)
