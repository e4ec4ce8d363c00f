"""Tables of cases for one test."""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Test = Callable[..., None]


def cases(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test with every row of a table, as `pytest.mark.parametrize` does, but as one test.

    Each test takes milliseconds in every process. Fixtures are the same for all rows; the error lists those that fail.

    Args:
        names: the argument, or the arguments, that have the values of a row.
        rows: a value for each argument; the value itself if there is one argument.
    """
    single = isinstance(names, str)
    table = [{names: row} if isinstance(names, str) else dict(zip(names, row, strict=True)) for row in rows]
    arguments = {names} if single else set(names)

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        fixtures = [each for name, each in signature.parameters.items() if name not in arguments]

        @functools.wraps(test)
        def run(**given: Any) -> None:
            ends = [(row, error) for row in table if (error := _error_of(test, {**given, **row}))]
            failures = [(row, error) for row, error in ends if not isinstance(error, pytest.skip.Exception)]
            if failures:
                lines = [f"{reprlib.repr(row)}: {error}" for row, error in failures]
                failed = f"{len(failures)} of {len(table)} cases failed:\n" + "\n".join(lines)
                raise AssertionError(failed) from failures[0][1]
            for _, skip in ends:
                raise skip

        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined] # pytest reads it
        return run

    return decorate


def _error_of(test: Test, arguments: dict[str, Any]) -> BaseException | None:
    try:
        test(**arguments)
    except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:  # noqa: BLE001 - the caller raises it
        return error
    return None
