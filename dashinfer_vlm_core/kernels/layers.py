"""Decoder layers and the LM head, composed of a kernel set's basic operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .delta_net import mix_and_keep, sigmoid
from .kv_cache import attend_cached, write_rows
from .types import (
    Attention,
    DecoderLayer,
    DecoderShape,
    DeltaInputs,
    DeltaNet,
    ForwardBatch,
    Kernels,
    KVCacheLayer,
    KVSpans,
    Linear,
    LMHead,
    LoraLayer,
    LoraRows,
    LowRank,
    Mlp,
    Norm,
    SharedExpert,
)


class ReferenceDecoderLayers:
    """See `DecoderLayers`. The KV cache may have any dtype."""

    def __init__(self, kernels: Kernels, layers: Sequence[DecoderLayer], shape: DecoderShape) -> None:
        self._kernels = kernels
        self._layers = layers
        self._shape = shape

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        final = len(self._layers) - 1
        levels = len(batch.additions.values) if batch.additions else 0
        num_attention = 0
        for number, layer in enumerate(self._layers):
            loras = batch.loras
            if isinstance(layer.mixer, Attention):
                cache = batch.cache_layer(num_attention)
                num_attention += 1
                gate, queries = self._gate_and_queries(number, layer.mixer, x, batch, cache)
                if number == final:
                    gate, queries = gate[batch.last], queries[batch.last]
                spans = batch.last_spans if number == final else batch.spans
                mixed = self._attend(gate, queries, cache, spans)
            else:
                mixed = self._mix(number, number - num_attention, layer.mixer, x, batch)
                mixed = mixed[batch.last] if number == final else mixed
            if number == final:
                x = x[batch.last]
                loras = tuple(rows.in_last() for rows in loras)
            if len(x):
                self._add_mixed_and_mlp(layer, x, mixed, [(rows, rows.lora.layers[number]) for rows in loras])
            if batch.additions and number < min(levels, final):
                x.index_add_(0, batch.additions.rows, batch.additions.values[number])
        return x

    def _gate_and_queries(
        self, number: int, attention: Attention, x: Tensor, batch: ForwardBatch, cache: KVCacheLayer
    ) -> tuple[Tensor, Tensor]:
        """Return the gate, if any, and the queries, both [tokens, heads, head_dim], and write keys and values to the
        cache."""
        heads = self._shape.heads
        normed = self._normalize(x, self._layers[number].input_norm)
        bias = row_bias([(rows, rows.lora.layers[number].qkv) for rows in batch.loras], normed)
        projected = attention.qkv(normed, bias).view(len(x), -1, self._shape.head_dim)
        first = heads if self._shape.gate else 0
        gate, qkv = projected[:, :first], projected[:, first:]
        if attention.query_norm and attention.key_norm:
            qkv = torch.cat([
                self._normalize_heads(qkv[:, :heads], attention.query_norm),
                self._normalize_heads(qkv[:, heads : heads + self._shape.kv_heads], attention.key_norm),
                qkv[:, heads + self._shape.kv_heads :],
            ], dim=1)  # fmt: skip
        self._kernels.rotate_(qkv[:, : heads + self._shape.kv_heads], batch.cos, batch.sin)
        write_rows(cache, batch.slots, qkv[:, heads:])
        return gate, qkv[:, :heads]

    def _attend(self, gate: Tensor, queries: Tensor, cache: KVCacheLayer, spans: KVSpans) -> Tensor:
        if not len(queries):
            return queries.flatten(1)
        mixed = attend_cached(self._kernels, queries, cache, spans)
        if self._shape.gate:
            self._kernels.gate_(mixed, gate.flatten(1))
        return mixed

    def _mix(self, number: int, number_of_net: int, net: DeltaNet, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the output of a gated delta net before its output projection, [tokens, value heads * value_dim]."""
        assert batch.recurrent
        normed = self._normalize(x, self._layers[number].input_norm)
        changes = [(rows, rows.lora.layers[number]) for rows in batch.loras]
        qkvz = net.qkvz(normed, row_bias([(rows, change.qkv) for rows, change in changes], normed))
        gates = net.gates(normed, row_bias([(rows, change.gates) for rows, change in changes], normed))
        return mix_and_keep(self._kernels, net, DeltaInputs(qkvz, gates), batch.recurrent, number_of_net)

    def _add_mixed_and_mlp(
        self, layer: DecoderLayer, x: Tensor, mixed: Tensor, changes: Sequence[tuple[LoraRows, LoraLayer]]
    ) -> None:
        layer.mixer.output.add_to(x, mixed, row_bias([(rows, change.output) for rows, change in changes], mixed))
        normed = self._normalize(x, layer.mlp_norm)
        if isinstance(layer.mlp, Mlp):
            inner, bias = _inner_and_bias(layer.mlp, normed, changes)
            layer.mlp.down.add_to(x, inner, bias)
        else:
            layer.mlp.add_to(x, normed)
        if layer.shared_expert:
            x += _shared_expert(layer.shared_expert, normed, changes)

    def _normalize(self, x: Tensor, norm: Norm) -> Tensor:
        return self._kernels.norm(x, norm.weight, norm.bias, self._shape.eps)

    def _normalize_heads(self, x: Tensor, norm: Norm) -> Tensor:
        return self._normalize(x.reshape(-1, x.shape[-1]), norm).view(x.shape)


def _inner_and_bias(mlp: Mlp, x: Tensor, changes: Sequence[tuple[LoraRows, LoraLayer]]) -> tuple[Tensor, Tensor | None]:
    """Return the input of the down projection, and what adapters add to its products."""
    inner = mlp.gate_up(x, row_bias([(rows, change.gate_up) for rows, change in changes], x))
    return inner, row_bias([(rows, change.down) for rows, change in changes], inner)


def _shared_expert(expert: SharedExpert, x: Tensor, changes: Sequence[tuple[LoraRows, LoraLayer]]) -> Tensor:
    inner, bias = _inner_and_bias(expert.mlp, x, changes)
    router = expert.router(x, row_bias([(rows, change.shared_router) for rows, change in changes], x))
    return expert.mlp.down(inner, bias).float() * sigmoid(router)


class FullLMHead:
    """See `LMHead`. `argmax` is left to the caller, from all logits, unless the layer finds it."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self._finds_argmax = linear if isinstance(linear, LMHead) else None

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def argmax(self, x: Tensor) -> Tensor | None:
        return self._finds_argmax.argmax(x) if self._finds_argmax else None


def row_bias(additions: Sequence[tuple[LoraRows, LowRank | None]], x: Tensor) -> Tensor | None:
    """Compute what adapters add to the products of a linear layer.

    A row's values do not depend on the other rows, if those of the adapters' linear layers do not.

    Args:
        additions: the rows of each adapter in order, and what it adds to the layer.
        x: the input of the layer, [rows, inputs].

    Returns:
        float32 [count, outputs], the values to add to the last `count` rows; None if no adapter changes the layer.
    """
    changed = [(rows, low_rank) for rows, low_rank in additions if low_rank and rows.start < rows.stop]
    if not changed:
        return None
    first = changed[0][0].start
    bias = torch.zeros(len(x) - first, changed[0][1].outputs, dtype=torch.float32, device=x.device)
    for rows, low_rank in changed:
        ranks = low_rank.down(x[rows.start : rows.stop])
        for part in low_rank.parts:
            columns = slice(part.first_output, part.first_output + part.outputs)
            inputs = ranks[:, part.first_input : part.first_input + part.inputs]
            bias[rows.start - first : rows.stop - first, columns] = part.up(inputs)
    return bias
