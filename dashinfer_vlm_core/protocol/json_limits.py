"""Limits on JSON text, checked before it is parsed: an empty array is three bytes of text, but 64 bytes of memory."""

from __future__ import annotations

import itertools
import re

MAX_VALUES = 250_000
"""Maximum number of values and keys in a text."""

MAX_DEPTH = 64
"""Maximum nesting depth of the values in a text."""

MAX_CHARACTERS = 8 * 1024 * 1024
"""Maximum length of text that one call parses; this takes less than 50 ms."""

TOO_MANY_VALUES = f"has more than {MAX_VALUES} values. Send fewer."
TOO_DEEP = f"is nested too deeply: at most {MAX_DEPTH} levels are allowed."


class JsonLimitExceeded(ValueError):
    """A text exceeds a limit; the argument says which one, as the predicate of a sentence."""


def count_values(text: str) -> int:
    """Return the number of values and keys in a JSON text.

    It is estimated by punctuation: each value but the first follows a comma, a colon or a bracket.

    Raises:
        JsonLimitExceeded: it has more than `MAX_VALUES`, or is nested deeper than `MAX_DEPTH`.
    """
    punctuation = _count_punctuation(text)
    if punctuation < MAX_DEPTH:
        return punctuation
    bare = text.replace(r"\\", "").replace(r"\"", "")
    if bare.count('"') > 2 * MAX_VALUES:
        raise JsonLimitExceeded(TOO_MANY_VALUES)
    outside = "".join(bare.split('"')[::2])
    values = _count_punctuation(outside)
    if values > MAX_VALUES:
        raise JsonLimitExceeded(TOO_MANY_VALUES)
    if _depth(outside) > MAX_DEPTH:
        raise JsonLimitExceeded(TOO_DEEP)
    return values


def _count_punctuation(text: str) -> int:
    return sum(map(text.count, ",:[{"))


def _depth(outside: str) -> int:
    steps = (1 if bracket in "[{" else -1 for bracket in re.findall(r"[\[\]{}]", outside))
    return max(itertools.accumulate(steps), default=0)
