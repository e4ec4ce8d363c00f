"""Text of users in a rendered prompt: marked, so that no part of it is parsed as a special token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import InvalidParameter

MARKS = tuple(chr(code) for code in range(0xE000, 0xE100))
"""Private-use characters. One that the messages do not contain is inserted into their text."""


class TextGuard:
    """Copies values so that their strings contain no special tokens and form none with adjacent text.

    Args:
        special_tokens: the special tokens.
        tags: text that templates search for in messages. It stays as it is, unless it could be a part of a special
            token.
    """

    def __init__(self, special_tokens: Collection[str], tags: Iterable[str]) -> None:
        self._first_chars = sorted({token[0] for token in special_tokens})
        self._tags = [tag for tag in tags if tag and not any(_can_overlap(tag, token) for token in special_tokens)]

    def copy(self, value: Any, mark: str) -> Any:
        """Copy strings, also in mappings and sequences, with `mark`, which they do not contain, after each character
        that begins a special token."""
        return map_strings(value, lambda text: self._guarded(text, mark))

    def _guarded(self, text: str, mark: str) -> str:
        marked = self._marked(text, mark)
        for tag in self._tags if mark in marked else ():
            marked = marked.replace(self._marked(tag, mark), tag)
        return marked

    def _marked(self, text: str, mark: str) -> str:
        for char in self._first_chars:
            text = text.replace(char, char + mark)
        return text


def _can_overlap(one: str, other: str) -> bool:
    """Return whether a text can contain both so that they have characters in common."""
    return any(
        first[start:].startswith(second) or second.startswith(first[start:])
        for first, second in ((one, other), (other, one))
        for start in range(len(first))
    )


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


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Copy a value with each of its strings changed, also those in mappings, their keys included, and sequences."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [map_strings(item, change) for item in value]
    return value


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
