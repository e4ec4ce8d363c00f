"""What LoRA adapters add to the layers of a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .linear import Linear


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
