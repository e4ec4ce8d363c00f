"""Tables of cases in one test: every row runs, and those that fail are named."""

from __future__ import annotations

import inspect

import pytest

from tests.cases import cases


def test_every_row_runs_and_failures_are_listed():
    seen = []

    @cases("first", [1, 2])
    @cases(("second", "third"), [("a", 0), ("b", 2), ("c", 0)])
    def check(fixture, first, second, third):
        seen.append((fixture, first, second))
        assert first != third, "equal"

    assert list(inspect.signature(check).parameters) == ["fixture"]
    with pytest.raises(AssertionError, match=r"(?s)1 of 2 .*'first': 2.* 1 of 3 .*'second': 'b'.*equal"):
        check(fixture="given")
    assert seen == [("given", first, second) for first in (1, 2) for second in "abc"]


@pytest.mark.parametrize(("wrong", "error"), [(None, pytest.skip.Exception), ("a", AssertionError)])
def test_skipped_row_hides_no_failure(wrong, error):
    @cases("value", ["a", "b", "c"])
    def check(value):
        assert value != wrong
        if value == "b":
            pytest.skip("not here")
        seen.append(value)

    seen = []
    with pytest.raises(error):
        check()
    assert seen[-1] == "c"


def test_row_that_does_not_raise_is_a_failure():
    @cases("value", ["1", "x"])
    def check(value):
        with pytest.raises(ValueError, match="invalid"):
            int(value)

    with pytest.raises(AssertionError, match="1 of 2 cases failed"):
        check()
