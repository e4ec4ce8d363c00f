"""A circuit breaker: operations of a store that fails repeatedly are not attempted for a while."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

logger: logging.Logger = logging.getLogger(__name__)

FAILURES = 3
"""Number of consecutive failures after which operations pause."""

MIN_PAUSE = 1.0
"""Seconds of the first pause; each pause is twice as long as the one before."""

MAX_PAUSE = 60.0

LOG_INTERVAL = 60.0
"""Minimum number of seconds between two warnings."""


class CircuitBreaker:
    """Decides whether an operation is attempted. Belongs to one event loop.

    After a pause, one operation is attempted. If it fails, the next pause begins.

    Args:
        name: what is paused, for the log, such as "Lookups in the embedding store".
        clock: the monotonic clock, in seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._failures = 0
        self._until = -math.inf
        self._next_log = -math.inf

    @property
    def is_open(self) -> bool:
        """Whether operations are paused, or only attempted one at a time."""
        return self._failures >= FAILURES

    def allows(self) -> bool:
        """Return whether to attempt an operation; then call `succeeded` or `failed`, unless it is canceled."""
        if not self.is_open:
            return True
        if self._clock() < self._until:
            return False
        self._count_failure()  # until this one succeeds, the others wait
        return True

    def succeeded(self) -> None:
        if self.is_open:
            logger.info("%s work again.", self._name)
        self._failures = 0

    def failed(self, reason: str) -> None:
        """Count a failure; `reason` is for the log, human-readable."""
        if self.is_open:
            return  # it started before the pause, or was counted when it started
        self._count_failure()
        if self._failures == FAILURES and self._clock() >= self._next_log:
            logger.warning("%s fail: %s. They pause, and requests continue without them.", self._name, reason)
            self._next_log = self._clock() + LOG_INTERVAL

    def _count_failure(self) -> None:
        self._failures += 1
        if self.is_open:
            doublings = min(self._failures - FAILURES, 10)
            self._until = self._clock() + min(MIN_PAUSE * 2**doublings, MAX_PAUSE)
