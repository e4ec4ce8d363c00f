"""Rules of values without a schema, and of lists: of bounded length and depth."""

from __future__ import annotations

from collections.abc import Collection

from . import bounds
from .number_schema import any_integer, any_number
from .rules import Rules, literal, regex
from .schema_shape import TYPES

CHARACTER = r'([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])'
COMMA, COLON = regex(", ?"), regex(": ?")


def any_object(rules: Rules) -> str:
    """Return the rule of any JSON object, nested to a bounded depth."""
    return any_value(rules, ("object",))


def any_value(rules: Rules, types: Collection[str] = TYPES) -> str:
    """Return the rule of any JSON value of these types, nested to a bounded depth."""
    scalars = {
        "string": string_body(),
        "number": regex(any_number()),
        "integer": regex(any_integer()),
        "boolean": f"{literal('true')} | {literal('false')}",
        "null": literal("null"),
    }
    value = rules.either([body for name, body in scalars.items() if name != "integer"])
    arrays = objects = ""
    for _ in range(bounds.ANY_DEPTH):
        key = rules.terminal(string_body(max_length=bounds.KEY_CHARACTERS))
        arrays = rules.add(enclosed("[", list_of(value, 0, bounds.ANY_ITEMS), "]"))
        pair = rules.add(f"{key} {COLON} {value}")
        objects = rules.add(enclosed("{", list_of(pair, 0, bounds.ANY_ITEMS), "}"))
        value = rules.either([value, arrays, objects])
    if set(types) == set(TYPES):
        return value
    return rules.either(
        [rule for name, rule in {**scalars, "array": arrays, "object": objects}.items() if name in types]
    )


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
