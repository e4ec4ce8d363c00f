"""Propose the next tokens of a sequence, which are computed and verified in one forward pass.

A proposal never changes the output: the sampler chooses the token of each position as it would without proposals, and
those after the first difference are discarded. A wrong one costs the time of its row in the forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from dashinfer_vlm_core.decoders import GrammarMatcher

MAX_FORCED_TOKENS = 32
"""Maximum number of forced tokens per step: more would delay the other sequences of the batch."""

MAX_DRAFT_TOKENS = 8
"""Maximum number of tokens per step that are predicted from earlier text."""

MIN_NGRAM = 2
MAX_NGRAM = 5
"""An earlier occurrence of at least and at most this many of the last tokens predicts the next ones."""

MEMORY = 0.9
"""Weight of a sequence's earlier predictions in its acceptance rate, per prediction."""

PRIOR_ACCEPTED = 0.3
PRIOR_PREDICTED = 1.0
"""The acceptance rate of a new sequence, as accepted tokens of predicted ones."""

MARGIN = 1.5
"""A draft is computed only if its expected gain is this many times its cost, since both are estimates."""


class Draft(NamedTuple):
    """The tokens proposed for one sequence.

    Attributes:
        tokens: the proposed tokens.
        num_forced: the number of leading tokens that the sequence's grammar forces, which are certain.
        acceptance_rate: the estimated probability that a token is accepted if those before it are.
    """

    tokens: tuple[int, ...] = ()
    num_forced: int = 0
    acceptance_rate: float = 1.0

    @property
    def expected_accepted(self) -> float:
        """The expected number of accepted tokens."""
        return sum(self.acceptance_rate**count for count in range(1, len(self.tokens) + 1))


class DraftProposer:
    """Proposes the next tokens of one sequence: those that its grammar forces, or those that followed an earlier
    occurrence of its last tokens ("prompt lookup").

    It also predicts where it proposes nothing, and compares the predictions with the output. Therefore it learns
    without computing drafts whether they would be accepted.

    Args:
        prompt_length: the number of tokens before the output.
        matcher: the output's state in the request's grammar, if it has one.
        stops: tokens that end the output, which are not proposed.
    """

    def __init__(
        self, prompt_length: int, matcher: GrammarMatcher | None = None, stops: frozenset[int] = frozenset()
    ) -> None:
        self._prompt_length = prompt_length
        self._matcher = matcher
        self._stops = stops
        self._predicted: Sequence[int] = ()
        self._acceptance = AcceptanceRate()

    def propose(self, tokens: npt.NDArray[np.int64], limit: int, threshold: float) -> Draft:
        """Propose tokens.

        Args:
            tokens: int64 [length], prompt and output so far.
            limit: maximum number of tokens.
            threshold: the probability of being accepted that a predicted token must have.
        """
        if self._matcher and (forced := self._matcher.forced_tokens()):
            self._predicted = ()
            certain = tuple(forced[: min(limit, MAX_FORCED_TOKENS)])
            return Draft(certain, len(certain))
        self._predicted = self._predict(tokens)
        num_drafts = min(limit, self._acceptance.num_drafts(threshold))
        return Draft(tuple(self._predicted[:num_drafts]), acceptance_rate=self._acceptance.value)

    def observe(self, tokens: Sequence[int]) -> None:
        """Compare the last prediction with the tokens that the output continued with."""
        num_equal = count_equal(self._predicted, tokens)
        for _ in range(num_equal):
            self._acceptance.record(accepted=True)
        if num_equal < min(len(self._predicted), len(tokens)):
            self._acceptance.record(accepted=False)

    def _predict(self, tokens: npt.NDArray[np.int64]) -> Sequence[int]:
        if len(tokens) == self._prompt_length:
            return ()
        predicted = lookup(tokens, MAX_DRAFT_TOKENS)
        end = next((index for index, token in enumerate(predicted) if token in self._stops), len(predicted))
        if self._matcher and end:
            end = self._matcher.count_allowed(predicted[:end])
        return predicted[:end]


