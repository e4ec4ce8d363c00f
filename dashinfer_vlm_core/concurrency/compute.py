"""Where models compute: on a CPU one thread of this process, which vision encoder and decoder share.

Each of them uses all cores. Both at once would wait at every barrier for threads that the other keeps from running. And
OpenMP keeps a team of threads for each thread that computes: where there are more of them than cores, GNU's puts a team
to sleep at each barrier, a hundred times in a decode step, which then takes a fifth longer.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")

THREAD = "dashinfer-vlm-compute"


class Executor(Protocol):
    """Runs what computes, in parts that others can wait for: a step of the decoder, a quarter of a second of the vision
    encoder, a layer that is read."""

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns, or raises."""


class _ComputeTask(NamedTuple):
    """Work that somebody waits for; `thread` is theirs, by its `ident`."""

    work: Callable[[], Any]
    thread: int
    result: Future[Any]


class ComputeExecutor:
    """Does what is asked for on a thread of its own, in the order of asking.

    What torch keeps by thread, such as the number of its threads, is what it was when that thread began.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As new, for a child of a process that had forked: threads do not outlive that."""
        self._changed = threading.Condition()
        self._waiting: deque[_ComputeTask] = deque()
        self._taken: _ComputeTask | None = None
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """How many wait for their work to begin."""
        return len(self._waiting)

    @property
    def served(self) -> int | None:
        """The thread, by its `ident`, whose work is done now; None while nothing is done."""
        taken = self._taken
        return taken.thread if taken else None

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns, or raises. Work of that thread itself is done at once."""
        if threading.current_thread() is self._thread:
            return work()
        turn = _ComputeTask(work, threading.get_ident(), Future())
        with self._changed:
            if self._thread is None:
                self._begin()
            self._waiting.append(turn)
            self._changed.notify_all()
        try:
            result: T = turn.result.result()
            return result
        finally:
            del turn  # as in _take

    def take_from(self, thread: int | None) -> None:
        """Give up on what is done for a thread, by its `ident`, and hangs: it must not keep others waiting."""
        with self._changed:
            if self._taken and self._taken.thread == thread:
                self._begin()
                self._changed.notify_all()

    def _begin(self) -> None:
        thread = threading.Thread(target=self._work, name=THREAD, daemon=True)
        thread.start()  # it waits for the lock that is held here
        self._taken, self._thread = None, thread

    def _work(self) -> None:
        while turn := self._next():
            _take(turn)
            del turn  # what it has computed is others' to keep

    def _next(self) -> _ComputeTask | None:
        """The next one, when there is one; None if another thread has taken over meanwhile."""
        me = threading.current_thread()
        with self._changed:
            if self._thread is me:
                self._taken = None
            self._changed.wait_for(lambda: self._waiting or self._thread is not me)
            if self._thread is not me:
                return None
            self._taken = self._waiting.popleft()
            return self._taken


def _take(turn: _ComputeTask) -> None:
    try:
        turn.result.set_result(turn.work())
    except BaseException as error:  # noqa: BLE001 - whoever waits has it
        turn.result.set_exception(error)
    finally:
        del turn  # the error's traceback holds this frame


class _InlineExecutor:
    """Computes where it is called: a GPU has queues of its own."""

    def run(self, work: Callable[[], T]) -> T:
        return work()


CPU_EXECUTOR = ComputeExecutor()
os.register_at_fork(after_in_child=CPU_EXECUTOR.reset)

_DIRECT = _InlineExecutor()


def executor_for(device: str) -> Executor:
    """What runs the work of models on a device, such as `cpu` or `cuda:0`."""
    return CPU_EXECUTOR if device.partition(":")[0] == "cpu" else _DIRECT
