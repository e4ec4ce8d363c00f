"""Numbers in a range, as regular expressions over their digits: canonical, and of bounded length."""

from __future__ import annotations

import math
from fractions import Fraction

_DIGIT = "[0-9]"


def numbers_between(low: Fraction, high: Fraction, *, places: int) -> str | None:
    """Decimal numbers of [low, high] with at most `places` digits after the point; None if there are none.

    Every count of places is a range of integers, with a point set among their digits.
    """
    parts = []
    for count in range(places + 1):
        scale = 10**count
        parts += _signed(math.ceil(low * scale), math.floor(high * scale), count)
    return _either(parts) if parts else None


def integers_between(low: int, high: int) -> str | None:
    """Integers of [low, high]; None if there are none."""
    return numbers_between(Fraction(low), Fraction(high), places=0)


def _signed(low: int, high: int, places: int) -> list[str]:
    """Patterns of the integers of [low, high], with a point before the last `places` digits; zero has no sign."""
    parts = _natural(max(low, 0), high, places) if high >= 0 else []
    if low < 0:
        parts += [f"-{part}" for part in _natural(max(-high, 1), -low, places)]
    return parts


def _natural(low: int, high: int, places: int) -> list[str]:
    """As `_signed`, for 0 <= low: one pattern for each run of digits that vary independently."""
    parts = []
    shortest = places + 1  # one digit at least stands before the point, be it a zero
    for length in range(max(shortest, len(str(low))), max(shortest, len(str(high))) + 1):
        first = max(low, 0 if length == shortest else 10 ** (length - 1))
        last = min(high, 10**length - 1)
        if first <= last:
            runs = _runs(str(first).zfill(length), str(last).zfill(length))
            parts += [_pattern(run, places) for run in runs]
    return parts


def _runs(low: str, high: str) -> list[list[str]]:
    """Digit classes of the numbers of [low, high]; both have the same length, and so has each run."""
    if not low:
        return [[]]
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    if first == last:
        return [[low[0], *run] for run in _runs(low[1:], high[1:])]
    runs = []
    if low[1:].strip("0"):  # the first digit leaves some of the numbers behind it out
        runs += [[low[0], *run] for run in _runs(low[1:], "9" * rest)]
        first += 1
    if high[1:].strip("9"):
        runs += [[high[0], *run] for run in _runs("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        runs.append([_DIGIT if last - first == 9 else f"[{first}-{last}]", *[_DIGIT] * rest])
    return runs


def _pattern(run: list[str], places: int) -> str:
    point = len(run) - places
    return _squeezed(run[:point]) + (r"\." + _squeezed(run[point:]) if places else "")


def _squeezed(classes: list[str]) -> str:
    """The classes one after the other, with the free digits at the end counted rather than repeated."""
    free = 0
    while free < len(classes) and classes[-1 - free] == _DIGIT:
        free += 1
    fixed = "".join(classes[: len(classes) - free])
    return fixed + (f"{_DIGIT}{{{free}}}" if free > 1 else _DIGIT * free)


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"
