"""Regular expressions for numbers in a range, and for multiples: canonical, and of bounded length."""

from __future__ import annotations

import math
from fractions import Fraction

_DIGIT = "[0-9]"
_MAX_ENDINGS = 256
_MAX_FREE_DIGITS = 40


def numbers_between(low: Fraction, high: Fraction, *, places: int) -> str | None:
    """Return the pattern of decimal numbers in [low, high] with at most `places` decimal places; None if empty.

    For each number of decimal places, these are the integers of a scaled range, with a decimal point inserted.
    """
    parts = []
    for count in range(places + 1):
        scale = 10**count
        parts += _signed(math.ceil(low * scale), math.floor(high * scale), count)
    return _either(parts) if parts else None


def integers_between(low: int, high: int) -> str | None:
    """Return the pattern of the integers in [low, high]; None if empty."""
    return numbers_between(Fraction(low), Fraction(high), places=0)


def multiples_of(step: Fraction, *, places: int) -> str | None:
    """Return the pattern of the multiples of `step` with at most `places` decimal places; None if it would be too long.

    Whether a number is a multiple of a product of twos and fives depends on its last digits only. Other digits are not
    bounded usefully, and leading zeros are possible: the pattern is to be intersected with that of a range.
    """
    parts: list[str] = []
    for count in range(places + 1):
        factor = (step * 10**count).numerator  # of the number without its decimal point
        length = next((length for length in range(20) if 10**length % factor == 0), None)
        if length is None or 10**length // factor > _MAX_ENDINGS:
            return None
        multiples = range(0, 10**length, factor)
        long = [str(multiple).zfill(length) if length else "" for multiple in multiples]
        short = [str(multiple).zfill(count + 1) for multiple in multiples]
        parts += [_with_point(digits, count) for digits in short if len(digits) < length]
        parts.append(_ending_with(long, count))
    return f"-?{_either(parts)}"


def _ending_with(endings: list[str], places: int) -> str:
    """Return the pattern of any digits, then one of the endings, which have the same length, with a point."""
    length = len(endings[0])
    if length <= places:
        free = _DIGIT + f"{{1,{_MAX_FREE_DIGITS}}}"
        return free + (rf"\.{_DIGIT * (places - length)}{_either(endings)}" if places else "")
    return _DIGIT + f"{{0,{_MAX_FREE_DIGITS}}}" + _either([_with_point(ending, places) for ending in endings])


def _with_point(digits: str, places: int) -> str:
    return rf"{digits[:-places]}\.{digits[-places:]}" if places else digits


def _signed(low: int, high: int, places: int) -> list[str]:
    """Return patterns for integers in [low, high], with a point before the last `places` digits; zero has no sign."""
    parts = _natural(max(low, 0), high, places) if high >= 0 else []
    if low < 0:
        parts += [f"-{part}" for part in _natural(max(-high, 1), -low, places)]
    return parts


def _natural(low: int, high: int, places: int) -> list[str]:
    """Like `_signed`, for 0 <= low: one pattern per sequence of digit classes."""
    parts = []
    shortest = places + 1  # at least one digit before the point, possibly zero
    for length in range(max(shortest, len(str(low))), max(shortest, len(str(high))) + 1):
        first = max(low, 0 if length == shortest else 10 ** (length - 1))
        last = min(high, 10**length - 1)
        if first <= last:
            sequences = _digit_classes(str(first).zfill(length), str(last).zfill(length))
            parts += [_pattern(classes, places) for classes in sequences]
    return parts


def _digit_classes(low: str, high: str) -> list[list[str]]:
    """Return sequences of digit classes that together match the numbers in [low, high], all of the same length."""
    if not low:
        return [[]]
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    if first == last:
        return [[low[0], *classes] for classes in _digit_classes(low[1:], high[1:])]
    sequences = []
    if low[1:].strip("0"):  # with this first digit, not all remaining digits are in the range
        sequences += [[low[0], *classes] for classes in _digit_classes(low[1:], "9" * rest)]
        first += 1
    if high[1:].strip("9"):
        sequences += [[high[0], *classes] for classes in _digit_classes("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        sequences.append([_DIGIT if last - first == 9 else f"[{first}-{last}]", *[_DIGIT] * rest])
    return sequences


def _pattern(classes: list[str], places: int) -> str:
    point = len(classes) - places
    return _concatenated(classes[:point]) + (r"\." + _concatenated(classes[point:]) if places else "")


def _concatenated(classes: list[str]) -> str:
    """Concatenate the classes, with a count for the unconstrained digits at the end."""
    trailing = 0
    while trailing < len(classes) and classes[-1 - trailing] == _DIGIT:
        trailing += 1
    fixed = "".join(classes[: len(classes) - trailing])
    return fixed + (f"{_DIGIT}{{{trailing}}}" if trailing > 1 else _DIGIT * trailing)


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"
