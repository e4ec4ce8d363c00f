"""Decoder layers and the LM head, composed of a kernel set's basic operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .types import DecoderLayer, DecoderShape, ForwardBatch, Kernels, KVSpans, Linear, Norm


class ReferenceDecoderLayers:
    """See `DecoderLayers`."""

    def __init__(self, kernels: Kernels, layers: Sequence[DecoderLayer], shape: DecoderShape) -> None:
        self._kernels = kernels
        self._layers = layers
        self._shape = shape

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        *others, final = zip(self._layers, batch.cache, strict=True)
        levels = len(batch.additions.values) if batch.additions else 0
        for number, (layer, cache) in enumerate(others):
            self._add_attention_and_mlp(layer, x, self._queries(layer, x, batch, cache), batch.spans, cache)
            if batch.additions and number < levels:
                x.index_add_(0, batch.additions.rows, batch.additions.values[number])
        queries = self._queries(final[0], x, batch, final[1])
        x = x[batch.last]
        if len(x):
            self._add_attention_and_mlp(final[0], x, queries[batch.last], batch.last_spans, final[1])
        return x

    def _queries(self, layer: DecoderLayer, x: Tensor, batch: ForwardBatch, cache: Tensor) -> Tensor:
        """Return the queries [tokens, heads, head_dim] and write the keys and values to the cache."""
        heads = self._shape.heads
        qkv = layer.qkv(self._normalize(x, layer.input_norm)).view(len(x), -1, self._shape.head_dim)
        if layer.query_norm and layer.key_norm:
            qkv = torch.cat([
                self._normalize_heads(qkv[:, :heads], layer.query_norm),
                self._normalize_heads(qkv[:, heads : heads + self._shape.kv_heads], layer.key_norm),
                qkv[:, heads + self._shape.kv_heads :],
            ], dim=1)  # fmt: skip
        self._kernels.rotate_(qkv[:, : heads + self._shape.kv_heads], batch.cos, batch.sin)
        cache.index_copy_(1, batch.slots, qkv[:, heads:].transpose(0, 1))
        return qkv[:, :heads]

    def _add_attention_and_mlp(
        self, layer: DecoderLayer, x: Tensor, queries: Tensor, spans: KVSpans, cache: Tensor
    ) -> None:
        """Add the attention output and then the MLP output to x, in place."""
        keys, values = torch.split(cache, self._shape.kv_heads)
        layer.output.add_to(x, self._kernels.attend(queries, keys, values, spans))
        normed = self._normalize(x, layer.mlp_norm)
        if layer.experts:
            layer.experts.add_to(x, normed)
        else:
            assert layer.gate_up
            assert layer.down
            layer.down.add_to(x, layer.gate_up(normed))

    def _normalize(self, x: Tensor, norm: Norm) -> Tensor:
        return self._kernels.norm(x, norm.weight, norm.bias, self._shape.eps)

    def _normalize_heads(self, x: Tensor, norm: Norm) -> Tensor:
        """Normalize each head of x [rows, heads, head_dim] separately."""
        return self._normalize(x.reshape(-1, x.shape[-1]), norm).view(x.shape)


class FullLMHead:
    """See `LMHead`. `argmax` is left to the caller, from all logits."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x)

    def argmax(self, x: Tensor) -> None:
        return None
