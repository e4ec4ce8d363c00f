"""Text of users in a rendered prompt: marked, so that no part of it is parsed as a special token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import InvalidParameter

MARKS = tuple(chr(code) for code in range(0xE000, 0xE100))
"""Private-use characters. One that the messages do not contain is inserted into their text."""


def guard_text(value: Any, first_chars: Sequence[str], mark: str) -> Any:
    """Copy `value` so that its strings contain no special tokens and form none with adjacent text.

    Args:
        value: strings, also in mappings and sequences.
        first_chars: the first characters of special tokens; `mark` is inserted after each.
        mark: a character that the strings do not contain.
    """
    if isinstance(value, str):
        for char in first_chars:
            value = value.replace(char, char + mark)
        return value
    if isinstance(value, Mapping):
        return {guard_text(key, first_chars, mark): guard_text(item, first_chars, mark) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [guard_text(item, first_chars, mark) for item in value]
    return value


def strings_in(value: Any) -> Iterator[str]:
    """Yield the strings of a value, also those in mappings, their keys included, and sequences."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from strings_in(item)


def unused_mark(texts: Any) -> str:
    """Return one of `MARKS` that the strings of `texts` do not contain.

    Raises:
        InvalidParameter: they contain all of them.
    """
    text = "".join(strings_in(texts))
    for mark in MARKS:
        if mark not in text:
            return mark
    raise InvalidParameter(
        "The messages use every private-use character from U+E000 to U+E0FF. Remove at least one.", param="messages"
    )
