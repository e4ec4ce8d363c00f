"""Propose the next tokens of a sequence, which are computed and verified in one forward pass.

A proposal never changes the output: the sampler chooses the token of each position as it would without proposals, and
those after the first difference are discarded. A wrong one costs the time of its row in the forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
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


class Prior(NamedTuple):
    """What is assumed of the predictions for a new sequence.

    Attributes:
        accepted: the share that will be accepted.
        predicted: the weight of this assumption, in predictions.
        decay: the weight of earlier predictions, per prediction.
    """

    accepted: float
    predicted: float
    decay: float


REPETITION = Prior(accepted=0.3, predicted=1, decay=0.9)
DRAFTER = Prior(accepted=0.7, predicted=4, decay=0.97)
"""Whether text repeats itself changes within it; how often a drafter is right hardly does. Its estimate must be more
exact, too: predictions that look worse than they are end, and their rate would be known only much later."""

MAX_DRAFTER_TOKENS = 4
"""Maximum number of tokens per step that a drafter predicts, one after the other."""


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
        return expected_accepted(self.acceptance_rate, len(self.tokens))


def expected_accepted(rate: float, count: int) -> float:
    """Return the expected number of accepted ones of `count` tokens."""
    return sum(rate**number for number in range(1, count + 1))


class Predictions:
    """What one method predicts for a sequence, and how often it is right.

    Attributes:
        tokens: the next tokens.
        rate: the acceptance rate so far.
    """

    def __init__(self, prior: Prior) -> None:
        self.tokens: Sequence[int] = ()
        self.rate: AcceptanceRate = AcceptanceRate(prior)

    def draft(self, limit: int, threshold: float) -> Draft:
        """Return the leading tokens that are worth computing, at most `limit`."""
        num_drafts = min(limit, self.rate.num_drafts(threshold))
        return Draft(tuple(self.tokens[:num_drafts]), acceptance_rate=self.rate.value)

    def observe(self, tokens: Sequence[int]) -> None:
        """Compare the predicted tokens with those that the output continued with."""
        num_equal = count_equal(self.tokens, tokens)
        for _ in range(num_equal):
            self.rate.record(accepted=True)
        if num_equal < min(len(self.tokens), len(tokens)):
            self.rate.record(accepted=False)


class DraftProposer:
    """Proposes the next tokens of one sequence: those that its grammar forces, those that a drafter has predicted, or
    those that followed an earlier occurrence of its last tokens ("prompt lookup").

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
        self._repeated = Predictions(REPETITION)
        self._drafted = Predictions(DRAFTER)
        self._looked_up: int | None = None  # the number of tokens whose repetitions are `_repeated`

    def propose(self, tokens: npt.NDArray[np.int64], limit: int, threshold: float) -> Draft:
        """Propose tokens.

        Args:
            tokens: int64 [length], prompt and output so far.
            limit: maximum number of tokens.
            threshold: the probability of being accepted that a predicted token must have.
        """
        if self._matcher and (forced := self._matcher.forced_tokens()):
            self._repeated.tokens = self._drafted.tokens = ()
            self._looked_up = None
            certain = tuple(forced[: min(limit, MAX_FORCED_TOKENS)])
            return Draft(certain, len(certain))
        self._look_up(tokens)
        drafts = [predictions.draft(limit, threshold) for predictions in (self._drafted, self._repeated)]
        return max(drafts, key=attrgetter("expected_accepted"))

    def num_to_draft(self, tokens: npt.NDArray[np.int64], limit: int, threshold: float, *, least: int = 0) -> int:
        """Return how many tokens the drafter should predict; arguments as in `propose`, but with its cost in the
        threshold. At least `least`, unless none can be used."""
        if limit <= 0 or (self._matcher and self._matcher.forced_tokens()):
            return 0
        rate = self._drafted.rate
        count = min(limit, rate.num_drafts(threshold), MAX_DRAFTER_TOKENS)
        self._look_up(tokens)
        if self._repeated.draft(limit, threshold).expected_accepted >= expected_accepted(rate.value, count):
            count = 0
        return max(count, least)

    def set_drafted(self, tokens: Sequence[int]) -> None:
        """Store what the drafter has predicted for the next step. A prediction that cannot be used was wrong, unless
        the output ends."""
        self._drafted.tokens = self._possible(tokens)
        if not self._drafted.tokens:
            self._drafted.rate.record(accepted=False)

    def observe(self, tokens: Sequence[int]) -> None:
        """Compare the last predictions with the tokens that the output continued with."""
        self._repeated.observe(tokens)
        self._drafted.observe(tokens)
        self._drafted.tokens = ()

    def _look_up(self, tokens: npt.NDArray[np.int64]) -> None:
        """Predict repetitions, once for each length: both `num_to_draft` and `propose` compare them."""
        if len(tokens) != self._looked_up:
            self._looked_up = len(tokens)
            has_output = len(tokens) > self._prompt_length
            self._repeated.tokens = self._possible(lookup(tokens, MAX_DRAFT_TOKENS)) if has_output else ()

    def _possible(self, predicted: Sequence[int]) -> Sequence[int]:
        end = next((index for index, token in enumerate(predicted) if token in self._stops), len(predicted))
        if self._matcher and end:
            end = self._matcher.count_allowed(predicted[:end])
        return predicted[:end]


class AcceptanceRate:
    """The share of predicted tokens that were correct, weighted toward recent ones."""

    def __init__(self, prior: Prior) -> None:
        self._accepted: float = prior.accepted * prior.predicted
        self._predicted: float = prior.predicted
        self._decay = prior.decay

    @property
    def value(self) -> float:
        return self._accepted / self._predicted

    def record(self, *, accepted: bool) -> None:
        """Record whether a token was predicted correctly, given that those before it were."""
        self._accepted = self._decay * self._accepted + accepted
        self._predicted = self._decay * self._predicted + 1

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
