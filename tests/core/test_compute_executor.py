"""The compute thread: one task at a time, in order of submission."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import threading
import weakref

import pytest

from dashinfer_vlm_core.concurrency import compute
from dashinfer_vlm_core.concurrency.compute import CPU_EXECUTOR, ComputeExecutor
from dashinfer_vlm_core.errors import EngineError
from tests.waiting import HANG, until


@pytest.fixture
def executor():
    return ComputeExecutor()


@pytest.fixture
def submit():
    """Return a function that submits work from a new thread; the threads are joined at the end."""
    threads = []

    def submit(executor, work):
        threads.append(threading.Thread(target=executor.run, args=(work,)))
        threads[-1].start()
        return threads[-1]

    yield submit
    for thread in threads:
        thread.join(timeout=HANG)
        assert not thread.is_alive()


def active_thread(executor):
    """Return the `ident` of the thread whose work is running; None if none is."""
    current = executor._current
    return current and current.thread


def test_tasks_run_in_order_of_submission(executor, submit):
    order, begun, go = [], threading.Event(), threading.Event()
    submit(executor, lambda: (begun.set(), go.wait(timeout=HANG)))
    assert begun.wait(timeout=HANG)
    for count, name in enumerate("abc", start=1):
        submit(executor, lambda name=name: order.append(name))
        until(lambda count=count: executor.waiting == count)
    go.set()
    executor.run(lambda: order.append("again"))  # submitted last
    assert order == ["a", "b", "c", "again"]


@pytest.fixture
def always_pauses(monkeypatch):
    monkeypatch.setattr(compute, "PAUSE_INTERVAL", 0.0)


@pytest.mark.usefixtures("always_pauses")
def test_paused_task_lets_those_that_wait_run(executor, submit):
    order, begun, go = [], threading.Event(), threading.Event()

    def long():
        begun.set()
        go.wait(timeout=HANG)
        order.append("begin")
        executor.pause()
        order.append(("end", executor.waiting, active_thread(executor) == thread.ident))

    def waiting():
        order.append((executor.waiting, active_thread(executor) == thread.ident))

    thread = submit(executor, long)
    assert begun.wait(timeout=HANG)
    submit(executor, waiting)
    until(lambda: executor.waiting == 1)
    executor.pause()  # in another thread: without an effect
    assert not order
    go.set()
    thread.join(timeout=HANG)
    assert order == ["begin", (1, False), ("end", 0, True)], "the paused task waits, so that others end soon"


def test_task_does_not_pause_again_at_once(executor, submit, monkeypatch):
    monkeypatch.setattr(compute, "PAUSE_INTERVAL", float("inf"))
    order, begun, go = [], threading.Event(), threading.Event()
    thread = submit(executor, lambda: (begun.set(), go.wait(timeout=HANG), executor.pause(), order.append("end")))
    assert begun.wait(timeout=HANG)
    submit(executor, lambda: order.append("other"))
    until(lambda: executor.waiting == 1)
    go.set()
    thread.join(timeout=HANG)
    executor.run(lambda: None)
    assert order == ["end", "other"]


@pytest.mark.usefixtures("always_pauses")
def test_paused_task_fails_if_the_one_that_it_waits_for_hangs(executor):
    begun, go, hangs, end = (threading.Event() for _ in range(4))
    errors = []

    def load():
        try:
            executor.run(lambda: (begun.set(), go.wait(timeout=HANG), executor.pause()))
        except EngineError as error:
            errors.append(error)

    loader = threading.Thread(target=load)
    loader.start()
    assert begun.wait(timeout=HANG)
    step = threading.Thread(target=executor.run, args=(lambda: (hangs.set(), end.wait(timeout=HANG)),))
    step.start()
    until(lambda: executor.waiting == 1)
    go.set()
    assert hangs.wait(timeout=HANG)
    executor.abandon(step.ident)
    loader.join(timeout=HANG)
    assert len(errors) == 1
    assert executor.waiting == 0
    assert executor.run(lambda: 7) == 7
    end.set()
    step.join(timeout=HANG)
    assert executor.run(lambda: executor.waiting) == 0


@pytest.mark.usefixtures("always_pauses")
def test_errors_of_other_tasks_do_not_reach_a_paused_one(executor, submit):
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()
    submit(executor, lambda: (begun.set(), go.wait(timeout=HANG), executor.pause(), ended.set()))
    assert begun.wait(timeout=HANG)
    errors = []

    def fail():
        raise ValueError("wrong")

    def run():
        try:
            executor.run(fail)
        except ValueError as error:
            errors.append(str(error))

    other = threading.Thread(target=run)
    other.start()
    until(lambda: executor.waiting == 1)
    go.set()
    other.join(timeout=HANG)
    assert (errors, ended.wait(timeout=HANG)) == (["wrong"], True)


def test_tasks_run_on_one_thread_one_at_a_time(executor, submit):
    inside, seen = [], []

    def work():
        inside.append(1)
        seen.append((len(inside), threading.get_ident()))
        inside.pop()

    threads = [submit(executor, work) for _ in range(50)]
    for thread in threads:
        thread.join()
    assert seen == [(1, executor.run(threading.get_ident))] * 50


def test_result_or_exception_is_passed_to_caller(executor):
    assert executor.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        executor.run(lambda: 1 // 0)
    with pytest.raises(SystemExit):
        executor.run(exit_)
    assert executor.run(lambda: 8) == 8


def exit_():
    raise SystemExit


def test_nested_run(executor):
    assert executor.run(lambda: executor.run(lambda: 7)) == 7


def test_results_and_errors_are_not_retained(executor):
    class Large:
        """An object that supports weak references."""

    def fail(large):
        raise ValueError(large)

    kept = weakref.ref(executor.run(Large))
    large = Large()
    failed = weakref.ref(large)
    gc.disable()  # a reference cycle would keep them until it is collected
    try:
        with contextlib.suppress(ValueError):
            executor.run(functools.partial(fail, large))
        del large
        until(lambda: kept() is None)
        until(lambda: failed() is None)
    finally:
        gc.enable()


def test_abandoned_task_does_not_affect_the_next(executor, submit):
    inside, go, later = threading.Event(), threading.Event(), threading.Event()
    first = executor.run(threading.current_thread)
    hanging = submit(executor, lambda: (inside.set(), go.wait(timeout=HANG)))
    assert inside.wait(timeout=HANG)
    next_one = submit(executor, lambda: later.wait(timeout=HANG))
    until(lambda: executor.waiting)
    executor.abandon(next_one.ident)  # no task of this thread is active
    assert active_thread(executor) == hanging.ident
    executor.abandon(hanging.ident)
    until(lambda: active_thread(executor) == next_one.ident)
    go.set()
    hanging.join()
    first.join(timeout=HANG)
    assert not first.is_alive()
    assert active_thread(executor) == next_one.ident
    later.set()
    next_one.join()
    assert executor.run(lambda: 7) == 7


def test_deferred_work_runs_when_the_thread_computes_or_ends_its_task(executor):
    order = []

    def task():
        executor.defer(lambda: order.append("first"))
        order.append("prepares")
        executor.run_deferred()
        order.append("computes")
        executor.defer(lambda: order.append("second"))
        order.append("ends")

    executor.run(task)
    assert order == ["prepares", "first", "computes", "ends", "second"]


def test_deferred_work_of_a_failed_task_runs_before_its_caller_continues(executor):
    done = []

    def task():
        executor.defer(lambda: done.append(1))
        raise ValueError

    with contextlib.suppress(ValueError):
        executor.run(task)
    assert done == [1]


def test_other_threads_neither_defer_nor_run_deferred_work(executor):
    done = []

    def task():
        executor.defer(lambda: done.append("deferred"))

        def elsewhere():
            executor.defer(lambda: done.append("at once"))
            executor.run_deferred()

        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        return list(done)

    assert executor.run(task) == ["at once"]
    assert done == ["at once", "deferred"]


def test_deferred_work_of_an_abandoned_task_runs(executor, submit):
    inside, go, done = threading.Event(), threading.Event(), []

    def hang():
        executor.defer(lambda: done.append(1))
        inside.set()
        go.wait(timeout=HANG)

    hanging = submit(executor, hang)
    assert inside.wait(timeout=HANG)
    executor.abandon(hanging.ident)
    assert done == [1]
    go.set()
    hanging.join()
    assert done == [1]


@pytest.mark.filterwarnings(
    "ignore:.*fork:DeprecationWarning"
)  # of later Python versions; forking is the point of this test
def test_forked_child_has_its_own_thread_and_empty_queue(submit):
    begun, go = threading.Event(), threading.Event()
    submit(CPU_EXECUTOR, lambda: (begun.set(), go.wait(timeout=HANG)))
    assert begun.wait(timeout=HANG)
    submit(CPU_EXECUTOR, lambda: 1)
    until(lambda: CPU_EXECUTOR.waiting)
    child = os.fork()
    if not child:  # pragma: no cover - only the exit code is visible
        signal.alarm(int(HANG))
        try:
            code = CPU_EXECUTOR.run(lambda: 8)
            os._exit(code + CPU_EXECUTOR.waiting)
        finally:
            os._exit(1)
    go.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
