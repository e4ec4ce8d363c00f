"""Two schemas to one, of the values that satisfy both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from .schema_shape import ANNOTATIONS, SchemaError, check_values, comparable, normalized, types_of
from .steps import Steps

Schema: TypeAlias = Mapping[str, Any] | bool


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
        one, two = normalized(one), normalized(two)
        for closed, other in ((one, two), (two, one)):
            extra = other.get("properties", {}).keys() - closed.get("properties", {}).keys()
            if extra and closed.get("additionalProperties", True) is not True:
                raise SchemaError(
                    f"{path}.additionalProperties",
                    "forbids properties that another part of the schema defines: define them in both",
                )
        merged = dict(one)
        for key, value in two.items():
            merged[key] = self._merge_keyword(key, merged[key], value, path) if key in merged else value
        return merged

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
