"""A wait that fails says what was seen."""

from __future__ import annotations

import threading

import pytest

from tests.waiting import until


def message(condition):
    with pytest.raises(AssertionError) as caught:
        until(condition, seconds=0)
    return str(caught.value)


def test_failed_wait_shows_what_was_compared():
    found, expected, empty = [1], 2, {}
    shown = message(lambda: len(found) == expected or (not found and empty["key"] > 0))
    assert shown.splitlines() == [
        "it did not happen within 0 s: len(found) == expected or (not found and empty['key'] > 0)",
        "  len(found) = 1",
        "  expected = 2",
        "  found = [1]",
        "  empty['key'] = KeyError('key')",
    ]


def test_failed_wait_shows_default_arguments():
    assert message(lambda enough=5: enough <= 3).endswith("\n  enough = 5")


def test_failed_wait_for_a_method_names_it():
    assert "is_set" in message(threading.Event().is_set)
