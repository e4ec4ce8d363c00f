"""Limit the prompt tokens of a step by the time that they take."""

from __future__ import annotations

import statistics
from collections import deque

STEP_SECONDS = 0.1
"""The duration of a step that a running sequence should wait for its next token at most."""

PREFILL_SECONDS = 2.0
"""The duration of a step without running sequences, for which canceled requests and other models have to wait."""

MIN_TOKENS = 80
"""With fewer rows, matrix products take more time per row, so that all requests would take longer."""

MIN_RECORDED_TOKENS = 32
"""Steps of fewer tokens read weights most of the time, so that they do not show what a token costs."""

RECENT_STEPS = 5
"""Their median is used, since a pause of the process must not change the budget."""


class PrefillBudget:
    """The number of prompt tokens per step.

    A step that also continues running sequences delays their next tokens. It computes at most half a chunk, and no
    more than takes about `STEP_SECONDS`, as measured in recent steps. Other steps may take `PREFILL_SECONDS`.

    Args:
        prefill_chunk: maximum number of prompt tokens of a step.
    """

    def __init__(self, prefill_chunk: int) -> None:
        self._prefill_chunk = prefill_chunk
        self._seconds_per_token = deque[float](maxlen=RECENT_STEPS)

    def record(self, tokens: int, seconds: float) -> None:
        """Record how long a step of `tokens` tokens took."""
        if tokens >= MIN_RECORDED_TOKENS:
            self._seconds_per_token.append(seconds / tokens)

    def tokens(self, *, has_decodes: bool) -> int:
        """Return the number of prompt tokens of the next step.

        Args:
            has_decodes: whether the step also continues running sequences.
        """
        limit = (self._prefill_chunk + 1) // 2 if has_decodes else self._prefill_chunk
        if not self._seconds_per_token:
            return limit
        seconds = STEP_SECONDS if has_decodes else PREFILL_SECONDS
        tokens = int(seconds / max(statistics.median(self._seconds_per_token), 1e-9))
        return min(max(tokens, MIN_TOKENS), limit)
