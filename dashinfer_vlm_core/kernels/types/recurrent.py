"""Gated delta nets and their states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ...text_spec import DeltaNetSpec
from .linear import Linear


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
        eps: the epsilon of this norm.
    """

    spec: DeltaNetSpec
    qkvz: Linear
    gates: Linear
    output: Linear
    conv: Tensor
    rate: Tensor
    step_bias: Tensor
    norm: Tensor
    eps: float


class RecurrentStates(NamedTuple):
    """The states of gated delta nets, in slots. A forward pass never changes a slot that it reads.

    Attributes:
        conv: [delta net layers, slots, conv_width - 1, channels]: the inputs of the convolution of the last tokens.
        delta: float32 [delta net layers, slots, value heads, key_dim, value_dim].
    """

    conv: Tensor
    delta: Tensor

    def layer(self, number: int) -> RecurrentStates:
        """Return the states of one of the layers, without the dimension of layers."""
        return RecurrentStates(self.conv[number], self.delta[number])


class StateSpan(NamedTuple):
    """The tokens of one sequence in a batch, and the slots of its state.

    Attributes:
        first_token: row of the first token.
        num_tokens: number of tokens.
        num_drafts: the number of these, at the end, that may be rejected.
        source: the slot with the state before the first token; -1 for zeros.
        target: the slot for the state after the last token, not `source`.
        chunks: the numbers of tokens of the chunks in which the first tokens are computed. The others, all drafts among
            them, are computed one by one.
        saved: further slots, each with the number of leading tokens, which end with a chunk, whose state is written to
            it.
    """

    first_token: int
    num_tokens: int
    num_drafts: int
    source: int
    target: int
    chunks: tuple[int, ...] = ()
    saved: tuple[tuple[int, int], ...] = ()


class StateSpans:
    """The spans of one batch. The table is derived from them once, not once per layer."""

    def __init__(self, spans: Sequence[StateSpan]) -> None:
        self.spans: tuple[StateSpan, ...] = tuple(spans)

    @cached_property
    def table(self) -> Tensor:
        """The spans as int64 on the CPU: 8 values of each, the first token, the number of tokens, source, target, and
        the place and number of its chunks and of its saved slots in the list that follows. There, a saved slot is a
        number of tokens and the slot."""
        rows: list[int] = []
        lists: list[int] = []
        for span in self.spans:
            chunks, saved = len(lists), len(lists) + len(span.chunks)
            rows += [span.first_token, span.num_tokens, span.source, span.target]
            rows += [chunks, len(span.chunks), saved, len(span.saved)]
            lists += [*span.chunks, *chain.from_iterable(span.saved)]
        return torch.tensor(rows + lists, dtype=torch.int64)

    @cached_property
    def drafted(self) -> Mapping[int, StateSpan]:
        """The spans with drafts by their number. Their first tokens are rows of `RecurrentBatch.kept`."""
        drafted: dict[int, StateSpan] = {}
        first = 0
        for number, span in enumerate(self.spans):
            if span.num_drafts:
                drafted[number] = span._replace(first_token=first)
                first += span.num_tokens
        return drafted


class DeltaInputs(NamedTuple):
    """What gated delta nets compute states and outputs from.

    Attributes:
        qkvz: [tokens, channels + value heads * value_dim], the output of `DeltaNet.qkvz`.
        gates: float32 [tokens, 2 * value heads], the output of `DeltaNet.gates`.
    """

    qkvz: Tensor
    gates: Tensor


class RecurrentBatch(NamedTuple):
    """The recurrent states of a batch.

    Attributes:
        states: all slots.
        spans: one per sequence, in the order of `ForwardBatch.spans`.
        kept: for each delta net layer, the inputs of the spans with drafts, one span after the other; each layer
            appends its own.
    """

    states: RecurrentStates
    spans: StateSpans
    kept: list[DeltaInputs]
