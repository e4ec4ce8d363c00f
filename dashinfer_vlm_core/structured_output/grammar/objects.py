"""The names of an object's properties, and the rule of properties in order."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from . import bounds
from .rules import Rules, literal
from .schema_shape import Schema
from .values import COMMA, string_body, string_rule

LENGTHS = frozenset({"minLength", "maxLength"})

Part: TypeAlias = tuple[str, bool]
"""The rule of a part of an object, and whether it may be missing."""


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
