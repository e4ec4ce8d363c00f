"""Gated delta nets and their states."""

from __future__ import annotations

from typing import NamedTuple

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
    """

    spec: DeltaNetSpec
    qkvz: Linear
    gates: Linear
    output: Linear
    conv: Tensor
    rate: Tensor
    step_bias: Tensor
    norm: Tensor


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
