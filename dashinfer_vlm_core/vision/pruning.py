"""Which visual tokens of an image or video are kept, from their embeddings. Uses no torch at import.

Videos are pruned as by vLLM's EVS (Efficient Video Sampling, arXiv:2510.14624), images as by CDPruner
(arXiv:2506.10967), but without its condition on the question: the kept tokens of an image would differ between
questions, and neither prompts nor embeddings could be cached.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..concurrency.compute import Executor, executor_for
from ..models.interface import VisualTokens

if TYPE_CHECKING:
    import torch

STRIP_TOKENS = 1024
"""Larger images are pruned in strips, since the time for a strip grows with the third power of its tokens."""

TASK_STEPS = 64
"""Tokens that are selected, or compared with all others of a strip, in one task of the executor: streams continue
between two tasks."""

RIDGE = 0.01
"""Added to the similarity of a token to itself: more tokens can be kept than embeddings have dimensions."""

SMALLEST_NORM = 1e-8


def prune(item: VisualTokens) -> VisualTokens:
    """Return the tokens that are kept of all tokens of an item, with a digest that contains the pruning rate.

    It has no digests of temporal patches: which tokens of a patch are kept depends on the whole video.
    """
    executor = executor_for(str(item.embedding.device))
    select = _changed_rows if item.kind == "video" else _diverse_rows
    rows = select(item, executor)
    embedding = executor.run(lambda: item.embedding[rows])
    digest = hashlib.sha256(f"pruned {item.pruning_rate!r}".encode() + item.digest).digest()
    # The rows are copied after the embedding was gathered: on a GPU, this waits for it.
    return replace(item, embedding=embedding, digest=digest, units=(), kept_rows=rows.cpu().numpy())


def _changed_rows(item: VisualTokens, executor: Executor) -> torch.Tensor:
    """Return the first frame pair and the tokens that differ most from the same place in the previous pair."""
    frames = item.embedding.reshape(item.grid.t, item.tokens // item.grid.t, -1)

    def compute() -> torch.Tensor:
        similarity = frames.new_full(frames.shape[:2], -2).float()  # less than any cosine
        previous = _normalized(frames[0])
        for index in range(1, len(frames)):
            current = _normalized(frames[index])
            similarity[index] = (current * previous).sum(-1)
            previous = current
        order = similarity.flatten().argsort(stable=True)
        return order[: item.kept_tokens].sort().values

    return executor.run(compute)


def _diverse_rows(item: VisualTokens, executor: Executor) -> torch.Tensor:
    """Return the tokens that a determinantal point process over their cosine similarities selects greedily."""
    embedding = item.embedding
    count = -(-item.tokens // STRIP_TOKENS)
    bounds = [item.tokens * index // count for index in range(count + 1)]
    kept = [bound * item.kept_tokens // item.tokens for bound in bounds]
    rows = embedding.new_empty(item.kept_tokens).long()
    for index in range(count):
        strip = embedding[bounds[index] : bounds[index + 1]]
        selected = _select(strip, kept[index + 1] - kept[index], executor)
        rows[kept[index] : kept[index + 1]] = bounds[index] + selected
    return rows


def _select(embedding: torch.Tensor, count: int, executor: Executor) -> torch.Tensor:
    """Select tokens one by one, each the one that is least a linear combination of those before.

    This is a pivoted Cholesky decomposition of the similarities (Chen et al., arXiv:1709.05135).
    """
    similarities = _similarities(embedding, executor)
    factors = similarities.new_zeros((count, len(embedding)))
    remainder = similarities.diagonal() + RIDGE

    def select(start: int) -> None:
        for step in range(start, min(start + TASK_STEPS, count)):
            row = int(remainder.argmax())
            similarity = similarities[row] - factors[:step, row] @ factors[:step]
            factors[step] = similarity / remainder[row].sqrt()
            remainder.sub_(factors[step] ** 2)
            remainder[row] = -math.inf

    for start in range(0, count, TASK_STEPS):
        executor.run(partial(select, start))
    return remainder.isneginf().nonzero().flatten()


def _similarities(embedding: torch.Tensor, executor: Executor) -> torch.Tensor:
    """Return the cosine similarity of each token to each other, float32 [tokens, tokens]."""
    unit = executor.run(partial(_normalized, embedding))
    similarities = unit.new_empty((len(unit), len(unit)))

    def compare(start: int) -> None:
        similarities[start : start + TASK_STEPS] = unit[start : start + TASK_STEPS] @ unit.T

    for start in range(0, len(unit), TASK_STEPS):
        executor.run(partial(compare, start))
    return similarities


def _normalized(embedding: torch.Tensor) -> torch.Tensor:
    # An encoder that overflows gives NaN or infinity. Selecting needs an order; the decoder reports what it gets.
    values = embedding.float().nan_to_num(posinf=0, neginf=0)
    lengths: torch.Tensor = values.norm(dim=-1, keepdim=True)
    return values / lengths.clamp(min=SMALLEST_NORM)
