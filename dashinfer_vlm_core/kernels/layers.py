"""Decoder layers and the LM head, composed of a kernel set's basic operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .kv_cache import attend_cached, write_rows
from .types import (
    DecoderLayer,
    DecoderLayers,
    DecoderShape,
    ForwardBatch,
    Kernels,
    KVCacheLayer,
    KVSpans,
    Linear,
    Norm,
)


class ReferenceDecoderLayers:
    """See `DecoderLayers`. The KV cache may have any dtype."""

    converts_cache = True

    def __init__(self, kernels: Kernels, layers: Sequence[DecoderLayer], shape: DecoderShape) -> None:
        self._kernels = kernels
        self._layers = layers
        self._shape = shape

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        *others, final = ((layer, batch.cache_layer(number)) for number, layer in enumerate(self._layers))
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

    def _queries(self, layer: DecoderLayer, x: Tensor, batch: ForwardBatch, cache: KVCacheLayer) -> Tensor:
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
        write_rows(cache, batch.slots, qkv[:, heads:])
        return qkv[:, :heads]

    def _add_attention_and_mlp(
        self, layer: DecoderLayer, x: Tensor, queries: Tensor, spans: KVSpans, cache: KVCacheLayer
    ) -> None:
        """Add the attention output and then the MLP output to x, in place."""
        layer.output.add_to(x, attend_cached(self._kernels, queries, cache, spans))
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


def decoder_layers(
    kernels: Kernels, layers: Sequence[DecoderLayer], shape: DecoderShape, *, converts_cache: bool = False
) -> DecoderLayers:
    """Create decoder layers from `kernels`, or from their basic operations if the layers must convert the KV cache and
    theirs do not; see `DecoderLayers.converts_cache`."""
    fused = kernels.decoder_layers(layers, shape)
    if converts_cache and not getattr(fused, "converts_cache", False):
        return ReferenceDecoderLayers(kernels, layers, shape)
    return fused


class FullLMHead:
    """See `LMHead`. `argmax` is left to the caller, from all logits."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x)

    def argmax(self, x: Tensor) -> None:
        return None
