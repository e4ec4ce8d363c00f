"""The interface of a kernel set: one file, because its parts refer to each other."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..text_spec import DeltaNetSpec
from .quantization import Quantization, QuantizedWeight
from .streams import to_device


class Activation(IntEnum):
    """The activation that a linear layer applies to its output."""

    NONE = 0
    QUICK_GELU = 1
    """x * sigmoid(1.702 x) (arXiv:1606.08415, section 2)."""
    SILU_GATE = 2
    """silu(gate) * up (arXiv:2002.05202); weights and bias are the gate's rows, followed by as many of `up`."""
    GELU = 3
    GELU_TANH = 4
    """The approximation of GELU with tanh (arXiv:1606.08415, section 2)."""


class Linear(Protocol):
    """A linear layer with its weights in the kernels' layout."""

    def __call__(self, x: Tensor, row_bias: Tensor | None = None) -> Tensor:
        """Return [rows, outputs] for x [rows, inputs]; the last dimension of x is contiguous.

        `row_bias` is float32 [count, outputs of the weights], contiguous. It is added to the products of the last
        `count` rows before the activation.
        """

    def add_to(self, total: Tensor, x: Tensor, row_bias: Tensor | None = None) -> None:
        """Add the result for x [rows, inputs] to `total` [rows, outputs], in place; `row_bias` as above."""


class LMHead(Protocol):
    """The output layer: a linear layer with float32 logits, of which often only the argmax is needed."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return float32 [rows, outputs] for x [rows, inputs]; the last dimension of x is contiguous."""

    def argmax(self, x: Tensor) -> Tensor | None:
        """Return the index of each row's largest logit, int64 [rows]; the first one of equal logits.

        Returns None if it cannot be determined without computing all logits, or if computing them all is faster.
        """


class KVSpan(NamedTuple):
    """Consecutive queries of a batch and the keys that they attend to.

    Attributes:
        first_query: row of the first query.
        num_queries: number of queries.
        first_key: row of the first key.
        num_keys: number of keys.
        start: query i attends to keys 0 to start + i; -1 if every query attends to all keys.
    """

    first_query: int
    num_queries: int
    first_key: int
    num_keys: int
    start: int = -1


class KeyRanges(NamedTuple):
    """The spans of a batch as tensors on its device, for kernels that compute all of them at once.

    Attributes:
        query_starts: int32 [spans + 1], the row of each span's first query, and the number of queries.
        first_keys: int32 [spans + 1], the row of each span's first key, and a number without meaning.
        num_keys: int32 [spans], the number of keys of each span.
        max_queries: at least the number of queries of each span.
        max_keys: at least the number of keys of each span.
        is_causal: whether each query attends to the keys up to its own, the last query to all keys of its span;
            otherwise, every query attends to all of them.
    """

    query_starts: Tensor
    first_keys: Tensor
    num_keys: Tensor
    max_queries: int
    max_keys: int
    is_causal: bool


class KVSpans:
    """The spans of one batch. Masks and tables are derived from them once, not once per layer.

    Args:
        spans: the spans.
        device: the device of masks and ranges.
        ranges: the spans as tensors, if only these are known; kernels that use anything else must not get such spans.
    """

    def __init__(
        self, spans: Sequence[KVSpan], *, device: torch.device | str = "cpu", ranges: KeyRanges | None = None
    ) -> None:
        self.spans: tuple[KVSpan, ...] = tuple(spans)
        self._device = device
        self._known_ranges = ranges

    @cached_property
    def masks(self) -> list[Tensor | None]:
        """One mask per span, bool [queries, keys], true where a query attends to a key.

        None if there is one query, if all queries attend to all keys, or if the span starts at position 0 and is
        simply causal.
        """
        return [_mask(span, self._device) for span in self.spans]

    @cached_property
    def table(self) -> Tensor:
        """The spans as int64 [spans, 5] on the CPU, in the order of `KVSpan`'s attributes."""
        return torch.tensor(self.spans, dtype=torch.int64)

    @cached_property
    def ranges(self) -> KeyRanges | None:
        """The spans as tensors; None if there are none, or if neither all queries attend to all keys of their span, nor
        all spans are causal and end with their last query."""
        return self._known_ranges or _key_ranges(self.spans, self._device)

    @cached_property
    def packed(self) -> KVSpans:
        """The same spans if the keys of each follow those of the previous one."""
        firsts = accumulate((span.num_keys for span in self.spans), initial=0)
        spans = [span._replace(first_key=first) for first, span in zip(firsts, self.spans, strict=False)]
        return KVSpans(spans, device=self._device)


