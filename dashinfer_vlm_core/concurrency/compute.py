"""Where models compute: on a CPU in one thread of the process, which the vision encoder and the decoder share.

Each of them uses all cores. If both ran at once, each would wait at every barrier for threads that the other keeps from
running. OpenMP also keeps a thread pool per computing thread: with more pool threads than cores, GNU's implementation
puts a pool to sleep at each barrier, a hundred times per decode step, which makes the step a fifth slower.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from ..errors import EngineError

T = TypeVar("T")

THREAD_NAME = "dashinfer-vlm-compute"

PAUSE_INTERVAL = 0.02
"""Seconds of long work between two pauses; the gaps of other models' streams grow by that."""


class Executor:
    """Runs computations in parts, between which other work can run: a decode step, some blocks of the vision
    encoder, the loading of one layer. This one runs them in the calling thread: a GPU has its own queues.

    Attributes:
        is_shared: whether other parts of models run on the same thread, so that long work has to end for waiting tasks.
    """

    is_shared: bool = False

    @property
    def waiting(self) -> int:
        """The number of tasks that have not started."""
        return 0

    def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, or raise what it raises."""
        return work()

    def defer(self, work: Callable[[], None]) -> None:
        """Run `work`, which must not raise, when `run_deferred` is called, or at the end of the current task."""
        work()

    def run_deferred(self) -> None:
        """Run deferred work: the caller is about to compute without the interpreter."""

    def pause(self) -> None:
        """Run the tasks that wait now, unless the last pause was a moment ago; called by long work, such as loading a
        model, in the thread that runs it."""

    def abandon(self, thread: int | None) -> None:
        """Abandon work that hangs, so that other work continues.

        Args:
            thread: `ident` of the thread that submitted it; nothing happens if other work is running.
        """


class _ComputeTask(NamedTuple):
    """Work that a caller waits for; `thread` is the `ident` of the caller's thread."""

    work: Callable[[], Any]
    thread: int
    result: Future[Any]


class ComputeExecutor(Executor):
    """Runs work on its own thread, in the order of submission.

    Torch's thread-local settings, such as the number of threads, keep the values they had when that thread started.
    """

    is_shared: bool = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Restore the initial state in the child of a fork, where the thread does not exist."""
        self._changed = threading.Condition()
        self._waiting: deque[_ComputeTask] = deque()
        self._current: _ComputeTask | None = None
        self._thread: threading.Thread | None = None
        self._deferred: list[Callable[[], None]] = []
        self._paused: list[_ComputeTask] = []
        self._resumed = 0.0  # when the current task began, or continued after a pause
        self._set_up: Callable[[], None] = _do_nothing

    def set_up(self, work: Callable[[], None]) -> None:
        """Run `work`, which must not raise, on the compute thread, and at the start of each one that replaces it."""
        with self._changed:
            self._set_up = work
            has_thread = self._thread is not None
        if has_thread:
            self.run(work)

    @property
    def waiting(self) -> int:
        """The number of tasks that have not started, or that are paused."""
        return len(self._waiting) + len(self._paused)

    def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, or raise what it raises. Work submitted by the compute thread runs at once."""
        if threading.current_thread() is self._thread:
            return work()
        task = _ComputeTask(work, threading.get_ident(), Future())
        with self._changed:
            if self._thread is None:
                self._start_thread()
            self._waiting.append(task)
            self._changed.notify_all()
        try:
            result: T = task.result.result()
            return result
        finally:
            del task  # as in _run_task

    def defer(self, work: Callable[[], None]) -> None:
        """See `Executor`; in another thread than the compute thread, the work runs at once.

        Threads that deferred work wakes do not compete with the compute thread for the interpreter.
        """
        if threading.current_thread() is self._thread:
            self._deferred.append(work)
        else:
            work()

    def run_deferred(self) -> None:
        if threading.current_thread() is self._thread:
            self._run_deferred()

    def pause(self) -> None:
        """See `Executor`; in another thread than the compute thread, nothing happens.

        Raises:
            EngineError: a task that ran in the meantime hangs, and was abandoned together with this work.
        """
        if threading.current_thread() is not self._thread or time.monotonic() < self._resumed + PAUSE_INTERVAL:
            return
        with self._changed:
            paused = self._current
            assert paused is not None
            self._paused.append(paused)
            number = len(self._waiting)  # not those that arrive now: paused work must continue, too
        for _ in range(number):
            if task := self._next_waiting():
                _run_task(task, self.run_deferred)
                del task  # as in `_work`
        with self._changed:
            if threading.current_thread() is not self._thread:
                raise _abandoned()
            self._current = self._paused.pop()
            self._resumed = time.monotonic()

    def abandon(self, thread: int | None) -> None:
        """See `Executor`; other work continues on a new thread. Work that is paused for the one that hangs fails."""
        with self._changed:
            if self._current and self._current.thread == thread:
                for paused in self._paused:
                    paused.result.set_exception(_abandoned())
                self._start_thread()
                self._changed.notify_all()
                self._run_deferred()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
        thread.start()  # it waits for the lock that is held here
        self._current = None
        self._paused = []
        self._thread = thread

    def _work(self) -> None:
        self._set_up()
        while task := self._next():
            _run_task(task, self.run_deferred)
            del task  # do not keep the result alive

    def _run_deferred(self) -> None:
        deferred = self._deferred
        self._deferred = []
        for work in deferred:
            work()

    def _next(self) -> _ComputeTask | None:
        me = threading.current_thread()
        with self._changed:
            if self._thread is me:
                self._current = None
            self._changed.wait_for(lambda: self._waiting or self._thread is not me)
            return self._take() if self._thread is me else None

    def _next_waiting(self) -> _ComputeTask | None:
        with self._changed:
            return self._take() if threading.current_thread() is self._thread and self._waiting else None

    def _take(self) -> _ComputeTask:
        self._resumed = time.monotonic()
        self._current = task = self._waiting.popleft()
        return task


def _do_nothing() -> None:
    pass


def _abandoned() -> EngineError:
    return EngineError("A step of another model does not finish, and this work with it. Try again.")


def _run_task(task: _ComputeTask, finish: Callable[[], None]) -> None:
    try:
        try:
            result = task.work()
        finally:
            finish()
        task.result.set_result(result)
    except BaseException as error:  # noqa: BLE001 - the waiting caller raises it
        if not task.result.done():  # it was not abandoned
            task.result.set_exception(error)
    finally:
        del task  # the error's traceback holds this frame


CPU_EXECUTOR = ComputeExecutor()
os.register_at_fork(after_in_child=CPU_EXECUTOR.reset)

_INLINE_EXECUTOR = Executor()


def executor_for(device: str) -> Executor:
    """Return the executor for models on a device, such as `cpu` or `cuda:0`."""
    return CPU_EXECUTOR if device.partition(":")[0] == "cpu" else _INLINE_EXECUTOR
