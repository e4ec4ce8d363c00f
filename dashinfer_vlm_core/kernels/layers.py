"""The layers of a decoder, and its output layer, out of what a set of kernels can do."""

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
            self._mix(layer, x, self._queries(layer, x, batch, cache), batch.spans, cache)
            if batch.additions and number < levels:
                x.index_add_(0, batch.additions.rows, batch.additions.values[number])
        queries = self._queries(final[0], x, batch, final[1])
        x = x[batch.last]
        if len(x):
            self._mix(final[0], x, queries[batch.last], batch.last_spans, final[1])
        return x

    def _queries(self, layer: DecoderLayer, x: Tensor, batch: ForwardBatch, cache: Tensor) -> Tensor:
        """[tokens, heads, width]; keys and values go into the cache."""
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

    def _mix(self, layer: DecoderLayer, x: Tensor, queries: Tensor, spans: KVSpans, cache: Tensor) -> None:
        """Add attention and then the MLP to x, in place."""
        keys, values = torch.split(cache, self._shape.kv_heads)
        layer.output.add_to(x, self._kernels.attend(queries, keys, values, spans))
        layer.down.add_to(x, layer.gate_up(self._normalize(x, layer.mlp_norm)))

    def _normalize(self, x: Tensor, norm: Norm) -> Tensor:
        return self._kernels.norm(x, norm.weight, norm.bias, self._shape.eps)

    def _normalize_heads(self, x: Tensor, norm: Norm) -> Tensor:
        """Of [rows, heads, width], each head by itself."""
        return self._normalize(x.reshape(-1, x.shape[-1]), norm).view(x.shape)


class FullLMHead:
    """See `Head`; the largest result is found among all of them."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x)

    def argmax(self, x: Tensor) -> None:
        return None
