"""What every set of kernels can do."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Activation(IntEnum):
    """What a linear layer ends with."""

    NONE = 0
    QUICK_GELU = 1
    """x * sigmoid(1.702 x) (arXiv:1606.08415, 2)."""
    SILU_GATE = 2
    """The weights are a gate's rows and then as many of an up projection: silu(gate) * up (arXiv:2002.05202)."""
    GELU = 3


class Linear(Protocol):
    """A linear layer, its weights laid out as the kernels want them."""

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, outputs] of x [rows, inputs]; the last dimension of x is contiguous."""

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """Add the result for x [rows, inputs] to `total` [rows, outputs], in place."""


class LMHead(Protocol):
    """An output layer: a linear layer with float32 results, of which often only the largest is asked for."""

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [rows, outputs] of x [rows, inputs]; the last dimension of x is contiguous."""

    def argmax(self, x: Tensor) -> Tensor | None:
        """int64 [rows]: which result of each row is the largest, the first of equals; None if only computing them all
        would tell, or would be quicker."""


class KVSpan(NamedTuple):
    """Queries that stand side by side in a batch, and the keys that they look at.

    Attributes:
        first: row of the first query.
        tokens: number of queries.
        row: of the first key.
        keys: number of keys.
        start: query i looks at keys 0 to start + i; -1: at all of them.
    """

    first_query: int
    num_queries: int
    first_key: int
    num_keys: int
    start: int = -1


class KVSpans:
    """The spans of one batch; what kernels derive from them is derived once, not once per layer."""

    def __init__(self, spans: Sequence[KVSpan], *, device: torch.device | str = "cpu") -> None:
        self.spans: tuple[KVSpan, ...] = tuple(spans)
        self._device = device

    @cached_property
    def masks(self) -> list[Tensor | None]:
        """For each span bool [tokens, keys], true where a query may look; None where one token or all may see all, and
        where the span is a beginning, which is causal."""
        return [_mask(span, self._device) for span in self.spans]

    @cached_property
    def table(self) -> Tensor:
        """int64 [spans, 5] on the CPU, in the order of `Span`'s attributes."""
        return torch.tensor(self.spans, dtype=torch.int64)


def _mask(span: KVSpan, device: torch.device | str) -> Tensor | None:
    if span.start <= 0 or span.num_queries == 1:
        return None
    return torch.ones(span.num_queries, span.num_keys, dtype=torch.bool, device=device).tril(span.start)


class Norm(NamedTuple):
    """A LayerNorm; without a bias, an RMSNorm."""

    weight: Tensor
    bias: Tensor | None = None


class DecoderLayer(NamedTuple):
    """One layer of a decoder.

    Attributes:
        input_norm: before attention.
        qkv: query, key and value heads, one under the other.
        output: of attention.
        mlp_norm: before the MLP.
        gate_up: silu(gate) * up.
        down: back to the hidden size.
        query_norm: of each query head, before it is rotated.
        key_norm: of each key head, likewise.
    """

    input_norm: Norm
    qkv: Linear
    output: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    query_norm: Norm | None = None
    key_norm: Norm | None = None


class DecoderShape(NamedTuple):
    """What all layers of a decoder have in common.

    Attributes:
        heads: of queries.
        kv_heads: of keys, and of values.
        width: of a head.
        eps: of the norms.
        levels: of `Pass.additions`, at most.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    levels: int = 0


class ForwardBatch(NamedTuple):
    """New tokens of many requests, one request after the other.

    Attributes:
        cos: float32 [tokens, width / 2], see `Kernels.rotate_`.
        sin: likewise.
        slots: int64 [tokens], the rows of the cache that take each token's keys and values.
        spans: one per request.
        last: int64, increasing: the tokens whose hidden states are asked for.
        last_spans: one per token of `last`.
        cache: [layers, 2 * kv_heads, rows, width]: keys, and then values, of all tokens before.
        additions: what is added to the hidden states of some tokens after the first layers.
    """

    cos: Tensor
    sin: Tensor
    slots: Tensor
    spans: KVSpans
    last: Tensor
    last_spans: KVSpans
    cache: Tensor
    additions: Additions | None = None


class Additions(NamedTuple):
    """Rows that are added to hidden states: `values[i]` after layer i.

    Attributes:
        rows: int64 [count]: the tokens of the pass that get them.
        values: [levels, count, hidden], fewer levels than there are layers.
    """

    rows: Tensor
    values: Tensor


class DecoderLayers(Protocol):
    """All layers of a decoder, one after the other."""

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states after the last layer; keys and values of the new tokens are written to the cache.

        Args:
            x: [tokens, hidden], contiguous; overwritten.
            batch: what else there is to know of them.

        Returns:
            [len(batch.last), hidden]: the last layer computes no others.
        """


class Kernels(Protocol):
    """Stateless; used by any thread.

    Attributes:
        name: for people.
        supports_int8: whether `linear` knows int8.
    """

    name: str
    supports_int8: bool

    def linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        activation: Activation = Activation.NONE,
        fp32_output: bool = False,
        int8: bool = False,
    ) -> Linear:
        """A layer of weights [outputs, inputs], which may be copied to another layout.

        Args:
            weight: on the device and in the dtype of the model.
            bias: [outputs].
            activation: applied to the result.
            wide: float32 results.
            int8: round the weights to 8 bits, with one scale per output, and activations to 8 bits on the way.
        """

    def head(self, weight: Tensor, *, int8: bool = False) -> LMHead:
        """An output layer of weights [outputs, inputs]; see `linear`."""

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """LayerNorm of [rows, columns]; without a bias, RMSNorm."""

    def rotate_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Turn pairs (i, i + width / 2) of [rows, heads, width] in place, by float32 [rows, width / 2]."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spans: KVSpans) -> Tensor:
        """Softmax attention, scaled by 1 / sqrt(width); heads that share keys stand side by side.

        Args:
            q: [rows, heads, width].
            k: [kv heads, key rows, width]; `v` likewise, with equal strides.
            spans: cover all rows of q, in order.

        Returns:
            [rows, heads * width].
        """

    def decoder_layers(self, layers: Sequence[DecoderLayer], shape: DecoderShape) -> DecoderLayers:
        """Layers whose linear layers these kernels made."""
