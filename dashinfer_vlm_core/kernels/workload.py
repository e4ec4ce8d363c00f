"""What kernel sets are measured with: the linear layers of a model, and how often serving runs them.

This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..text_spec import TextModelSpec

TEXT_MODEL = "text model"
VISION_ENCODER = "vision encoder"

TEXT_PASSES = ((1, 48.0), (4, 12.0), (16, 3.0), (64, 2.0), (256, 2.0))
"""Rows and number of forward passes of the reference request of a text model: 144 tokens of a response, of which a
third each is decoded alone, in a batch of 4 and in a batch of 16, and 640 tokens of prompts, 128 of them in chunks of
64 (a conversation goes on) and 512 in chunks of 256 (an image of 448x448, and text)."""

MAX_HEAD_ROWS = 16
"""Passes with more rows are prefill, where the LM head computes only the last row of each prompt."""

VISION_PASSES = ((256, 1.0), (512, 2.0))
"""The reference request of a vision encoder: images of 224x224 and 448x448 with patches of 14x14. The larger one counts
as two passes of half its rows, which take as long and are measured in half the time."""


class LinearShape(NamedTuple):
    """The shape of a linear layer.

    Attributes:
        outputs: rows of the weight matrix; with `silu_gate`, gate and up projection together.
        inputs: columns of the weight matrix.
        activation: name of an `Activation`, in lower case.
    """

    outputs: int
    inputs: int
    activation: str = "none"

    @property
    def weights(self) -> int:
        return self.outputs * self.inputs


class LinearGroup(NamedTuple):
    """Linear layers that run one after the other, such as those of a decoder layer.

    Attributes:
        shapes: the layers, in order.
        repeats: how often a forward pass runs them, with other weights each time.
        is_head: whether they are the LM head, which is computed only in passes of at most `MAX_HEAD_ROWS` rows.
    """

    shapes: tuple[LinearShape, ...]
    repeats: int = 1
    is_head: bool = False

    @property
    def weights(self) -> int:
        """The number of weights of all repetitions."""
        return self.repeats * sum(shape.weights for shape in self.shapes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The linear layers of a model and a reference request.

    Attributes:
        name: `TEXT_MODEL` or `VISION_ENCODER`.
        groups: the layers.
        passes: number of rows and number of forward passes of the reference request, with increasing rows.
        quantization: data type that the weights are quantized to, as the option names it.
    """

    name: str
    groups: tuple[LinearGroup, ...]
    passes: tuple[tuple[int, float], ...]
    quantization: str = "none"

    def weights_at(self, rows: int) -> int:
        """Return the number of weights that a forward pass of `rows` rows multiplies."""
        return sum(group.weights for group in self.groups_at(rows))

    def groups_at(self, rows: int) -> list[LinearGroup]:
        """Return the groups that a forward pass of `rows` rows runs."""
        return [group for group in self.groups if rows <= MAX_HEAD_ROWS or not group.is_head]

    def score(self, seconds: Mapping[int, float]) -> float:
        """Return the seconds of the reference request, from the seconds of a forward pass by its number of rows."""
        return math.fsum(count * seconds[rows] for rows, count in self.passes)


def vision_blocks(depth: int, width: int, inner: int, activation: str) -> tuple[LinearGroup, ...]:
    """Return the linear layers of a vision encoder's blocks: attention, and an MLP with the given inner size."""
    up = 2 * inner if activation == "silu_gate" else inner
    block = (
        LinearShape(3 * width, width),
        LinearShape(width, width),
        LinearShape(up, width, activation),
        LinearShape(width, inner),
    )
    return (LinearGroup(block, depth),)


def text_workload(text: TextModelSpec, *, quantization: str = "none") -> Workload:
    """Return the workload of a text model."""
    query, key = (heads * text.head_dim for heads in (text.num_attention_heads, text.num_key_value_heads))
    attention = (LinearShape(query + 2 * key, text.hidden_size), LinearShape(text.hidden_size, query))
    # Of a mixture of experts, those that compute one token: more tokens use more experts with fewer rows each.
    experts, inner = 1, text.intermediate_size
    if text.experts:
        experts, inner = text.experts.experts_per_token, text.experts.intermediate_size
    mlp = (LinearShape(2 * inner, text.hidden_size, "silu_gate"), LinearShape(text.hidden_size, inner))
    layer = (*attention, *(experts * mlp))
    head = LinearShape(text.vocab_size, text.hidden_size)
    groups = (LinearGroup(layer, text.num_hidden_layers), LinearGroup((head,), is_head=True))
    return Workload(name=TEXT_MODEL, groups=groups, passes=TEXT_PASSES, quantization=quantization)


def vision_workload(groups: Sequence[LinearGroup], *, quantization: str = "none") -> Workload | None:
    """Return the workload of a vision encoder with these layers; None if its model family does not describe them."""
    if not groups:
        return None
    return Workload(name=VISION_ENCODER, groups=tuple(groups), passes=VISION_PASSES, quantization=quantization)
