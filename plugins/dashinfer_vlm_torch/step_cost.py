"""Measure what rows of a forward pass and predictions of a drafter cost."""

from __future__ import annotations

MARGIN = 1.5
DRAFTER_MARGIN = 1.2
"""A draft is computed only if its expected gain is this many times its cost, since both are estimates. That of a row
is the difference of two durations, and that of a drafter's prediction a duration."""

USUAL_SHARE = 0.15
"""The duration of a drafter's prediction as a share of a forward pass's, until both were measured."""


class StepCost:
    """The duration of a forward pass as a linear function of its rows, fitted to recent passes.

    Only passes without a prefill are recorded. While their numbers of rows do not differ, a usual ratio is assumed.
    """

    DECAY = 0.98
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
        self._weight = self.DECAY * self._weight + 1
        self._rows = self.DECAY * self._rows + rows
        self._seconds = self.DECAY * self._seconds + seconds
        self._rows_squared = self.DECAY * self._rows_squared + rows * rows
        self._product = self.DECAY * self._product + rows * seconds

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

    def share(self, seconds: float) -> float:
        """Return the duration of something else as a share of that of a pass; 1 at most."""
        if self._weight < self.MIN_PASSES:
            return USUAL_SHARE
        return min(seconds * self._weight / max(self._seconds, 1e-9), 1.0)


class DrafterCost:
    """How long a drafter takes to predict a token for each sequence of a batch, in recent steps."""

    DECAY = 0.9
    MAX_OUTLIER = 4.0

    def __init__(self) -> None:
        self._weight = self._seconds = 0.0

    @property
    def seconds(self) -> float | None:
        """The seconds; None before the first prediction."""
        return self._seconds / self._weight if self._weight else None

    def record(self, count: int, seconds: float, *, is_limit: bool = False) -> None:
        """Record the prediction of `count` tokens, one after the other.

        Args:
            count: their number.
            seconds: what they took.
            is_limit: they took less, since the drafter also processed other tokens.
        """
        per_token = seconds / count
        if is_limit and (self.seconds is None or per_token >= self.seconds):
            return
        if self.seconds is not None:
            per_token = min(per_token, self.MAX_OUTLIER * self.seconds)
        self._weight = self.DECAY * self._weight + 1
        self._seconds = self.DECAY * self._seconds + per_token
