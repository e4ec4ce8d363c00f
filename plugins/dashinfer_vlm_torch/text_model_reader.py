"""Read the layers of the text model from a checkpoint, in the order of rows and columns that the kernels require."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.kernels import mmap_buffer
from dashinfer_vlm_core.kernels.experts import GroupedExperts, MixtureOfExperts
from dashinfer_vlm_core.kernels.linears import create_head, create_linear
from dashinfer_vlm_core.kernels.quantization import Quantization, QuantizedWeight
from dashinfer_vlm_core.kernels.types import (
    Activation,
    Attention,
    DecoderLayer,
    DecoderShape,
    DeltaNet,
    Experts,
    Kernels,
    Linear,
    LMHead,
    Mlp,
    Norm,
    SharedExpert,
)
from dashinfer_vlm_core.models.pooling import Projection, TokenContrast
from dashinfer_vlm_core.models.weight_cache import ConvertedWeights, layer_name
from dashinfer_vlm_core.models.weights import Weights
from dashinfer_vlm_core.text_spec import AttentionSpec, DeltaNetSpec, ExpertsSpec, TextModelSpec

from .head_order import column_order, row_orders
from .key_balance import balance_norms, balance_projection
from .mtp_head import MtpHead


class PoolingHead(NamedTuple):
    """What is computed from hidden states after the final norm.

    Attributes:
        weight: float32 [outputs, hidden_size].
        bias: float32 [outputs].
    """

    weight: Tensor
    bias: Tensor | None = None


class TextModelReader(NamedTuple):
    """Reads the parts of a model from a checkpoint.

    Attributes:
        quantization: how matrices are quantized; None keeps the dtype.
        keeps_outputs: whether the matrices whose products are added to hidden states keep the dtype.
        converted: the layers that an earlier start converted.
        balances_keys: whether the channels of keys are balanced, for an int8 KV cache.
        qkv_scales: the factors of balanced projections by layer, which it sets.
    """

    weights: Weights
    spec: TextModelSpec
    kernels: Kernels
    device: str
    dtype: torch.dtype
    converted: ConvertedWeights
    balances_keys: bool
    qkv_scales: dict[int, Tensor]
    quantization: Quantization | None = None
    keeps_outputs: bool = False

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.weights.tensor(name, shape, device=self.device, dtype=self.dtype)

    def _floats(self, name: str, *shape: int) -> Tensor:
        return self.weights.tensor(name, shape, device=self.device, dtype=torch.float32)

    def norm(self, name: str, width: int) -> Norm:
        weight = (self._floats(f"{name}.weight", width) + self.spec.norm_offset).to(self.dtype)
        return Norm(weight, None if self.spec.norm == "rms_norm" else torch.zeros_like(weight))

    def embedding(self) -> Tensor:
        name = self.spec.weights.embedding
        shape = (self.spec.vocab_size, self.spec.hidden_size)
        stored = layer_name([name], shape, Activation.NONE, None, f"table {self.dtype}")
        return self.converted.table(stored, lambda: self.tensor(f"{name}.weight", *shape))

    def head(self, embedding: Tensor) -> LMHead:
        names = self.spec.weights
        tied = self.spec.tie_word_embeddings
        shape = (self.spec.vocab_size, self.spec.hidden_size)
        stored = layer_name(
            [names.embedding if tied else names.head], shape, Activation.NONE, self.quantization, "head"
        )
        return self.converted.head(stored, lambda: self._create_head(embedding))

    def _create_head(self, embedding: Tensor) -> LMHead:
        weight: Tensor | QuantizedWeight = embedding
        if not self.spec.tie_word_embeddings:
            weight = self._matrix([self.spec.weights.head], [self.spec.vocab_size], self.spec.hidden_size)
        return create_head(self.kernels, weight, dtype=self.dtype, quantization=self.quantization)

    def pooling_head(self, head: TokenContrast | Projection | str, embedding: Tensor) -> PoolingHead:
        """Read what computes scores, or projects hidden states."""
        hidden = self.spec.hidden_size
        if isinstance(head, str):
            return PoolingHead(self._floats(f"{head}.weight", 1, hidden))
        if isinstance(head, TokenContrast):
            return PoolingHead(self._contrast(head, embedding))
        has_bias = f"{head.name}.bias" in self.weights.names
        bias = self._floats(f"{head.name}.bias", head.size) if has_bias else None
        return PoolingHead(self._floats(f"{head.name}.weight", head.size, hidden), bias)

    def _contrast(self, head: TokenContrast, embedding: Tensor) -> Tensor:
        weight: Tensor | QuantizedWeight = embedding
        if not self.spec.tie_word_embeddings:
            weight = self._matrix([self.spec.weights.head], [self.spec.vocab_size], self.spec.hidden_size)
        index = torch.tensor(head, device=self.device)
        rows = (
            weight.take_rows(index).dequantize(torch.float32) if isinstance(weight, QuantizedWeight) else weight[index]
        )
        return rows[:1].float() - rows[1:].float()

    def linear(self, name: str, outputs: int, inputs: int) -> Linear:
        return self._linear([name], [outputs], inputs)

    def layer(self, number: int, *, attention_inputs: int | None = None) -> DecoderLayer:
        """Read a layer; its attention reads `attention_inputs` values of each token, by default the hidden size."""
        names = self.spec.weights
        prefix = names.layer.format(number)
        hidden = self.spec.hidden_size
        mixer, mlp = self.spec.layers[number].mixer, self.spec.layers[number].mlp
        experts = mlp if isinstance(mlp, ExpertsSpec) else None
        return DecoderLayer(
            input_norm=self.norm(f"{prefix}.{names.input_norm}", hidden),
            mixer=self._delta_net(mixer, prefix)
            if isinstance(mixer, DeltaNetSpec)
            else self._attention(number, mixer, attention_inputs or hidden),
            mlp_norm=self.norm(f"{prefix}.{names.mlp_norm}", hidden),
            mlp=self._experts(experts, prefix) if experts else self._mlp(prefix, names.mlp, mlp.intermediate_size),
            shared_expert=self._shared_expert(experts, prefix) if experts else None,
        )

    def mtp_head(self, lm_head: LMHead) -> MtpHead:
        """Read the head for multi-token prediction, which shares the output layer `lm_head`."""
        names, hidden = self.spec.weights, self.spec.hidden_size
        assert self.spec.mtp_layer
        layer_names = replace(names, layer=f"{names.mtp}.{names.mtp_layer}")
        spec = replace(self.spec, layers=(self.spec.mtp_layer,), visual_levels=0, weights=layer_names)
        embedding_norm, hidden_norm, norm = (
            self.norm(f"{names.mtp}.{name}", hidden)
            for name in (names.mtp_embedding_norm, names.mtp_hidden_norm, names.mtp_norm)
        )
        layer = self._replace(spec=spec, qkv_scales={}).layer(0)
        return MtpHead(
            kernels=self.kernels,
            eps=spec.norm_eps,
            embedding_norm=embedding_norm,
            hidden_norm=hidden_norm,
            fc=self._linear([f"{names.mtp}.{names.mtp_fc}"], [hidden], 2 * hidden),
            layers=self.kernels.decoder_layers([layer], decoder_shape(spec)),
            norm=norm,
            lm_head=lm_head,
        )

    def _attention(self, number: int, spec: AttentionSpec, inputs: int) -> Attention:
        names = self.spec.weights
        prefix = names.layer.format(number)
        query_norm, key_norm = self._head_norms(prefix, spec)
        return Attention(
            qkv=self._qkv(number, spec, inputs),
            output=self._output(f"{prefix}.{names.output}", spec.width),
            query_norm=query_norm,
            key_norm=key_norm,
        )

    def _delta_net(self, spec: DeltaNetSpec, prefix: str) -> DeltaNet:
        names = self.spec.weights
        hidden = self.spec.hidden_size
        heads = spec.num_value_heads
        inputs = [f"{prefix}.{name}" for name in (names.delta_qkv, names.delta_z)]
        gates = [f"{prefix}.{name}" for name in (names.delta_beta, names.delta_step)]
        conv = self._floats(f"{prefix}.{names.delta_conv}.weight", spec.conv_channels, 1, spec.conv_width)
        return DeltaNet(
            spec=spec,
            qkvz=self._linear(inputs, [spec.conv_channels, spec.value_width], hidden),
            # Not quantized: they are few, and determine how long a state lasts.
            gates=self._linear(gates, [heads] * 2, hidden, quantized=False, fp32_output=True),
            output=self._output(f"{prefix}.{names.delta_output}", spec.value_width),
            conv=conv[:, 0].T.contiguous(),
            rate=-self._floats(f"{prefix}.{names.delta_rate}", heads).exp(),
            step_bias=self._floats(f"{prefix}.{names.delta_step_bias}", heads),
            norm=self._floats(f"{prefix}.{names.delta_norm}.weight", spec.value_dim),
            eps=self.spec.norm_eps,
        )

    def _matrix(
        self, modules: Sequence[str], rows: Sequence[int], inputs: int, *, changed: bool = False
    ) -> Tensor | QuantizedWeight:
        """Read the weights of a layer, with `changed` to change them first."""
        mapped = self.kernels.copies_weights and not changed
        return self.weights.matrix(modules, rows, inputs, device=self.device, dtype=self.dtype, mapped=mapped)

    def _linear(
        self,
        modules: Sequence[str],
        rows: Sequence[int],
        inputs: int,
        activation: Activation = Activation.NONE,
        *,
        quantized: bool = True,
        fp32_output: bool = False,
    ) -> Linear:
        """Read a linear layer without bias, whose outputs are those of `modules`."""
        quantization = self.quantization if quantized else None
        name = layer_name(modules, (sum(rows), inputs), activation, quantization, "")
        create = functools.partial(
            create_linear,
            self.kernels,
            dtype=self.dtype,
            activation=activation,
            fp32_output=fp32_output,
            quantization=quantization,
        )
        return self.converted.linear(
            name,
            lambda: create(weight=self._matrix(modules, rows, inputs)),
            activation=activation,
            fp32_output=fp32_output,
        )

    def _output(self, module: str, inputs: int) -> Linear:
        """Read a linear layer whose results are added to hidden states."""
        return self._linear([module], [self.spec.hidden_size], inputs, quantized=not self.keeps_outputs)

    def _created_linear(
        self,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None = None,
        activation: Activation = Activation.NONE,
        *,
        quantized: bool = True,
    ) -> Linear:
        quantization = self.quantization if quantized else None
        return create_linear(
            self.kernels, weight, bias, dtype=self.dtype, activation=activation, quantization=quantization
        )

    def _mlp(self, prefix: str, names: Sequence[str], inner: int) -> Mlp:
        *gate_up, down = (f"{prefix}.{name}" for name in names)
        hidden = self.spec.hidden_size
        return Mlp(
            self._linear(gate_up, [inner, inner], hidden, Activation.SILU_GATE),
            self._output(down, inner),
        )

    def _shared_expert(self, experts: ExpertsSpec, prefix: str) -> SharedExpert | None:
        if not experts.shared_intermediate_size:
            return None
        names = self.spec.weights
        router = self.tensor(f"{prefix}.{names.shared_router}.weight", 1, self.spec.hidden_size)
        mlp = self._mlp(prefix, names.shared_expert, experts.shared_intermediate_size)
        return SharedExpert(mlp, self.kernels.linear(router, fp32_output=True))

    def _experts(self, experts: ExpertsSpec, prefix: str) -> Experts:
        # The router is not quantized: a wrong expert costs more than a rounded weight.
        names = self.spec.weights
        hidden = self.spec.hidden_size
        inner = experts.intermediate_size
        count = experts.num_experts
        router = self.kernels.linear(self.tensor(f"{prefix}.{names.router}.weight", count, hidden), fp32_output=True)
        if f"{prefix}.{names.experts_gate_up}.weight" not in self.weights.names:
            modules = (names.expert_gate, names.expert_up, names.expert_down)
            separate = [self._mlp(prefix, [name.format(number) for name in modules], inner) for number in range(count)]
            return MixtureOfExperts(router, separate, experts.experts_per_token)
        gate_up, down = self._fused_experts({
            f"{prefix}.{names.experts_gate_up}": (count, 2 * inner, hidden),
            f"{prefix}.{names.experts_down}": (count, hidden, inner),
        })  # fmt: skip
        if self.quantization is None and self.kernels.groups_experts(self.dtype, (hidden, inner)):
            return GroupedExperts(router, gate_up, down, experts.experts_per_token)
        fused = [
            Mlp(
                self._created_linear(first, activation=Activation.SILU_GATE),
                self._created_linear(second, quantized=not self.keeps_outputs),
            )
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

    def _qkv(self, number: int, spec: AttentionSpec, inputs: int) -> Linear:
        names = self.spec.weights
        prefix = names.layer.format(number)
        rows = spec.outputs
        modules = [f"{prefix}.{name}" for name in (names.query, names.key, names.value)]
        bias = self._biases(modules, rows) if spec.bias else None
        starts = (0, rows[0], rows[0] + rows[1])
        order = torch.cat([start + part for start, part in zip(starts, row_orders(spec), strict=True)])
        is_sorted = torch.equal(order, order.sort().values)
        order = order.to(self.device)
        bias = bias if bias is None or is_sorted else bias[order]
        if self.balances_keys and not spec.head_norms:  # which also changes the bias
            weight = self._qkv_matrix(modules, rows, inputs, None if is_sorted else order)
            gain = self.norm(f"{prefix}.{names.input_norm}", self.spec.hidden_size).weight
            self.qkv_scales[number] = balance_projection(
                weight, bias, gain, heads=spec.num_heads, kv_heads=spec.num_kv_heads
            )
            return self._created_linear(weight, bias)
        digest = "" if is_sorted else hashlib.sha256(order.cpu().numpy().tobytes()).hexdigest()
        name = layer_name(modules, (sum(rows), inputs), Activation.NONE, self.quantization, digest)
        ordered = None if is_sorted else order
        return self.converted.linear(
            name, lambda: self._created_linear(self._qkv_matrix(modules, rows, inputs, ordered), bias), bias
        )

    def _qkv_matrix(
        self, modules: Sequence[str], rows: Sequence[int], inputs: int, order: Tensor | None
    ) -> Tensor | QuantizedWeight:
        weight = self._matrix(modules, rows, inputs, changed=self.balances_keys)
        if order is None:
            return weight
        return weight.take_rows(order) if isinstance(weight, QuantizedWeight) else weight[order]

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


def open_converted(weights: Weights, config: EngineConfig, kernels: Kernels, part: str) -> ConvertedWeights:
    """Open the layers of a checkpoint that an earlier start converted; see `ConvertedWeights.open`."""
    return ConvertedWeights.open(weights, config, kernels, part, code=Path(__file__).parent)


def decoder_shape(spec: TextModelSpec) -> DecoderShape:
    """Return the shape that the layers of a text model share."""
    attention = spec.attention
    return DecoderShape(
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        eps=spec.norm_eps,
        gate=attention.gate,
    )
