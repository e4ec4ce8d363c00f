"""The layers of a decoder, and its output layer, out of what a set of kernels can do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .types import DecoderLayer, DecoderShape, Kernels, Linear, Pass, Spans


class ComposedLayers:
    """See `DecoderLayers`."""

    def __init__(self, kernels: Kernels, layers: Sequence[DecoderLayer], shape: DecoderShape) -> None:
        self._kernels = kernels
        self._layers = layers
        self._shape = shape

    def __call__(self, x: Tensor, batch: Pass) -> Tensor:
        *others, final = zip(self._layers, batch.cache, strict=True)
        for layer, cache in others:
            self._mix(layer, x, self._queries(layer, x, batch, cache), batch.spans, cache)
        queries = self._queries(final[0], x, batch, final[1])
        x = x[batch.last]
        if len(x):
            self._mix(final[0], x, queries[batch.last], batch.last_spans, final[1])
        return x

    def _queries(self, layer: DecoderLayer, x: Tensor, batch: Pass, cache: Tensor) -> Tensor:
        """[tokens, heads, width]; keys and values go into the cache."""
        heads = self._shape.heads
        qkv = layer.qkv(self._normalise(x, layer.input_norm)).view(len(x), -1, self._shape.width)
        self._kernels.rotate_(qkv[:, : heads + self._shape.kv_heads], batch.cos, batch.sin)
        cache.index_copy_(1, batch.slots, qkv[:, heads:].transpose(0, 1))
        return qkv[:, :heads]

    def _mix(self, layer: DecoderLayer, x: Tensor, queries: Tensor, spans: Spans, cache: Tensor) -> None:
        """Add attention and then the MLP to x, in place."""
        keys, values = torch.split(cache, self._shape.kv_heads)
        layer.output.add_to(x, self._kernels.attend(queries, keys, values, spans))
        layer.down.add_to(x, layer.gate_up(self._normalise(x, layer.mlp_norm)))

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.norm(x, weight, None, self._shape.eps)


class WholeHead:
    """See `Head`; the largest result is found among all of them."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x)

    def best(self, x: Tensor) -> None:
        return None
