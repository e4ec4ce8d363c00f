"""Schemas of numbers to rules: regular expressions for ranges and multiples, canonical and of bounded length."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from . import bounds
from .rules import Rules, regex
from .schema_shape import SchemaError

_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_LARGEST: int = 10**bounds.MAX_INTEGER_DIGITS - 1
_MAX_ENDINGS = 256
_FREE_DIGITS = "[0-9]{1,40}"


def any_number(places: int) -> str:
    """Return the pattern of numbers without bounds, with at most `places` decimal places."""
    digits = f"[1-9][0-9]{{0,{bounds.INTEGER_DIGITS - 1}}}"
    return rf"-?(0|{digits})(\.[0-9]{{1,{places}}})?" if places else f"(0|-?{digits})"


def number_rule(rules: Rules, schema: Mapping[str, Any], path: str, *, places: int) -> str | None:
    """Add the rule of a schema of numbers with at most `places` decimal places; None if it allows none.

    Raises:
        SchemaError: a bound or `multipleOf` is not supported.
    """
    if "multipleOf" in schema:
        return _multiples(rules, schema, path, places)
    if not schema.keys() & {*_LOWER, *_UPPER}:
        return rules.terminal(regex(any_number(places)))
    pattern = numbers_between(*_range(schema, path), places=places)
    return None if pattern is None else rules.terminal(regex(pattern))


def _multiples(rules: Rules, schema: Mapping[str, Any], path: str, places: int) -> str | None:
    step = Fraction(str(schema["multipleOf"]))
    if not places:
        step = Fraction(step.numerator)  # of p/q, the integers among the multiples are those of p
    low, high = _range(schema, path)
    first = math.ceil(low / step)
    last = math.floor(high / step)
    if first > last:
        return None
    exact = next((count for count in range(places + 1) if (step * 10**count).denominator == 1), None)
    if exact is not None and last - first < bounds.MAX_LISTED_MULTIPLES:
        return rules.one_of(_decimal(step * count, exact) for count in range(first, last + 1))
    places = places if exact is None else exact
    multiples = multiples_of(step, places=places)
    inside = numbers_between(low, high, places=places)
    if multiples and inside:
        return rules.terminal(f"{regex(multiples)} & {regex(inside)}")
    if step.denominator == 1 and step <= bounds.MAX_MULTIPLE_OF:
        limits = {"minimum": math.ceil(low), "maximum": math.floor(high), "multipleOf": int(step)}
        return rules.pattern(f"%json {json.dumps({'type': 'integer', **limits})}", f"{path}.multipleOf")
    raise SchemaError(
        f"{path}.multipleOf",
        f"is supported for integers up to {bounds.MAX_MULTIPLE_OF}, for products of powers of 2 and 5 such as 0.01, and"
        f" for at most {bounds.MAX_LISTED_MULTIPLES} multiples between `minimum` and `maximum`",
    )


def _decimal(value: Fraction, places: int) -> str:
    digits = str(abs(int(value * 10**places))).zfill(places + 1)
    text = _with_point(digits, places)
    text = text.rstrip("0").removesuffix(".") if places else text
    return f"-{text}" if value < 0 else text


def _range(schema: Mapping[str, Any], path: str) -> tuple[Fraction, Fraction]:
    lows = [_limit(schema[key], key, path) for key in _LOWER if key in schema]
    highs = [_limit(schema[key], key, path) for key in _UPPER if key in schema]
    highest = Fraction(10**bounds.INTEGER_DIGITS - 1)
    low = max(lows, default=min([-highest, *(10 * high for high in highs)]))
    high = min(highs, default=max(highest, 10 * low))
    return low, high


def _limit(bound: float, key: str, path: str) -> Fraction:
    """Return the first number in the range that a bound limits.

    A bound is the decimal number as written. An exclusive bound excludes the number in double precision, because
    parsers round: the range starts at the next double. Bounds that no number here can reach are lowered.
    """
    is_lower = key in _LOWER
    if abs(bound) > _LARGEST:
        if is_lower == (bound > 0):
            raise SchemaError(f"{path}.{key}", f"requires numbers with more than {bounds.MAX_INTEGER_DIGITS} digits")
        return Fraction(_LARGEST if bound > 0 else -_LARGEST)
    if key in ("minimum", "maximum"):
        return Fraction(str(bound))
    return Fraction(repr(math.nextafter(float(bound), math.inf if is_lower else -math.inf)))


def numbers_between(low: Fraction, high: Fraction, *, places: int) -> str | None:
    """Return the pattern of decimal numbers in [low, high] with at most `places` decimal places; None if empty.

    For each number of decimal places, these are the integers of a scaled range, with a decimal point inserted.
    """
    parts: list[str] = []
    for count in range(places + 1):
        first = math.ceil(low * 10**count)
        last = math.floor(high * 10**count)
        parts += _naturals(max(first, 0), last, count)
        parts += [f"-{part}" for part in _naturals(max(-last, 1), -first, count)]
    return _either(parts) if parts else None


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
        endings = [str(multiple).zfill(length)[:length].rjust(count, "#") for multiple in multiples]
        parts += [_with_point(str(multiple).zfill(count + 1), count) for multiple in multiples]
        parts.append(_FREE_DIGITS + _either([_with_point(ending, count) for ending in endings]))
    return f"-?{_either(parts)}".replace(".", r"\.").replace("#", "[0-9]")


def _naturals(low: int, high: int, places: int) -> list[str]:
    """Return patterns for the integers in [low, high], 0 <= low, with a point before the last `places` digits."""
    parts: list[str] = []
    shortest = places + 1  # at least one digit before the point, possibly zero
    for length in range(max(shortest, len(str(low))), max(shortest, len(str(high))) + 1):
        first = max(low, 0 if length == shortest else 10 ** (length - 1))
        last = min(high, 10**length - 1)
        if first <= last:
            parts += _same_length(*(_with_point(str(end).zfill(length), places) for end in (first, last)))
    return parts


def _same_length(low: str, high: str) -> list[str]:
    """Return patterns that together match the numbers in [low, high], which have as many digits, and the same point."""
    if not low:
        return [""]
    if low[0] == high[0]:
        return [re.escape(low[0]) + rest for rest in _same_length(low[1:], high[1:])]
    parts: list[str] = []
    first = int(low[0])
    last = int(high[0])
    if low[1:].strip("0."):  # with this first digit, not all remaining digits are in the range
        parts += [low[0] + rest for rest in _same_length(low[1:], re.sub("[0-9]", "9", low[1:]))]
        first += 1
    if high[1:].strip("9."):
        parts += [high[0] + rest for rest in _same_length(re.sub("[0-9]", "0", high[1:]), high[1:])]
        last -= 1
    if first <= last:
        free = re.sub("[0-9]+", lambda digits: f"[0-9]{{{len(digits[0])}}}", low[1:].replace(".", r"\."))
        parts.append(f"[{first}-{last}]{free}")
    return parts


def _with_point(digits: str, places: int) -> str:
    return f"{digits[:-places]}.{digits[-places:]}" if places else digits


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"