def _key_ranges(spans: Sequence[KVSpan], device: torch.device | str) -> KeyRanges | None:
    is_causal = all(span.start >= 0 and span.start + span.num_queries == span.num_keys for span in spans)
    if not spans or not (is_causal or all(span.start < 0 for span in spans)):
        return None
    query_starts = [*(span.first_query for span in spans), spans[-1].first_query + spans[-1].num_queries]
    first_keys = [*(span.first_key for span in spans), 0]
    num_keys = [*(span.num_keys for span in spans), 0]
    rows = to_device(torch.tensor([query_starts, first_keys, num_keys], dtype=torch.int32), device)
    max_queries = max(span.num_queries for span in spans)
    return KeyRanges(rows[0], rows[1], rows[2, :-1], max_queries, max(num_keys), is_causal)


def _mask(span: KVSpan, device: torch.device | str) -> Tensor | None:
    if span.start <= 0 or span.num_queries == 1:
        return None
    return torch.ones(span.num_queries, span.num_keys, dtype=torch.bool, device=device).tril(span.start)


class Norm(NamedTuple):
    """The parameters of a LayerNorm or, without a bias, of an RMSNorm."""

    weight: Tensor
    bias: Tensor | None = None


class Experts(Protocol):
    """A mixture of experts: gated MLPs, of which a router chooses some for each row."""

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """Add the result for x [rows, hidden] to `total` [rows, hidden], in place."""


class LowRankPart(NamedTuple):
    """The second factor of one of the projections that a linear layer fuses.

    Attributes:
        up: the factor [outputs, rank], which returns float32.
        first_input: index of its first input among the outputs of `LowRank.down`.
        inputs: number of its inputs: the rank, padded with zeros to a multiple of four.
        first_output: index of its first output among those of the linear layer.
        outputs: number of its outputs.
    """

    up: Linear
    first_input: int
    inputs: int
    first_output: int
    outputs: int


class LowRank(NamedTuple):
    """What an adapter adds to the weights of a linear layer (LoRA, arXiv:2106.09685), as a product of two factors.

    Attributes:
        down: the first factors of all parts [sum of ranks, inputs].
        parts: the second factors.
        outputs: number of outputs of the linear layer.
    """

    down: Linear
    parts: tuple[LowRankPart, ...]
    outputs: int


class LoraLayer(NamedTuple):
    """What an adapter adds to the linear layers of a `DecoderLayer`; None for those that it does not change.

    Attributes:
        qkv: of attention, or `qkvz` of a gated delta net.
        gate_up: of the MLP or the shared expert, as is `down`.
        gates: of a gated delta net.
        shared_router: of the shared expert.
    """

    qkv: LowRank | None = None
    output: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None
    gates: LowRank | None = None
    shared_router: LowRank | None = None


class LoraLayers:
    """What an adapter adds to the layers of a decoder.

    Attributes:
        layers: one per layer.
    """

    def __init__(self, layers: Sequence[LoraLayer]) -> None:
        self.layers: tuple[LoraLayer, ...] = tuple(layers)


class LoraRows(NamedTuple):
    """The tokens of a batch that an adapter applies to, which are consecutive.

    Attributes:
        lora: the adapter.
        start: index of the first token.
        stop: index after the last token.
        last_start: index of the first of these tokens in `ForwardBatch.last`.
        last_stop: index after the last of these tokens in `ForwardBatch.last`.
    """

    lora: LoraLayers
    start: int
    stop: int
    last_start: int
    last_stop: int

    def in_last(self) -> LoraRows:
        """Return the same tokens as indices of `ForwardBatch.last`."""
        return self._replace(start=self.last_start, stop=self.last_stop)


class Attention(NamedTuple):
    """The attention of a layer.

    Attributes:
        qkv: the projection to query, key and value heads, concatenated in this order; with `DecoderShape.gate`, the
            gates of the query heads come first.
        output: the output projection.
        query_norm: the norm of each query head before rotary embedding.
        key_norm: the norm of each key head before rotary embedding.
    """

    qkv: Linear
    output: Linear
    query_norm: Norm | None = None
    key_norm: Norm | None = None


