"""Parameters of tool calls in XML: their text does not say which type they have, only the schema of the tool does."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from .references import References
from .rules import Steps, TooComplex
from .schema_shape import TYPES, is_one_of, is_types, type_of, types_of

PARAMETER_END = "\n</parameter>\n"
STRING = frozenset({"string"})

_ALL = frozenset(TYPES)
_MAX_PARTS = 256
_WHITE_SPACE = " \t\r\n"
_WORDS = {"True": "true", "False": "false", "None": "null"}
"""How chat templates write JSON's literals, in addition to JSON."""


def parameter_types(schema: Mapping[str, Any], name: str, steps: Steps) -> frozenset[str]:
    """Return the types that a tool's schema names for a parameter, wherever it describes it; all if it names none, or
    has too many parts.

    Args:
        schema: the schema of the arguments, which need not be valid.
        name: the name of the parameter.
        steps: counts the work.
    """
    try:
        return _find_types(schema, name, steps) or _ALL
    except TooComplex:
        return _ALL


def _find_types(schema: Mapping[str, Any], name: str, steps: Steps) -> frozenset[str]:
    references = References(schema, steps)
    objects = _parts([schema], references)
    properties = [part["properties"] for part in objects if isinstance(part.get("properties"), Mapping)]
    named = [listed[name] for listed in properties if name in listed]
    parts = _parts(named or [part.get("additionalProperties") for part in objects], references)
    types = frozenset[str]().union(*(_named_types(part, steps) for part in parts))
    is_whole = max(len(objects), len(parts)) < _MAX_PARTS
    return types if is_whole else _ALL


def parameter_json(text: str, types: Collection[str]) -> str:
    """Return the value of a parameter as JSON: a string if its schema allows nothing else, or no such value."""
    plain = text.strip(_WHITE_SPACE)
    plain = _WORDS.get(plain, plain)
    return plain if types != STRING and _is_value(plain, types) else json.dumps(text, ensure_ascii=False)


def _is_value(text: str, types: Collection[str]) -> bool:
    try:
        value = json.loads(text, parse_constant=reject_constant)
    except (ValueError, RecursionError):
        return False
    return not isinstance(value, str) and ("string" not in types or is_one_of(value, types))


def reject_constant(constant: str) -> NoReturn:
    """Raise ValueError for NaN and infinities, which `json.loads` accepts."""
    raise ValueError(f"{constant} is not JSON")


def _parts(schemas: list[Any], references: References) -> list[Mapping[str, Any]]:
    """Return schemas and those that they combine or refer to, each reference once, at most `_MAX_PARTS`."""
    found: list[Mapping[str, Any]] = []
    seen: set[str] = set()
    waiting = list(schemas)
    while waiting and len(found) < _MAX_PARTS:
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        found.append(part)
        pointer = part.get("$ref")
        if isinstance(pointer, str) and pointer not in seen:
            seen.add(pointer)
            waiting.append(references.find(pointer))
        for key in ("allOf", "anyOf", "oneOf"):
            waiting += part[key][:_MAX_PARTS] if isinstance(part.get(key), list) else ()
    return found


def _named_types(schema: Mapping[str, Any], steps: Steps) -> set[str]:
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        steps.count(len(values))
        types = set(map(type_of, values))
    else:
        named = schema.get("type", "object")
        steps.count(len(named) if isinstance(named, list) else 1)
        types = set(types_of(schema)) if is_types(named) else set()
    return types | {"integer"} if "number" in types else types
