"""PoolingSpec: how the result of a prompt follows from the hidden states of its tokens, as data."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal, NamedTuple

Task = Literal["generate", "embed", "score"]
"""What a checkpoint was trained for: to generate text, to embed its input, or to score a query and a document."""


class TokenContrast(NamedTuple):
    """A score that is the logit of one token minus that of another one."""

    true: int
    false: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingSpec:
    """How the hidden state of the last token becomes an embedding or a score.

    Attributes:
        task: what the result is.
        instruction: the instruction of requests without one.
        head: what a score is computed with: two rows of the output layer, or a module with one output by its name; None
            for embeddings.
        normalize: whether embeddings have the Euclidean length 1.
        dimensions: numbers of dimensions that embeddings may be shortened to, because the model was trained for them
            (Matryoshka representation learning, arXiv:2205.13147).
    """

    task: Literal["embed", "score"]
    instruction: str
    head: TokenContrast | str | None = None
    normalize: bool = True
    dimensions: Container[int] = ()
