"""PoolingSpec: how the result of a prompt follows from the hidden states of its tokens, as data."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal, NamedTuple

Task = Literal["generate", "embed", "score", "token_embed"]
"""What a checkpoint was trained for: to generate text, to embed its input, to score a query and a document, or to embed
each token of its input."""


class TokenContrast(NamedTuple):
    """A score that is the logit of one token minus that of another one."""

    true: int
    false: int


class Projection(NamedTuple):
    """A linear layer that is applied to the hidden state of each token.

    Attributes:
        name: its name in the checkpoint.
        size: its number of outputs.
    """

    name: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalFormat:
    """The prompts of a model with late interaction. Special tokens in these texts are recognized.

    Attributes:
        query_prefix: before the text of a query.
        query_suffix: after it, such as tokens that augment the query.
        document_suffix: after the text of a document.
        media_prefix: before the images and videos of a query or document.
        media_text: after them, followed by the text, if there is any.
        media_suffix: after the text.
    """

    query_prefix: str
    query_suffix: str
    document_suffix: str
    media_prefix: str
    media_text: str
    media_suffix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingSpec:
    """How hidden states become embeddings or a score: that of the last token or, with `token_embed`, of all tokens.

    Attributes:
        task: what the result is.
        instruction: the instruction of requests without one; empty if the model has none.
        head: what is computed from hidden states: two rows of the output layer or, by its name, a module with one
            output for scores; a projection for `token_embed`; None for embeddings.
        normalize: whether embeddings have the Euclidean length 1.
        dimensions: numbers of dimensions that embeddings may be shortened to, because the model was trained for them
            (Matryoshka representation learning, arXiv:2205.13147).
        format: the prompts of `token_embed`; None for other tasks.
    """

    task: Literal["embed", "score", "token_embed"]
    instruction: str
    head: TokenContrast | Projection | str | None = None
    normalize: bool = True
    dimensions: Container[int] = ()
    format: RetrievalFormat | None = None

    @property
    def pools_tokens(self) -> bool:
        """Whether each token of a prompt has a result."""
        return self.task == "token_embed"


def keeps_outputs(pooling: PoolingSpec | None) -> bool:
    """Whether quantization to 8 bits leaves out the matrices whose products are added to hidden states: the last one of
    attention and of an MLP. They have a third of the weights, and cause 40 % of the error of an embedding."""
    return pooling is not None
