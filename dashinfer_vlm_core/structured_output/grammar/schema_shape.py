"""The shape of a JSON schema: validation and normalization of its keywords."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

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
        "not", "if", "then", "else", "patternProperties", "dependentRequired", "dependentSchemas", "dependencies",
        "uniqueItems", "contains", "minContains", "maxContains", "$dynamicRef", "$recursiveRef", "unevaluatedItems",
    }
)  # fmt: skip

_IMPLIED = {
    "object": {"properties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
"""The type implied by the keywords of a schema without `type`."""


_TYPE_NAMES: Mapping[type, str] = {
    dict: "object",
    list: "array",
    str: "string",
    float: "number",
    int: "integer",
    bool: "boolean",
    type(None): "null",
}


class SchemaError(Exception):
    """A schema is invalid, or cannot be guaranteed.

    Attributes:
        path: the part that is wrong, such as `properties.size.minimum`; empty for the whole schema.
        reason: what is wrong and how to fix it, as the predicate of a sentence.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path: str = path.removeprefix(".")
        self.reason = reason


class InvalidSchema(SchemaError):
    """A schema that is not valid in any draft of JSON Schema."""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_strings(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_string, value))


def _is_schema(value: object) -> bool:
    return isinstance(value, (Mapping, bool))


def _is_tuple(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def is_types(value: object) -> bool:
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list) and bool(names) and all(name in TYPES for name in names)


class _Shape(NamedTuple):
    """What the value of a keyword has to be.

    Attributes:
        is_supported: whether it can be guaranteed.
        reason: what it has to be, as the predicate of a sentence.
        is_valid: whether it is valid in some draft of JSON Schema, if that is more than what is supported.
    """

    is_supported: Callable[[Any], bool]
    reason: str
    is_valid: Callable[[Any], bool] | None = None


_SCHEMA = _Shape(_is_schema, "must be a schema")
_SCHEMAS = _Shape(lambda value: bool(value) and _is_tuple(value), "must be an array of schemas")
_STRING = _Shape(_is_string, "must be a string")
_NUMBER = _Shape(_is_number, "must be a number")
_LIMIT = _Shape(_is_number, "must be a number", lambda value: _is_number(value) or isinstance(value, bool))  # draft 4
_COUNT = _Shape(_is_count, "must be an integer, at least 0", lambda value: _is_number(value) and value >= 0)
_SHAPES: Mapping[str, _Shape] = {
    "type": _Shape(  # draft 3 has the type "any", and allows others
        is_types,
        f"must be one of {', '.join(TYPES)}, or an array of them",
        lambda value: isinstance(value, (str, list)),
    ),
    "enum": _Shape(lambda value: _is_list(value) and bool(value), "must be an array of values", _is_list),
    "properties": _Shape(
        lambda value: isinstance(value, Mapping) and all(map(_is_schema, value.values())),
        "must be an object of schemas",
    ),
    "required": _Shape(  # draft 3
        _is_strings, "must be an array of names", lambda value: _is_strings(value) or isinstance(value, bool)
    ),
    "items": _Shape(lambda value: _is_schema(value) or _is_tuple(value), "must be a schema, or an array of them"),
    "prefixItems": _Shape(_is_tuple, "must be an array of schemas"),
    "pattern": _Shape(
        lambda value: _is_string(value) and len(value) <= bounds.MAX_PATTERN_CHARACTERS,
        f"must be a string of at most {bounds.MAX_PATTERN_CHARACTERS} characters",
        _is_string,
    ),
    "multipleOf": _Shape(lambda value: _is_number(value) and value > 0, "must be a number above 0"),
    **dict.fromkeys(("$ref", "format"), _STRING),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), _SCHEMAS),
    **dict.fromkeys(("additionalProperties", "propertyNames", "additionalItems"), _SCHEMA),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _LIMIT),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
}


def find_faults(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, SchemaError]]:
    """Yield the keywords that are invalid, as `InvalidSchema`, or cannot be guaranteed, each with its error."""
    yield from _find_wrong_values(schema, path)
    for key in sorted(NOT_GUARANTEED & schema.keys()):
        if schema[key] is not False:
            yield key, SchemaError(f"{path}.{key}", "cannot be guaranteed: remove it")


def check_values(schema: Mapping[str, Any], path: str) -> None:
    """Reject keywords with invalid or unsupported values."""
    for _, error in _find_wrong_values(schema, path):
        raise error


def _find_wrong_values(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, SchemaError]]:
    for key, shape in _SHAPES.items():
        if key in schema and not shape.is_supported(schema[key]):
            is_valid = shape.is_valid is not None and shape.is_valid(schema[key])
            yield key, (SchemaError if is_valid else InvalidSchema)(f"{path}.{key}", shape.reason)


def normalized(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with tuples as `prefixItems`: before draft 2020-12, `items` is an array of their schemas."""
    if not schema.keys() & {"items", "additionalItems"}:
        return schema
    rest = {key: value for key, value in schema.items() if key not in {"items", "additionalItems"}}
    if not isinstance(schema.get("items"), list):
        return rest | ({"items": schema["items"]} if "items" in schema else {})
    further = {"items": schema["additionalItems"]} if "additionalItems" in schema else {}
    return {**rest, "prefixItems": schema["items"], **further}


def types_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types that a schema allows; empty if it does not constrain the type."""
    if "type" in schema:
        return (schema["type"],) if isinstance(schema["type"], str) else tuple(dict.fromkeys(schema["type"]))
    return tuple(name for name, keywords in _IMPLIED.items() if keywords & schema.keys())


def comparable(value: object) -> Hashable:
    """Return what is equal for equal JSON values: 1 and 1.0 are the same number, `true` is another value than 1."""
    if isinstance(value, list):
        return tuple(map(comparable, value))
    if isinstance(value, Mapping):
        return frozenset((key, comparable(part)) for key, part in value.items())
    return (bool, value) if isinstance(value, bool) else value


def type_of(value: object) -> str:
    """Return the type of parsed JSON, "integer" for an integer."""
    return _TYPE_NAMES.get(type(value), "")


def is_one_of(value: object, types: Collection[str]) -> bool:
    """Return whether parsed JSON has one of these types."""
    name = type_of(value)
    return name in types or (name == "integer" and "number" in types)
