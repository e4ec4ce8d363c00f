"""What surrounds every request: a bound on concurrent completions, and errors that do not expose internals."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from ..errors import DashInferVLMError, EngineError, InvalidParameter, QueueFull

logger: logging.Logger = logging.getLogger(__name__)


class CompletionCount:
    """The running or waiting completions of all models of a process. Safe to use from any thread."""

    def __init__(self) -> None:
        self.value: int = 0
        self._lock = threading.Lock()

    def add(self, n: int) -> None:
        with self._lock:
            self.value += n


class ConcurrencyLimiter:
    """Bounds the running or waiting completions of a model. Belongs to one event loop.

    Args:
        total: counts them with those of other models.

    Attributes:
        limit: the number of slots, one per completion.
        in_use: the number of slots in use.
    """

    def __init__(self, limit: int, total: CompletionCount) -> None:
        self.limit = limit
        self._total = total
        self.in_use: int = 0

    @contextlib.contextmanager
    def slots(self, n: int = 1) -> Iterator[None]:
        """Acquire `n` slots, one for each choice of a request, and release them on exit.

        Raises:
            InvalidParameter: `n` exceeds the limit.
            QueueFull: fewer than `n` slots are free.
        """
        if n > self.limit:
            raise InvalidParameter(f"`n` must be at most {self.limit}, got {n}. Request fewer completions.", param="n")
        if self.in_use + n > self.limit:
            raise QueueFull(f"{self.in_use} completions are already running or waiting. Try again in a moment.")
        self.in_use += n
        self._total.add(n)
        try:
            yield
        finally:
            self.in_use -= n
            self._total.add(-n)


@contextlib.contextmanager
def hide_internal_errors() -> Iterator[None]:
    """Log unexpected exceptions, and replace them with an error that does not expose internals."""
    try:
        yield
    except DashInferVLMError:
        raise
    except Exception as error:
        logger.exception("A request failed.")
        raise EngineError(
            "The engine failed on this request; see its log for the cause. Other requests are not affected.",
            code="internal_error",
        ) from error
