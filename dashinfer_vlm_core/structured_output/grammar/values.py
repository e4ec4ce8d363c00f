"""Rules of strings, lists and properties, and of values without a schema: of bounded length and depth."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from . import bounds
from .formats import FORMATS
from .numbers import any_number
from .rules import Rules, literal, regex
from .schema_shape import TYPES, Schema, SchemaError

COMMA = regex(", ?")
COLON = regex(": ?")

_CHARACTER = r'([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])'
_FORMAT_CHARACTERS = 256
_PARTS = re.compile(r"\\.|.", re.DOTALL)
_ESCAPED = {"/": r"\/", "\n": r"\n", "\r": r"\r"}

LENGTHS = frozenset({"minLength", "maxLength"})

Part: TypeAlias = tuple[str, bool]
"""The rule of a part of an object, and whether it may be missing."""


def any_value(rules: Rules, types: Collection[str] = TYPES) -> str:
    """Return the rule of any JSON value of these types, nested to a bounded depth."""
    bodies = {
        "string": string_body(),
        "number": regex(any_number(bounds.DECIMAL_PLACES)),
        "boolean": f"{literal('true')} | {literal('false')}",
        "null": literal("null"),
    }
    key = rules.terminal(string_body(max_length=bounds.KEY_CHARACTERS))
    value = rules.either(list(bodies.values()))
    bodies["integer"] = regex(any_number(0))
    for _ in range(bounds.ANY_DEPTH):
        pair = rules.add(f"{key} {COLON} {value}")
        bodies["array"] = rules.add(f'"[" {list_of(value, 0, bounds.ANY_ITEMS)} "]"')
        bodies["object"] = rules.add(f'"{{" {list_of(pair, 0, bounds.ANY_ITEMS)} "}}"')
        value = rules.either([value, bodies["array"], bodies["object"]])
    return value if set(types) == set(TYPES) else rules.either([bodies[name] for name in bodies if name in types])


def string_body(min_length: int = 0, max_length: int = bounds.STRING_CHARACTERS) -> str:
    return regex(f'"{_CHARACTER}{{{min_length},{max_length}}}"')


def string_rule(rules: Rules, schema: Mapping[str, Any], path: str) -> str | None:
    """Add the rule of a schema of strings; None if it allows none.

    Raises:
        SchemaError: `pattern` is not a supported regular expression, or the request has too many of them.
    """
    text, min_length, max_length = string_limits(schema)
    if min_length > max_length:
        return None
    if not text:
        return rules.terminal(string_body(min_length, max_length))
    bounded = {"type": "string", "minLength": min_length, "maxLength": max_length, **text}
    return rules.pattern(f"%json {json.dumps(bounded)}", f"{path}.{next(iter(text))}")


def string_limits(schema: Mapping[str, Any]) -> tuple[dict[str, str], int, int]:
    """Return `pattern` and `format` of a schema of strings, if it has them, and their minimum and maximum length."""
    text = {key: schema[key] for key in ("pattern", "format") if key in schema}
    if text.get("format") not in FORMATS:
        text.pop("format", None)
    default = _FORMAT_CHARACTERS if "format" in text else bounds.STRING_CHARACTERS
    min_length = schema.get("minLength", 0)
    max_length = min(schema.get("maxLength", max(min_length, default)), bounds.MAX_STRING_CHARACTERS)
    return text, min_length, max_length


def matching_text(rules: Rules, pattern: str) -> str:
    """Add the rule of the texts that match a regular expression as a whole, of bounded length.

    `^` at its beginning and `$` at its end have no effect.

    Args:
        rules: the rules to add to.
        pattern: the expression, in the syntax of Rust's `regex` without anchors and look-around.

    Returns:
        The name of the rule.

    Raises:
        SchemaError: the expression is not supported.
    """
    parts = _PARTS.findall(pattern.removeprefix("^"))
    if parts[-1:] == ["\\"]:
        raise SchemaError("", "ends with an incomplete escape: write two backslashes for one")
    if parts[-1:] == ["$"]:
        parts.pop()
    bounded = rf"(.|\n){{0,{bounds.STRING_CHARACTERS}}}"
    return rules.pattern(f"{regex(escaped(''.join(parts)))} & {regex(bounded)}", "", is_terminal=True)


def escaped(pattern: str) -> str:
    """Escape a regular expression for use in a rule."""
    return "".join(_ESCAPED.get(part, part) for part in _PARTS.findall(pattern))


def list_of(item: str, min_count: int, max_count: int) -> str:
    """Return the body of a comma-separated list of `item` of bounded length."""
    if max_count == 0:
        return ""
    many = f"{item} {more_of(item, max(min_count - 1, 0), max_count - 1)}"
    return many if min_count else f"({many})?"


def more_of(item: str, min_count: int, max_count: int) -> str:
    """Like `list_of`, after another item."""
    return f"({COMMA} {item}){{{min_count},{max_count}}}" if max_count else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PropertyNames:
    """The names that `propertyNames` allows.

    Attributes:
        listed: all of them, in order; None if `text` describes them.
        text: keywords of a schema of strings.
    """

    listed: Mapping[str, None] | None = None
    text: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_pattern(self) -> bool:
        """Whether names have a pattern or a format, which is checked only while they are generated."""
        return not self.text.keys() <= LENGTHS

    def allow(self, name: str) -> bool:
        if self.listed is not None:
            return name in self.listed
        return bool(self.text.get("minLength", 0) <= len(name) <= self.text.get("maxLength", math.inf))

    def key_rule(self, rules: Rules, named: Collection[str], path: str) -> str | None:
        """Add the rule of the names other than `named`; None if there are none."""
        min_length = self.text.get("minLength", 0)
        max_length = min(self.text.get("maxLength", math.inf), max(bounds.KEY_CHARACTERS, min_length))
        if self.listed is not None or min_length > max_length:
            return None
        if self.has_pattern:
            return string_rule(rules, {**self.text, "maxLength": max_length}, path)
        keys = string_body(min_length, int(max_length))
        excluded = " | ".join(literal(json.dumps(name, ensure_ascii=False)) for name in named)
        return rules.terminal(f"{keys} & ~({excluded})" if excluded else keys)


def named_properties(schema: Mapping[str, Any], names: PropertyNames, more: Schema) -> dict[str, Schema]:
    """Return the schema of each property that is named; False if it must be missing."""
    properties = dict(schema.get("properties", {}))
    for name in schema.get("required", ()):
        properties.setdefault(name, schema.get("additionalProperties", True))
    for name in names.listed or ():
        properties.setdefault(name, more)
    return {name: part if names.allow(name) else False for name, part in properties.items()}


def sequence(rules: Rules, parts: list[Part]) -> Part:
    """Return the rule of parts in order, separated by commas; optional parts may be missing, but not all parts.

    Parts are split in halves recursively, so that the depth of the rules is logarithmic in their number.

    Returns:
        The rule, and whether all parts are optional.
    """
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    left, left_empty = sequence(rules, parts[:middle])
    right, right_empty = sequence(rules, parts[middle:])
    alternatives = [f"{left} {COMMA} {right}", *([left] if right_empty else []), *([right] if left_empty else [])]
    return rules.add(" | ".join(alternatives)), left_empty and right_empty
