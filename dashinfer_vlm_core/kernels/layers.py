"""Decoder layers and the LM head, composed of a kernel set's basic operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .kv_cache import attend_cached, write_rows
from .types import (
    DecoderLayer,
    DecoderShape,
    ForwardBatch,
    Kernels,
    KVCacheLayer,
    KVSpans,
    Linear,
    LoraRows,
    LowRank,
    Mlp,
    Norm,
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
        for number in range(final):
            queries = self._queries(number, x, batch)
            cache = batch.cache_layer(number)
            self._add_attention_and_mlp(number, x, queries, batch.spans, cache, loras=batch.loras)
            if batch.additions and number < levels:
                x.index_add_(0, batch.additions.rows, batch.additions.values[number])
        queries = self._queries(final, x, batch)
        cache = batch.cache_layer(final)
        x = x[batch.last]
        if len(x):
            loras = tuple(rows.in_last() for rows in batch.loras)
            self._add_attention_and_mlp(final, x, queries[batch.last], batch.last_spans, cache, loras=loras)
        return x

    def _queries(self, number: int, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the queries [tokens, heads, head_dim] and write the keys and values to the cache."""
        attention = self._layers[number].mixer
        heads = self._shape.heads
        normed = self._normalize(x, self._layers[number].input_norm)
        bias = row_bias([(rows, rows.lora.layers[number].qkv) for rows in batch.loras], normed)
        qkv = attention.qkv(normed, bias).view(len(x), -1, self._shape.head_dim)
        if attention.query_norm and attention.key_norm:
            qkv = torch.cat([
                self._normalize_heads(qkv[:, :heads], attention.query_norm),
                self._normalize_heads(qkv[:, heads : heads + self._shape.kv_heads], attention.key_norm),
                qkv[:, heads + self._shape.kv_heads :],
            ], dim=1)  # fmt: skip
        self._kernels.rotate_(qkv[:, : heads + self._shape.kv_heads], batch.cos, batch.sin)
        write_rows(batch.cache_layer(number), batch.slots, qkv[:, heads:])
        return qkv[:, :heads]

    def _add_attention_and_mlp(
        self,
        number: int,
        x: Tensor,
        queries: Tensor,
        spans: KVSpans,
        cache: KVCacheLayer,
        *,
        loras: Sequence[LoraRows],
    ) -> None:
        layer = self._layers[number]
        changes = [(rows, rows.lora.layers[number]) for rows in loras]
        mixed = attend_cached(self._kernels, queries, cache, spans)
        layer.mixer.output.add_to(x, mixed, row_bias([(rows, change.output) for rows, change in changes], mixed))
        normed = self._normalize(x, layer.mlp_norm)
        if not isinstance(layer.mlp, Mlp):
            layer.mlp.add_to(x, normed)
            return
        bias = row_bias([(rows, change.gate_up) for rows, change in changes], normed)
        inner = layer.mlp.gate_up(normed, bias)
        layer.mlp.down.add_to(x, inner, row_bias([(rows, change.down) for rows, change in changes], inner))

    def _normalize(self, x: Tensor, norm: Norm) -> Tensor:
        return self._kernels.norm(x, norm.weight, norm.bias, self._shape.eps)

    def _normalize_heads(self, x: Tensor, norm: Norm) -> Tensor:
        return self._normalize(x.reshape(-1, x.shape[-1]), norm).view(x.shape)


class FullLMHead:
    """See `LMHead`. `argmax` is left to the caller, from all logits."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x)

    def argmax(self, x: Tensor) -> None:
        return None


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
