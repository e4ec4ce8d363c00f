"""Whose turn it is to compute on this process's cores.

Tower and decoder each use all cores from a thread of their own. Both at once would wait at every barrier for threads
that the other keeps from running.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class Turns:
    """A lock that is given in the order in which it was asked for: who asks again at once does not get it again.

    It is there for speed alone: two that compute at once are slower, and right.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._owner: int | None = None
        self._waiting: deque[tuple[int, threading.Event]] = deque()

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._guard:
            if self._owner is None:
                self._owner = me
                return
            mine = threading.Event()
            self._waiting.append((me, mine))
        mine.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.take_from(threading.get_ident())

    def take_from(self, thread: int | None) -> None:
        """End the turn of a thread, by its `ident`, if it has it: one that hangs must not keep others waiting."""
        with self._guard:
            if self._owner != thread:
                return
            self._owner, given = self._waiting.popleft() if self._waiting else (None, None)
        if given is not None:
            given.set()


CPU_TURNS = Turns()
