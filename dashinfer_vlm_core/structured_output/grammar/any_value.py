"""Rules of values without a schema, and of lists: of bounded length and depth."""

from __future__ import annotations

from . import bounds
from .number_schema import any_number
from .rules import Rules, literal, regex

CHARACTER = r'([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])'
COMMA, COLON = regex(", ?"), regex(": ?")


def any_object(rules: Rules) -> str:
    """Return the rule of any JSON object, nested to a bounded depth."""
    return _any_value_and_object(rules)[1]


def any_value(rules: Rules) -> str:
    """Return the rule of any JSON value, nested to a bounded depth."""
    return _any_value_and_object(rules)[0]


def string_body(min_length: int = 0, max_length: int = bounds.STRING_CHARACTERS) -> str:
    return regex(f'"{CHARACTER}{{{min_length},{max_length}}}"')


def list_of(item: str, min_count: int, max_count: int) -> str:
    """Return the body of a comma-separated list of `item` of bounded length."""
    if max_count == 0:
        return ""
    many = f"{item} {more_of(item, max(min_count - 1, 0), max_count - 1)}".rstrip()
    return many if min_count else f"({many})?"


def more_of(item: str, min_count: int, max_count: int) -> str:
    """Like `list_of`, after another item."""
    return f"({COMMA} {item}){{{min_count},{max_count}}}" if max_count else ""


def enclosed(left: str, body: str, right: str) -> str:
    return " ".join(filter(None, (literal(left), body, literal(right))))


def _any_value_and_object(rules: Rules) -> tuple[str, str]:
    scalars = ["true", "false", "null"]
    value = rules.either([*map(literal, scalars), string_body(), regex(any_number())])
    objects = ""
    for _ in range(bounds.ANY_DEPTH):
        key = rules.terminal(string_body(max_length=bounds.KEY_CHARACTERS))
        arrays = rules.add(enclosed("[", list_of(value, 0, bounds.ANY_ITEMS), "]"))
        pair = rules.add(f"{key} {COLON} {value}")
        objects = rules.add(enclosed("{", list_of(pair, 0, bounds.ANY_ITEMS), "}"))
        value = rules.either([value, arrays, objects])
    return value, objects
