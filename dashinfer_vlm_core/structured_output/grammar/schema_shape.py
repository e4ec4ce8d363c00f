"""The shape of a JSON schema: validation of its keywords, and merging of two schemas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from . import bounds

Schema: TypeAlias = Mapping[str, Any] | bool

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

ANNOTATIONS = frozenset(
    {
        "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
        "deprecated", "readOnly", "writeOnly", "discriminator", "contentEncoding", "contentMediaType", "example",
    }
)  # fmt: skip
"""Keywords that do not constrain values."""

NOT_GUARANTEED = frozenset(
    {
        "not", "if", "then", "else", "patternProperties", "propertyNames", "dependentRequired", "dependentSchemas",
        "dependencies", "uniqueItems", "contains", "minContains", "maxContains", "additionalItems", "$dynamicRef",
        "$recursiveRef", "unevaluatedItems",
    }
)  # fmt: skip

_IMPLIED = MappingProxyType(
    {
        "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
        "array": {"items", "prefixItems", "minItems", "maxItems"},
        "string": {"minLength", "maxLength", "pattern", "format"},
        "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    }
)
"""The type implied by the keywords of a schema without `type`."""


class SchemaError(Exception):
    """A schema is invalid or not supported.

    Attributes:
        path: the part that is wrong, such as `properties.size.minimum`; empty for the whole schema.
        reason: what is wrong and how to fix it, as the predicate of a sentence.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path: str = path.removeprefix(".")
        self.reason = reason


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return bool(abs(value) < 10**bounds.MAX_INTEGER_DIGITS)  # false for NaN


def _is_schema(value: object) -> bool:
    return isinstance(value, (Mapping, bool))


def _is_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_schemas(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _is_types(value: object) -> bool:
    if isinstance(value, str):
        return value in TYPES
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) and item in TYPES for item in value)


def _is_properties(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_schema, value.values()))


def _is_pattern(value: object) -> bool:
    return isinstance(value, str) and len(value) <= bounds.MAX_PATTERN_CHARACTERS


_NUMBER = (_is_number, f"must be a number below 1e{bounds.MAX_INTEGER_DIGITS}")
_COUNT = (_is_count, "must be an integer, at least 0")
_SCHEMA = (_is_schema, "must be a schema")
_SCHEMAS = (_is_schemas, "must be an array of schemas")
_SHAPES: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "type": (_is_types, f"must be one of {', '.join(TYPES)}, or an array of them"),
        "enum": (lambda value: isinstance(value, list) and bool(value), "must be an array of values"),
        "$ref": (lambda value: isinstance(value, str), "must be a string"),
        "allOf": _SCHEMAS,
        "anyOf": _SCHEMAS,
        "oneOf": _SCHEMAS,
        "properties": (_is_properties, "must be an object of schemas"),
        "required": (_is_strings, "must be an array of names"),
        "additionalProperties": _SCHEMA,
        "items": _SCHEMA,
        "prefixItems": _SCHEMAS,
        "pattern": (_is_pattern, f"must be a string of at most {bounds.MAX_PATTERN_CHARACTERS} characters"),
        "format": (lambda value: isinstance(value, str), "must be a string"),
        "multipleOf": (
            lambda value: _is_number(value) and value >= 1 and value == int(value),
            "is supported only for integers, at least 1",
        ),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
        **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    }
)


def check_keywords(schema: Mapping[str, Any], path: str, *, lenient: bool) -> None:
    """Reject keywords with invalid values and, unless `lenient`, those that cannot be guaranteed."""
    for key, (is_valid, reason) in _SHAPES.items():
        if key in schema and not is_valid(schema[key]):
            raise SchemaError(f"{path}.{key}", reason)
    for key in sorted(NOT_GUARANTEED & schema.keys()):
        if not lenient and schema[key] is not False:
            raise SchemaError(f"{path}.{key}", "cannot be guaranteed: remove it")


def types_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types that a schema allows; empty if it does not constrain the type."""
    if "type" in schema:
        return (schema["type"],) if isinstance(schema["type"], str) else tuple(schema["type"])
    return tuple(name for name, keywords in _IMPLIED.items() if keywords & schema.keys())


def merge(one: Schema, two: Schema, path: str) -> Schema:
    """Return a schema of the values that satisfy both schemas.

    Raises:
        SchemaError: the schemas cannot be merged.
    """
    if isinstance(one, bool) or isinstance(two, bool):
        return (two if one else False) if isinstance(one, bool) else (one if two else False)
    for part in (one, two):
        check_keywords(part, path, lenient=True)
    for closed, other in ((one, two), (two, one)):
        extra = other.get("properties", {}).keys() - closed.get("properties", {}).keys()
        if extra and closed.get("additionalProperties", True) is not True:
            raise SchemaError(
                f"{path}.additionalProperties",
                "forbids properties that another part of the schema defines: define them in both",
            )
    merged = dict(one)
    for key, value in two.items():
        merged[key] = _merge_keyword(key, merged[key], value, path) if key in merged else value
    return merged


def _merge_keyword(key: str, one: Any, two: Any, path: str) -> Any:
    if one == two or key in ANNOTATIONS:
        return one
    if key in _SHAPES and not all(_SHAPES[key][0](value) for value in (one, two)):
        raise SchemaError(f"{path}.{key}", _SHAPES[key][1])
    if key in _MERGES:
        return _MERGES[key](one, two, path)
    raise SchemaError(f"{path}.{key}", "has two different values: write one schema for both")


def _common_types(one: Any, two: Any, path: str) -> list[str]:
    common = [name for name in types_of({"type": one}) if name in types_of({"type": two})]
    if not common:
        raise SchemaError(f"{path}.type", "allows no type in all parts of the schema")
    return common


def _common_properties(one: Any, two: Any, path: str) -> dict[str, Schema]:
    shared = {name: merge(one[name], two[name], f"{path}.properties.{name}") for name in one.keys() & two.keys()}
    return {**one, **two, **shared}


_MERGES: Mapping[str, Callable[[Any, Any, str], Any]] = MappingProxyType(
    {
        "type": _common_types,
        "properties": _common_properties,
        "required": lambda one, two, _: list(dict.fromkeys([*one, *two])),
        "items": merge,
        "additionalProperties": merge,
        "enum": lambda one, two, _: [value for value in one if value in two],
        **{
            key: (lambda one, two, _: max(one, two)) for key in ("minimum", "exclusiveMinimum", "minLength", "minItems")
        },
        **{
            key: (lambda one, two, _: min(one, two)) for key in ("maximum", "exclusiveMaximum", "maxLength", "maxItems")
        },
    }
)
