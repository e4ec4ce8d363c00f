"""What two schemas have in common: one schema of the values that satisfy both, or proof that there are none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

from .rules import Steps
from .schema_shape import ANNOTATIONS, Schema, SchemaError, check_values, comparable, normalized, types_of

_Discriminators: TypeAlias = Mapping[tuple[str, str], frozenset[Hashable]]
"""What a schema allows: types, values, and values of required properties, each if it enumerates them."""


class SchemaMerger:
    """Merges schemas of one request, and counts the steps."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._merges: dict[str, Callable[[Any, Any, str], Any]] = {
            "type": _common_types,
            "properties": self._common_properties,
            "required": lambda one, two, _: list(dict.fromkeys([*one, *two])),
            "items": self.merge,
            "additionalProperties": self.merge,
            "enum": self._common_values,
            **dict.fromkeys(
                ("minimum", "exclusiveMinimum", "minLength", "minItems"), lambda one, two, _: max(one, two)
            ),
            **dict.fromkeys(
                ("maximum", "exclusiveMaximum", "maxLength", "maxItems"), lambda one, two, _: min(one, two)
            ),
        }

    def merge(self, one: Schema, two: Schema, path: str) -> Schema:
        """Return a schema of the values that satisfy both schemas.

        Raises:
            SchemaError: the schemas cannot be merged.
            TooComplex: the request has no steps left.
        """
        if isinstance(one, bool):
            return two if one else False
        if isinstance(two, bool):
            return one if two else False
        for part in (one, two):
            self._steps.count_keywords(part)
            check_values(part, path)
        one = normalized(one)
        two = normalized(two)
        for closed, other in ((one, two), (two, one)):
            extra = other.get("properties", {}).keys() - closed.get("properties", {}).keys()
            if extra and closed.get("additionalProperties", True) is not True:
                raise SchemaError(
                    f"{path}.additionalProperties",
                    "forbids properties that another part of the schema defines: define them in both",
                )
        shared = {key: self._merge_keyword(key, one[key], two[key], path) for key in two if key in one}
        return {**one, **two, **shared}

    def _merge_keyword(self, key: str, one: Any, two: Any, path: str) -> Any:
        if one is two or key in ANNOTATIONS:
            return one
        if key in self._merges:
            return self._merges[key](one, two, path)
        self._steps.count_values(two)
        if one == two:
            return one
        raise SchemaError(f"{path}.{key}", "has two different values: write one schema for both")

    def _common_properties(self, one: Any, two: Any, path: str) -> dict[str, Schema]:
        shared = {
            name: self.merge(one[name], two[name], f"{path}.properties.{name}") for name in one.keys() & two.keys()
        }
        return {**one, **two, **shared}

    def _common_values(self, one: Any, two: Any, _: str) -> list[Any]:
        self._steps.count_values([one, two])
        allowed = set(map(comparable, two))
        return [value for value in one if comparable(value) in allowed]


def _common_types(one: Any, two: Any, path: str) -> list[str]:
    common = [name for name in types_of({"type": one}) if name in types_of({"type": two})]
    if not common:
        raise SchemaError(f"{path}.type", "allows no type in all parts of the schema")
    return common


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
    found = {("type", ""): types, ("value", ""): _enumerated(schema, steps)}
    if types == {"object"}:
        properties = schema.get("properties", {})
        found |= {("property", name): _enumerated(properties.get(name), steps) for name in schema.get("required", ())}
    return {name: values for name, values in found.items() if values}


def _enumerated(schema: object, steps: Steps) -> frozenset[Hashable] | None:
    if not isinstance(schema, Mapping) or not {"enum", "const"} & schema.keys():
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    steps.count_values(values)
    return frozenset(map(comparable, values))
