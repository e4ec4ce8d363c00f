"""Whose turn it is to compute on this process's cores.

Tower and decoder each use all cores from a thread of their own. Both at once would wait at every barrier for threads
that the other keeps from running.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class Turns:
    """A lock that is given in the order in which it was asked for: who asks again at once does not get it again."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False


CPU_TURNS = Turns()