class DeltaNet(NamedTuple):
    """A gated delta net.

    Attributes:
        spec: its shape.
        qkvz: the projection to queries, keys, values and the gate of the output, concatenated in this order.
        gates: the projection to beta and the step of the decay of each value head, float32.
        output: the output projection.
        conv: float32 [conv_width, channels], the weights of the convolution, for the oldest token first.
        rate: float32 [value heads], the logarithm of the decay of a step of 1.
        step_bias: float32 [value heads], added to the steps.
        norm: float32 [value_dim], the weight of the norm of each value head.
    """

    spec: DeltaNetSpec
    qkvz: Linear
    gates: Linear
    output: Linear
    conv: Tensor
    rate: Tensor
    step_bias: Tensor
    norm: Tensor


class Mlp(NamedTuple):
    """A gated MLP.

    Attributes:
        gate_up: the gate and up projection with `SILU_GATE`.
        down: the projection back to the hidden size.
    """

    gate_up: Linear
    down: Linear


class SharedExpert(NamedTuple):
    """An MLP for all rows next to a mixture of experts; the sigmoid of its router multiplies its output.

    Attributes:
        mlp: the MLP.
        router: the projection to one value, float32.
    """

    mlp: Mlp
    router: Linear


class DecoderLayer(NamedTuple):
    """One layer of a decoder, see `LayerSpec`; `shared_expert` is added to the output of `mlp`."""

    input_norm: Norm
    mixer: Attention | DeltaNet
    mlp_norm: Norm
    mlp: Mlp | Experts
    shared_expert: SharedExpert | None = None


class DecoderShape(NamedTuple):
    """The shape that all layers of a decoder share.

    Attributes:
        heads: number of query heads.
        kv_heads: number of key heads, and of value heads.
        head_dim: size of a head.
        eps: epsilon of the norms.
        levels: maximum number of levels of `ForwardBatch.additions`.
        gate: whether a sigmoid gate multiplies the output of attention.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    levels: int = 0
    gate: bool = False


class RecurrentStates(NamedTuple):
    """The states of gated delta nets, in slots. A forward pass never changes a slot that it reads.

    Attributes:
        conv: [delta net layers, slots, conv_width - 1, channels]: the inputs of the convolution of the last tokens.
        delta: float32 [delta net layers, slots, value heads, key_dim, value_dim].
    """

    conv: Tensor
    delta: Tensor


class StateSpan(NamedTuple):
    """The tokens of one sequence in a batch, and the slots of its state.

    Attributes:
        first_token: row of the first token.
        num_tokens: number of tokens.
        num_drafts: the number of these, at the end, that may be rejected.
        start: index in the sequence of the first token. At 0, the state begins with zeros.
        source: the slot with the state before the first token; -1 at 0.
        target: the slot for the state after the last token, not `source`.
        is_decoding: whether all tokens are computed one by one, and not only the drafts.
    """

    first_token: int
    num_tokens: int
    num_drafts: int
    start: int
    source: int
    target: int
    is_decoding: bool


class DeltaInputs(NamedTuple):
    """What gated delta nets compute states from.

    Attributes:
        rows: [tokens, channels], before the convolution.
        decay: float32 [tokens, value heads], the logarithm of the factor of the previous state.
        beta: float32 [tokens, value heads], the strength of the update.
    """

    rows: Tensor
    decay: Tensor
    beta: Tensor


class RecurrentBatch(NamedTuple):
    """The recurrent states of a batch.

    Attributes:
        states: all slots.
        spans: one per sequence, in the order of `ForwardBatch.spans`.
        kept: for each delta net layer, the inputs of the spans with drafts, by the number of the span; each layer
            appends its own.
    """

    states: RecurrentStates
    spans: tuple[StateSpan, ...]
    kept: list[dict[int, DeltaInputs]]


class ForwardBatch(NamedTuple):
    """The new tokens of many sequences, packed one sequence after the other.

    Attributes:
        cos: float32 [tokens, head_dim / 2], see `Kernels.rotate_`.
        sin: float32 [tokens, head_dim / 2].
        slots: int64 [tokens], the cache row for each token's keys and values; vLLM's `slot_mapping`.
        spans: one per sequence.
        last: int64, increasing: the tokens whose hidden states are returned.
        last_spans: one per token of `last`.
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


