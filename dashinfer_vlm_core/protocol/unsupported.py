"""Reject known fields that are not supported."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import UnsupportedParameter
from .validation_errors import show


def reject_fields(data: object, rejected: Mapping[str, tuple[tuple[object, ...], str]]) -> None:
    """Raise UnsupportedParameter for a rejected field, unless it is null or its value has no effect.

    Args:
        data: the request as JSON.
        rejected: for each field, the values that have no effect, and the next step for other values.
    """
    given = data if isinstance(data, dict) else {}
    for name, (neutral, next_step) in rejected.items():
        value = given.get(name)
        if value is not None and not any(type(value) is type(other) and value == other for other in neutral):
            raise UnsupportedParameter(f"`{name}` is not supported, got {show(value)}. {next_step}", param=name)
