"""Schemas of numbers to rules: bounds and multiples."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from . import bounds
from .numbers import integers_between, multiples_of, numbers_between
from .rules import Rules, literal, regex
from .schema_shape import SchemaError

_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_LARGEST: int = 10**bounds.MAX_INTEGER_DIGITS - 1


def any_integer() -> str:
    """Return the pattern of integers without bounds."""
    return rf"-?(0|[1-9][0-9]{{0,{bounds.INTEGER_DIGITS - 1}}})"


def any_number() -> str:
    """Return the pattern of numbers without bounds."""
    return rf"{any_integer()}(\.[0-9]{{1,{bounds.DECIMAL_PLACES}}})?"


def integer_rule(rules: Rules, schema: Mapping[str, Any], path: str) -> str | None:
    """Add the rule of a schema of integers; None if it allows none.

    Raises:
        SchemaError: a bound or `multipleOf` is not supported.
    """
    low, high = _range(schema, path)
    if "multipleOf" in schema:
        step = Fraction(str(schema["multipleOf"])).numerator  # of p/q, the integers among the multiples are those of p
        return _multiples(rules, Fraction(step), low, high, path)
    pattern = integers_between(math.ceil(low), math.floor(high))
    return None if pattern is None else rules.terminal(regex(pattern))


def number_rule(rules: Rules, schema: Mapping[str, Any], path: str) -> str | None:
    """Like `integer_rule`, for numbers."""
    if "multipleOf" in schema:
        return _multiples(rules, Fraction(str(schema["multipleOf"])), *_range(schema, path), path)
    if not schema.keys() & _BOUNDS:
        return rules.terminal(regex(any_number()))
    pattern = numbers_between(*_range(schema, path), places=bounds.DECIMAL_PLACES)
    return None if pattern is None else rules.terminal(regex(pattern))


def _multiples(rules: Rules, step: Fraction, low: Fraction, high: Fraction, path: str) -> str | None:
    first, last = math.ceil(low / step), math.floor(high / step)
    if first > last:
        return None
    places = next((count for count in range(bounds.DECIMAL_PLACES + 1) if (step * 10**count).denominator == 1), None)
    if places is not None and last - first < bounds.MAX_LISTED_MULTIPLES:
        texts = (_decimal(step * count, places) for count in range(first, last + 1))
        return rules.terminal(" | ".join(map(literal, texts)))
    places = bounds.DECIMAL_PLACES if places is None else places
    multiples, inside = multiples_of(step, places=places), numbers_between(low, high, places=places)
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
    """Return a number with at most this many decimal places as text."""
    scaled = str(abs(int(value * 10**places))).zfill(places + 1)
    text = f"{scaled[:-places]}.{scaled[-places:]}".rstrip("0").removesuffix(".") if places else scaled
    return f"-{text}" if value < 0 else text


def _range(schema: Mapping[str, Any], path: str) -> tuple[Fraction, Fraction]:
    """Return the minimum and the maximum; a missing bound is far from the other one.

    A bound is the decimal number as written. An exclusive bound excludes the number in double precision, because
    parsers round: the range starts at the next double. Bounds that no number here can reach are lowered.
    """
    limits = {key: _limit(_reachable(schema[key], key, path), key) for key in _BOUNDS & schema.keys()}
    lows = [limits[key] for key in ("minimum", "exclusiveMinimum") if key in limits]
    highs = [limits[key] for key in ("maximum", "exclusiveMaximum") if key in limits]
    default = Fraction(10**bounds.INTEGER_DIGITS - 1)
    low = max(lows) if lows else min([-default, *(10 * high for high in highs)])
    high = min(highs) if highs else max(default, 10 * low)
    return low, high


def _reachable(bound: float, key: str, path: str) -> float:
    """Return a bound of at most `MAX_INTEGER_DIGITS` digits, which allows no more than the given one."""
    if abs(bound) <= _LARGEST:
        return bound
    if (key in {"minimum", "exclusiveMinimum"}) == (bound > 0):
        raise SchemaError(f"{path}.{key}", f"requires numbers with more than {bounds.MAX_INTEGER_DIGITS} digits")
    return _LARGEST if bound > 0 else -_LARGEST


def _limit(bound: float, key: str) -> Fraction:
    """Return the first number in the range that a bound limits."""
    if key == "exclusiveMinimum":
        return Fraction(repr(math.nextafter(float(bound), math.inf)))
    if key == "exclusiveMaximum":
        return Fraction(repr(math.nextafter(float(bound), -math.inf)))
    return Fraction(str(bound))