class DecoderLayers(Protocol):
    """All layers of a decoder."""

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the hidden states after the last layer, and write the new tokens' keys and values to the cache.

        Args:
            x: [tokens, hidden], contiguous; overwritten.
            batch: positions, cache slots and spans of the tokens.

        Returns:
            [len(batch.last), hidden]; the last layer computes only these rows.
        """


class Kernels(Protocol):
    """A kernel set. It is stateless and thread-safe.

    Attributes:
        name: the name shown in logs and reports.
        supports_int8: whether 8-bit weights are kept in 8 bits; otherwise they are rounded and kept in their dtype.
        supports_int4: the same for 4-bit weights.
        copies_weights: whether layers and heads copy their weights, which may then be views of a mapped file.
    """

    name: str
    supports_int8: bool
    supports_int4: bool
    copies_weights: bool

    def linear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        activation: Activation = Activation.NONE,
        fp32_output: bool = False,
        quantization: Quantization | None = None,
    ) -> Linear:
        """Create a linear layer from weights [outputs, inputs], which may be copied to another layout.

        Args:
            weight: on the model's device and in its dtype.
            bias: [outputs].
            activation: the activation to apply to the output.
            fp32_output: return float32.
            quantization: how to quantize the weights. If they are kept in 4 or 8 bits, the activations are quantized to
                8 bits dynamically.
        """

    def linear_quantized(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        activation: Activation = Activation.NONE,
        fp32_output: bool = False,
    ) -> Linear:
        """Create a linear layer from weights that are quantized already; see `linear`.

        Args:
            weight: on the model's device.
            bias: [outputs].
            dtype: the model's dtype, to which the weights are dequantized if they are not kept in their bits; see
                `linears.keeps_bits`.
            activation: the activation to apply to the output.
            fp32_output: return float32.

        Raises:
            ValueError: `weight` is inconsistent; see `QuantizedWeight.check`.
        """

    def head(self, weight: Tensor, *, quantization: Quantization | None = None) -> LMHead:
        """Create an LM head from weights [outputs, inputs]; see `linear`."""

    def groups_experts(self, dtype: torch.dtype, inputs: Sequence[int]) -> bool:
        """Whether experts whose linear layers have these inputs are computed at once, with torch's grouped products."""

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Apply LayerNorm or, without a bias, RMSNorm to x [rows, columns]."""

    def rotate_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Apply rotary embedding to x [rows, heads, head_dim] in place.

        Rotates the pairs (i, i + head_dim / 2); cos and sin are float32 [rows, head_dim / 2].
        """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spans: KVSpans) -> Tensor:
        """Compute softmax attention, scaled by 1 / sqrt(head_dim); query heads that share keys are adjacent.

        Args:
            q: [rows, heads, head_dim].
            k: [kv_heads, key rows, head_dim].
            v: [kv_heads, key rows, head_dim], with the same strides as k.
            spans: cover all rows of q, in order.

        Returns:
            [rows, heads * head_dim].
        """

    def decoder_layers(self, layers: Sequence[DecoderLayer], shape: DecoderShape) -> DecoderLayers:
        """Create decoder layers from `layers`, whose linear layers were created by these kernels."""


@runtime_checkable
class Int8CacheAttention(Protocol):
    """Kernels that also attend to an int8 KV cache directly; see `attend_cached`."""

    def attend_int8(self, q: Tensor, cache: KVCacheLayer, spans: KVSpans) -> Tensor:
        """Compute `Kernels.attend` with the keys and values of `cache`, which has scales."""


class SampledIds(NamedTuple):
    """The tokens sampled from rows of logits.

    Attributes:
        ids: int64 [rows].
        totals: float64 [rows], the sum of the weights, relative to the largest one; not finite if the largest logit is
            not, or if any is NaN.
    """

    ids: Tensor
    totals: Tensor


@runtime_checkable
class TokenSampling(Protocol):
    """Kernels that also sample tokens from logits."""

    def sample_tokens(
        self, logits: Tensor, rows: Tensor, temperatures: Tensor, lower_bounds: Tensor, uniforms: Tensor
    ) -> SampledIds:
        """Sample a token from some rows of logits: the first one at which the cumulative sum of the weights exceeds
        their total times a uniform number. A logit's weight is e^(logit / temperature), or 0 if that quotient is
        below the lower bound.

        Args:
            logits: float32 [.., vocab_size], with contiguous rows.
            rows: int64, the rows to sample from. All others have one element for each of them.
            temperatures: float32, positive.
            lower_bounds: float32.
            uniforms: float64, in [0, 1).
        """
