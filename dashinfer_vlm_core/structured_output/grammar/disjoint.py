"""Whether schemas are known to have no value in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

from .schema_shape import comparable, types_of
from .steps import Steps

_Discriminators: TypeAlias = Mapping[tuple[str, str], frozenset[Hashable]]
"""What a schema allows: types, values, and values of required properties, each if it enumerates them."""


def are_disjoint(schemas: Sequence[Mapping[str, Any]], steps: Steps) -> bool:
    """Return whether types, values or the values of required properties prove that no value satisfies two schemas.

    A discriminator divides the schemas into groups that have one of its values in common, and each group is divided by
    the others: for the usual unions, the time is linear in the size of the schemas.

    Raises:
        TooComplex: the proof needs too many steps.
    """
    waiting = [[_discriminators(schema, steps) for schema in schemas]]
    while waiting:
        group = waiting.pop()
        if len(group) > 1:
            divided = _divide(group, steps)
            if divided is None:
                return False
            waiting += divided
    return True


def _divide(group: list[_Discriminators], steps: Steps) -> list[list[_Discriminators]] | None:
    """Divide schemas by a discriminator that all of them have; None if no discriminator separates them."""
    steps.count(sum(map(len, group)))
    for name in sorted(set(group[0]).intersection(*group)):
        steps.count(sum(len(schema[name]) for schema in group))
        parts: dict[Hashable, list[_Discriminators]] = defaultdict(list)
        for schema in group:
            for value in schema[name]:
                parts[value].append(schema)
        if all(len(part) < len(group) for part in parts.values()):
            return list({tuple(map(id, part)): part for part in parts.values()}.values())
    return None


def _discriminators(schema: Mapping[str, Any], steps: Steps) -> _Discriminators:
    types = frozenset("number" if name == "integer" else name for name in types_of(schema))
    found: dict[tuple[str, str], frozenset[Hashable] | None] = {("type", ""): types or None}
    found["value", ""] = _enumerated(schema, steps)
    if types == {"object"}:
        properties = schema.get("properties", {})
        for name in schema.get("required", ()):
            found["property", name] = _enumerated(properties.get(name), steps)
    return {name: values for name, values in found.items() if values is not None}


def _enumerated(schema: object, steps: Steps) -> frozenset[Hashable] | None:
    """Return the values of `enum` or `const`; None if the schema has neither."""
    if not isinstance(schema, Mapping) or not {"enum", "const"} & schema.keys():
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    steps.count_values(values)
    return frozenset(map(comparable, values))
