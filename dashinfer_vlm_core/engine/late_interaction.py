"""Late interaction (arXiv:2004.12832): embeddings of all tokens, and scores that compare those of two prompts."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..errors import InvalidParameter
from ..preprocessing.pooling import PlacedItem

MAX_VECTORS = 1 << 16
"""The most embeddings of tokens that are kept for a request: 32 MiB with 128 dimensions, and 160 MB in a response."""

MAXSIM_ROWS = 256
"""Rows of a query whose products with a document are in memory at the same time."""

Matrix = npt.NDArray[np.float32]


def to_base64(values: Matrix) -> str:
    """Return float32 in little-endian order as base64."""
    return base64.b64encode(values.astype(np.dtype("<f4")).tobytes()).decode()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenEmbeddings:
    """The embeddings of the tokens of each item of a request, in order.

    Attributes:
        model: the name of the model, or of the LoRA adapter.
        vectors: float32 [tokens, dimensions] for each item; all rows have the Euclidean length 1.
        prompt_tokens: the tokens of each prompt, with visual tokens; of a remote engine, their sum.
    """

    model: str
    vectors: tuple[Matrix, ...]
    prompt_tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenVectors:
    """Collects the embeddings of the tokens of items.

    Attributes:
        limit: the most embeddings; None for a caller in this process.
        found: by the index of the item.
    """

    limit: int | None = MAX_VECTORS
    found: dict[int, Matrix] = field(default_factory=dict)

    def add(self, index: int, item: PlacedItem, vectors: Matrix) -> None:
        """Add the embeddings of an item.

        Raises:
            InvalidParameter: there are too many.
        """
        self.found[index] = vectors
        if self.limit is not None and sum(map(len, self.found.values())) > self.limit:
            raise InvalidParameter(
                f"`{item.path}`: the request has more than {self.limit} tokens, images included, each of which has an"
                " embedding. Send several requests, or lower `max_pixels`.",
                param=item.path,
            )


def maxsim(query: Matrix, document: Matrix) -> float:
    """Return the sum over the rows of `query` of the largest product with a row of `document`."""
    blocks = (query[start : start + MAXSIM_ROWS] for start in range(0, len(query), MAXSIM_ROWS))
    return sum(float((block @ document.T).max(axis=1).sum(dtype=np.float64)) for block in blocks)
