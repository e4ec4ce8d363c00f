"""Turns on the cores: one at a time, in the order of asking."""

from __future__ import annotations

import threading

import pytest

from dashinfer_vlm_core.kernels.turns import Turns
from tests.waiting import until


def test_turns_are_given_in_the_order_of_asking():
    turns, order, threads = Turns(), [], []

    def work(name):
        with turns:
            order.append(name)

    with turns:
        for name in ("a", "b", "c"):
            threads.append(threading.Thread(target=work, args=(name,)))
            threads[-1].start()
            until(lambda: len(turns._waiting) == len(threads))
    with turns:  # asked for last
        order.append("again")
    for thread in threads:
        thread.join()
    assert order == ["a", "b", "c", "again"]


def test_only_one_is_inside():
    turns, inside, most = Turns(), [], []

    def work():
        for _ in range(200):
            with turns:
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(most) == 800


def test_a_turn_that_fails_is_given_on():
    turns = Turns()
    with pytest.raises(ZeroDivisionError), turns:
        raise ZeroDivisionError
    with turns:
        pass


def test_a_turn_can_be_taken_from_whoever_hangs_and_does_not_end_that_of_the_next():
    turns, inside, go, later = Turns(), threading.Event(), threading.Event(), threading.Event()

    def hang():
        with turns:
            inside.set()
            go.wait(60)

    def work():
        with turns:
            later.wait(60)

    hanging, next_one = threading.Thread(target=hang), threading.Thread(target=work)
    hanging.start()
    assert inside.wait(10)
    next_one.start()
    until(lambda: turns._waiting)
    turns.take_from(next_one.ident)  # it has none
    assert turns._owner == hanging.ident
    turns.take_from(hanging.ident)
    until(lambda: turns._owner == next_one.ident)
    go.set()
    hanging.join()
    assert turns._owner == next_one.ident
    later.set()
    next_one.join()
    assert turns._owner is None
