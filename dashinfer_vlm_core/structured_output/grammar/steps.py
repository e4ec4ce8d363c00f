"""The work that schemas of one request may cost, counted in steps: the same on each machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .bounds import MAX_STEPS, STEP_CHARACTERS


class TooComplex(Exception):
    """The schemas of a request need too many steps, or its grammar has too many or too deep rules."""


class Steps:
    """Counts the steps of one request.

    Args:
        check: called with each count; raises an error to end the work.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._count = 0

    def count(self, number: int = 1) -> None:
        """Count what takes microseconds: a part of a schema, a value that is compared, a piece of a text.

        Raises:
            TooComplex: the request has no steps left.
        """
        self._check()
        self._count += number
        if self._count > MAX_STEPS:
            raise TooComplex

    def count_text(self, text: str) -> None:
        self.count(1 + len(text) // STEP_CHARACTERS)

    def count_keywords(self, schema: Mapping[str, Any]) -> None:
        """Count the keywords of a schema with the elements of their values, but not what these contain."""
        self.count(len(schema) + sum(len(value) for value in schema.values() if isinstance(value, (list, Mapping))))

    def count_values(self, value: object) -> None:
        """Count all values in parsed JSON, before they are compared or written."""
        waiting = [value]
        while waiting:
            part = waiting.pop()
            if isinstance(part, Mapping):
                waiting.extend(part.keys())
                waiting.extend(part.values())
            elif isinstance(part, list):
                waiting.extend(part)
            self.count(1 + len(part) // STEP_CHARACTERS if isinstance(part, str) else 1)
