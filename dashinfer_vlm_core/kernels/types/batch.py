"""The input of a decoder's forward pass."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .lora import LoraRows
from .recurrent import RecurrentBatch
from .spans import KVSpans


class ForwardBatch(NamedTuple):
    """The new tokens of many sequences, packed one sequence after the other.

    Attributes:
        cos: float32 [tokens, head_dim / 2], see `Kernels.rotate_`.
        sin: float32 [tokens, head_dim / 2].
        slots: int64 [tokens], the cache row for each token's keys and values; vLLM's `slot_mapping`.
        spans: one per sequence.
        last: int64, increasing: the tokens whose hidden states are returned.
        last_spans: of the tokens of `last`: one for each of them, or one for consecutive ones of a sequence.
        cache: [attention layers, 2 * kv_heads, rows, head_dim]: keys, then values, of all earlier tokens. In the dtype
            of the hidden states, or int8 with scales.
        additions: rows to add to the hidden states of some tokens after the first layers.
        cache_scales: float32 [attention layers, 2 * kv_heads, rows] if `cache` is int8: the scale of each of its rows.
        loras: the tokens with an adapter, in order, after all tokens without one.
        recurrent: the states of gated delta nets; None for models without them.
    """

    cos: Tensor
    sin: Tensor
    slots: Tensor
    spans: KVSpans
    last: Tensor
    last_spans: KVSpans
    cache: Tensor
    additions: Additions | None = None
    cache_scales: Tensor | None = None
    loras: tuple[LoraRows, ...] = ()
    recurrent: RecurrentBatch | None = None

    def cache_layer(self, number: int) -> KVCacheLayer:
        """Return the cache of one of the attention layers."""
        return KVCacheLayer(self.cache[number], None if self.cache_scales is None else self.cache_scales[number])


class KVCacheLayer(NamedTuple):
    """The keys and values of one layer.

    Attributes:
        rows: [2 * kv_heads, rows, head_dim], keys, then values: in the model's dtype, in another one, or int8.
        scales: float32 [2 * kv_heads, rows] if the rows are int8: each row is multiplied by its scale.
    """

    rows: Tensor
    scales: Tensor | None = None


class Additions(NamedTuple):
    """Rows to add to hidden states: `values[i]` after layer i.

    Attributes:
        rows: int64 [count]: the tokens of the batch that they are added to.
        values: [levels, count, hidden], with fewer levels than the decoder has layers.
    """

    rows: Tensor
    values: Tensor
