"""Read long strings of a request in short steps.

A method of a string holds the global interpreter lock until it returns. On a data: URL of 200 MB, that stops all other
threads for 0.1 s or more. Here, a call processes at most a slice of the string, and other threads can run between two
calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

SLICE = 256 * 1024
"""Number of characters that one call processes, in about a millisecond."""

_BLOCK = 4 * 1024 * 1024
"""Minimum number of characters by which a copy is extended, in about a millisecond."""


def split_into_slices(text: str, start: int = 0, *, slice_chars: int = SLICE) -> Iterator[str]:
    """Yield the text from index `start` on in slices of at most `slice_chars` characters."""
    for position in range(start, len(text), slice_chars):
        yield text[position : position + slice_chars]


def find_character(text: str, character: str, start: int = 0, *, slice_chars: int = SLICE) -> int:
    """Return the first index of `character` from index `start` on, or -1."""
    for position in range(start, len(text), slice_chars):
        index = text.find(character, position, position + slice_chars)
        if index >= 0:
            return index
    return -1


def count_occurrences(text: str, pattern: str, start: int = 0, *, slice_chars: int = SLICE) -> int:
    """Return how often `pattern` occurs from index `start` on. The pattern cannot overlap itself, as "aa" can."""
    overlap = len(pattern) - 1  # a pattern belongs to the slice in which it starts
    return sum(
        text.count(pattern, position, position + slice_chars + overlap)
        for position in range(start, len(text), slice_chars)
    )


def end_without_spaces(text: str, end: int, *, slice_chars: int = SLICE) -> int:
    """Return the length of `text[:end].rstrip()`."""
    while end > 0:
        start = max(0, end - slice_chars)
        if piece := text[start:end].rstrip():
            return start + len(piece)
        end = start
    return 0


def copy_text(prefix: str, text: str, start: int, end: int, *, block_chars: int = _BLOCK) -> str:
    """Return `prefix + text[start:end]`.

    CPython extends a string in place if nothing else refers to it, so no call writes the whole copy.
    """
    copy = prefix
    for position in range(start, end, block_chars):
        copy += text[position : min(position + block_chars, end)]
    return copy


def digest_text(text: str, *, slice_chars: int = SLICE) -> bytes:
    """Hash the text, which may contain lone surrogates, to 32 bytes."""
    digest = hashlib.sha256()
    for piece in split_into_slices(text, slice_chars=slice_chars):
        digest.update(piece.encode("utf-8", "surrogatepass"))
    return digest.digest()
