"""Schemas of objects to rules."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from . import bounds
from .any_value import COLON, COMMA, enclosed, more_of
from .part_compiler import PartCompiler
from .property_names import PropertyNames, read_property_names
from .rules import Rules, literal
from .schema_shape import SchemaError

Schema: TypeAlias = Mapping[str, Any] | bool
_Part: TypeAlias = tuple[str, bool]
"""The rule of a part of an object, and whether it may be missing."""


def object_rule(compiler: PartCompiler, schema: Mapping[str, Any], level: int, path: str) -> str | None:
    """Add the rule of a schema of objects; None if it allows none.

    Named properties are in order, others follow. Other properties are allowed if `additionalProperties` is set, or if
    the schema names none.
    """
    names = read_property_names(compiler, schema, path)
    required = frozenset(schema.get("required", ()))
    more: Schema = schema.get("additionalProperties", "properties" not in schema)
    named = _named_properties(schema, names, more)
    if named and names.has_pattern:
        raise SchemaError(f"{path}.propertyNames", "cannot be guaranteed next to `properties`: remove it")
    # What can be wrong here is found before the properties are compiled: without the fault, they are compiled again.
    min_count, max_count = _numbers_of_others(compiler, schema, named, path)
    is_closed = more is False or max_count <= 0 or names.listed is not None
    key = None if is_closed else names.key_rule(compiler.rules, named, path)
    parts = _named_parts(compiler, named, required, level, path)
    if parts is None:
        return None
    value = None if key is None else compiler.compile(more, level, f"{path}.additionalProperties")
    if value is not None:
        pair = compiler.rules.add(f"{key} {COLON} {value}")
        others = f"{pair} {more_of(pair, max(min_count - 1, 0), max_count - 1)}".rstrip()
        parts.append((compiler.rules.add(others), not min_count))
    elif min_count > 1 or (min_count and required):
        return None
    elif min_count:  # one property, whichever
        return compiler.rules.add(enclosed("{", _sequence(compiler.rules, parts)[0], "}")) if parts else None
    return compiler.rules.add(enclosed("{", _optional_sequence(compiler.rules, parts), "}"))


def _named_properties(schema: Mapping[str, Any], names: PropertyNames, more: Schema) -> dict[str, Schema]:
    """Return the schema of each property that is named; False if it must be missing."""
    properties = dict(schema.get("properties", {}))
    for name in schema.get("required", ()):
        properties.setdefault(name, schema.get("additionalProperties", True))
    for name in names.listed or ():
        properties.setdefault(name, more)
    return {name: part if names.allow(name) else False for name, part in properties.items()}


def _named_parts(
    compiler: PartCompiler, named: Mapping[str, Schema], required: frozenset[str], level: int, path: str
) -> list[_Part] | None:
    """Return the parts of the named properties; None if a required one has no value."""
    parts = []
    for name, part in named.items():
        value = compiler.compile(part, level, f"{path}.properties.{name}")
        if value is None and name in required:
            return None
        if value is not None:
            pair = f"{literal(json.dumps(name, ensure_ascii=False))} {COLON} {value}"
            parts.append((compiler.rules.add(pair), name not in required))
    return parts


def _numbers_of_others(
    compiler: PartCompiler, schema: Mapping[str, Any], named: Mapping[str, Schema], path: str
) -> tuple[int, int]:
    """Return the minimum and maximum number of properties that the schema does not name."""
    min_count = max(schema.get("minProperties", 0) - len(set(schema.get("required", ()))), 0)
    num_allowed = sum(part is not False for part in named.values())
    max_count = min(schema.get("maxProperties", math.inf) - num_allowed, max(min_count, bounds.EXTRA_PROPERTIES))
    if max_count < 0:
        compiler.tolerate(SchemaError(f"{path}.maxProperties", "must be at least the number of properties"))
    return min_count, int(max_count)


def _optional_sequence(rules: Rules, parts: list[_Part]) -> str:
    if not parts:
        return ""
    sequence, may_be_empty = _sequence(rules, parts)
    return f"({sequence})?" if may_be_empty else sequence


def _sequence(rules: Rules, parts: list[_Part]) -> _Part:
    """Return the rule of parts in order, separated by commas; optional parts may be missing, but not all parts.

    Parts are split in halves recursively, so that the depth of the rules is logarithmic in their number.

    Returns:
        The rule, and whether all parts are optional.
    """
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    left, left_empty = _sequence(rules, parts[:middle])
    right, right_empty = _sequence(rules, parts[middle:])
    alternatives = [f"{left} {COMMA} {right}", *([left] if right_empty else []), *([right] if left_empty else [])]
    rule = rules.either(alternatives) if len(alternatives) > 1 else rules.add(alternatives[0])
    return rule, left_empty and right_empty
