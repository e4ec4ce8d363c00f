"""Whether two schemas are known to have no value in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .schema_shape import types_of


def are_disjoint(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Return whether types or the values of a required property prove that no value satisfies both schemas."""
    kinds = set(types_of(one)), set(types_of(two))
    if all(kinds) and not kinds[0] & kinds[1] and not {"integer", "number"} <= kinds[0] | kinds[1]:
        return True
    if kinds == ({"object"}, {"object"}):
        named = set(one.get("required", [])) & set(two.get("required", []))
        return any(_have_disjoint_values(_property(one, name), _property(two, name)) for name in named)
    return _have_disjoint_values(one, two)


def _property(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = schema.get("properties", {}).get(name)
    return part if isinstance(part, Mapping) else {}


def _have_disjoint_values(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Whether both enumerate their values and have none in common."""
    lists = [
        part["enum"] if "enum" in part else [part["const"]] for part in (one, two) if {"const", "enum"} & part.keys()
    ]
    return len(lists) == 2 and not any(value in lists[1] for value in lists[0])
