"""The thread that computes: one piece of work at a time, in the order of asking."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import threading
import weakref

import pytest

from dashinfer_vlm_core.concurrency.compute import CPU_EXECUTOR, ComputeExecutor
from tests.waiting import HANG, until


@pytest.fixture
def turns():
    return ComputeExecutor()


@pytest.fixture
def ask():
    """Have a thread of its own ask for work; it is returned, and joined in the end."""
    threads = []

    def ask(turns, work):
        threads.append(threading.Thread(target=turns.run, args=(work,)))
        threads[-1].start()
        return threads[-1]

    yield ask
    for thread in threads:
        thread.join(timeout=HANG)
        assert not thread.is_alive()


def test_turns_are_taken_in_the_order_of_asking(turns, ask):
    order, begun, go = [], threading.Event(), threading.Event()
    ask(turns, lambda: (begun.set(), go.wait(timeout=HANG)))
    assert begun.wait(timeout=HANG)
    for count, name in enumerate("abc", start=1):
        ask(turns, lambda name=name: order.append(name))
        until(lambda count=count: turns.waiting == count)
    go.set()
    turns.run(lambda: order.append("again"))  # asked for last
    assert order == ["a", "b", "c", "again"]


def test_all_is_done_on_one_thread_and_one_at_a_time(turns, ask):
    inside, seen = [], []

    def work():
        inside.append(1)
        seen.append((len(inside), threading.get_ident()))
        inside.pop()

    threads = [ask(turns, work) for _ in range(50)]
    for thread in threads:
        thread.join()
    assert seen == [(1, turns.run(threading.get_ident))] * 50


def test_whoever_asks_gets_what_it_returns_or_raises(turns):
    assert turns.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        turns.run(lambda: 1 // 0)
    with pytest.raises(SystemExit):
        turns.run(exit_)
    assert turns.run(lambda: 8) == 8


def exit_():
    raise SystemExit


def test_work_may_ask_for_work(turns):
    assert turns.run(lambda: turns.run(lambda: 7)) == 7


def test_neither_a_result_nor_an_error_is_held(turns):
    class Large:
        """Something that a reference can be weak to."""

    def fail(large):
        raise ValueError(large)

    kept = weakref.ref(turns.run(Large))
    large = Large()
    failed = weakref.ref(large)
    gc.disable()  # a cycle would hold them until it is collected
    try:
        with contextlib.suppress(ValueError):
            turns.run(functools.partial(fail, large))
        del large
        until(lambda: kept() is None)
        until(lambda: failed() is None)
    finally:
        gc.enable()


def test_what_hangs_is_given_up_and_does_not_end_the_next_turn(turns, ask):
    inside, go, later = threading.Event(), threading.Event(), threading.Event()
    first = turns.run(threading.current_thread)
    hanging = ask(turns, lambda: (inside.set(), go.wait(timeout=HANG)))
    assert inside.wait(timeout=HANG)
    next_one = ask(turns, lambda: later.wait(timeout=HANG))
    until(lambda: turns.waiting)
    turns.take_from(next_one.ident)  # it has none
    assert turns.served == hanging.ident
    turns.take_from(hanging.ident)
    until(lambda: turns.served == next_one.ident)
    go.set()
    hanging.join()
    first.join(timeout=HANG)
    assert not first.is_alive()
    assert turns.served == next_one.ident
    later.set()
    next_one.join()
    assert turns.run(lambda: 7) == 7


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of later Pythons, which is what is tried here
def test_a_child_has_a_thread_of_its_own_and_not_what_waits_in_the_parent(ask):
    begun, go = threading.Event(), threading.Event()
    ask(CPU_EXECUTOR, lambda: (begun.set(), go.wait(timeout=HANG)))
    assert begun.wait(timeout=HANG)
    ask(CPU_EXECUTOR, lambda: 1)
    until(lambda: CPU_EXECUTOR.waiting)
    child = os.fork()
    if not child:  # pragma: no cover - what is seen is the exit code
        signal.alarm(int(HANG))
        try:
            code = CPU_EXECUTOR.run(lambda: 8)
            os._exit(code + CPU_EXECUTOR.waiting)
        finally:
            os._exit(1)
    go.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
