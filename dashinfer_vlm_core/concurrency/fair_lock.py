"""A lock that threads get in the order in which they ask for it."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """A reentrant lock, first come, first served.

    With `threading.RLock`, a thread that releases the lock and acquires it again at once can keep it from all others.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._owner: int | None = None
        self._depth = 0

    @property
    def waiting(self) -> int:
        """The number of threads that wait for the lock."""
        return len(self._waiting)

    def __enter__(self) -> None:
        me = threading.get_ident()
        ticket = object()
        with self._changed:
            if self._owner != me:
                self._waiting.append(ticket)
                self._changed.wait_for(lambda: self._owner is None and self._waiting[0] is ticket)
                self._waiting.popleft()
                self._owner = me
            self._depth += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._changed.notify_all()