class AcceptanceRate:
    """The share of predicted tokens that were correct, weighted toward recent ones."""

    def __init__(self) -> None:
        self._accepted = PRIOR_ACCEPTED
        self._predicted = PRIOR_PREDICTED

    @property
    def value(self) -> float:
        return self._accepted / self._predicted

    def record(self, *, accepted: bool) -> None:
        """Record whether a token was predicted correctly, given that those before it were."""
        self._accepted = MEMORY * self._accepted + accepted
        self._predicted = MEMORY * self._predicted + 1

    def num_drafts(self, threshold: float) -> int:
        """Return how many tokens to draft: the probability that all of them are accepted is at least `threshold`."""
        if self.value <= threshold:
            return 0
        return min(int(math.log(threshold) / math.log(min(self.value, 0.99))), MAX_DRAFT_TOKENS)


def count_equal(proposed: Sequence[int], token_ids: Sequence[int]) -> int:
    """Return the number of leading tokens that are equal."""
    pairs = zip(proposed, token_ids, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(proposed), len(token_ids)))


def lookup(tokens: npt.NDArray[np.int64], count: int) -> list[int]:
    """Predict the `count` tokens after `tokens` from those after the longest n-gram that equals the last tokens.

    Of several n-grams of `MIN_NGRAM` to `MAX_NGRAM` tokens with the same length, the most recent one is used. The
    continuation may reach the end of `tokens` and repeats itself then, so periods are continued. Source: Saxena,
    "Prompt Lookup Decoding", 2023.

    Args:
        tokens: int64 [length].
        count: number of tokens to return.

    Returns:
        `count` tokens, or none if there is no such n-gram.
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    for size in range(2, MAX_NGRAM + 1):
        longer = ends[ends >= size - 1]
        if len(longer):
            longer = longer[tokens[longer - size + 1] == tokens[-size]]
        if not len(longer):
            if size <= MIN_NGRAM:
                return []
            break
        ends = longer
    start = int(ends[-1]) + 1
    period = len(tokens) - start
    continuation: list[int] = tokens[start : start + count].tolist()
    return [continuation[index % period] for index in range(count)]


class StepCost:
    """The duration of a forward pass as a linear function of its rows, fitted to recent passes.

    Only passes without a prefill are recorded. While their numbers of rows do not differ, a usual ratio is assumed.
    """

    MEMORY = 0.98
    MIN_PASSES = 8.0
    MIN_VARIANCE = 0.5
    MAX_OUTLIER = 4.0
    USUAL_RATIO = 20.0
    RATIOS = (2.0, 100.0)
    """Range of the base's ratio to a row's cost, since measurements on a busy machine are unreliable."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_squared = self._product = 0.0

    def record(self, rows: int, seconds: float) -> None:
        """Record a forward pass."""
        if self._weight >= self.MIN_PASSES:  # a pause of the process is not the cost of rows
            seconds = min(seconds, self.MAX_OUTLIER * self._seconds / self._weight)
        self._weight = self.MEMORY * self._weight + 1
        self._rows = self.MEMORY * self._rows + rows
        self._seconds = self.MEMORY * self._seconds + seconds
        self._rows_squared = self.MEMORY * self._rows_squared + rows * rows
        self._product = self.MEMORY * self._product + rows * seconds

    @property
    def ratio(self) -> float:
        """The cost of a pass without rows, in costs of a row."""
        if self._weight < self.MIN_PASSES:
            return self.USUAL_RATIO
        mean = self._rows / self._weight
        seconds = self._seconds / self._weight
        variance = self._rows_squared / self._weight - mean * mean
        if variance < self.MIN_VARIANCE:
            return self.USUAL_RATIO
        slope = max((self._product / self._weight - mean * seconds) / variance, 1e-9)
        least, most = self.RATIOS
        return min(max((seconds - slope * mean) / slope, least), most)

    def threshold(self, *, tokens: float, rows: int) -> float:
        """Return the probability of being accepted from which one more draft makes the batch faster.

        A forward pass of `rows` rows is expected to yield `tokens` tokens. One more row must add tokens in proportion
        to the time that it adds.
        """
        return min(MARGIN * tokens / (self.ratio + rows), 1.0)
