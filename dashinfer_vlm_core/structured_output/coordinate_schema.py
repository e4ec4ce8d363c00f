"""Schemas of responses with coordinates of the original image: the model writes them in its own coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..models.coordinates import BOX_NAMES, NAMES
from .grammar.references import References
from .grammar.rules import Steps
from .grammar.schema_shape import SchemaError, check_values, normalized

_VALUES = frozenset({"enum", "const", "default", "examples", "example"})
"""Keywords whose values are not schemas."""

_MAX_REFERENCES = 5


def with_model_coordinates(schema: Mapping[str, Any], maximum: int, steps: Steps) -> dict[str, Any]:
    """Return a schema in which every box and point has the model's coordinates.

    Bounds that the schema sets for them concern pixels of the original image. They are replaced, since the coordinates
    are converted, and limited to the image, after they are generated.

    Args:
        schema: parsed JSON of bounded depth.
        maximum: the model's largest coordinate.
        steps: counts the references that are followed.

    Raises:
        SchemaError: a property with the name of a box or a point is an array of something else.
    """
    rewritten: dict[str, Any] = _Rewriter(References(schema, steps), maximum).rewrite(schema, "")
    return rewritten


class _Rewriter:
    def __init__(self, references: References, maximum: int) -> None:
        self._references = references
        self._maximum = maximum

    def rewrite(self, part: Any, path: str) -> Any:
        if isinstance(part, list):
            return [self.rewrite(item, path) for item in part]
        if not isinstance(part, Mapping):
            return part
        return {key: self._member(key, value, path) for key, value in part.items()}

    def _member(self, key: str, value: Any, path: str) -> Any:
        if key in NAMES and path.endswith(".properties"):
            return self._coordinates(key, value, f"{path}.{key}")
        return value if key in _VALUES else self.rewrite(value, f"{path}.{key}")

    def _coordinates(self, name: str, schema: Any, path: str, level: int = 0) -> Any:
        target = self._dereference(schema)
        if not isinstance(target, Mapping):
            return self.rewrite(schema, path)
        if isinstance(target.get("anyOf"), list) and level < _MAX_REFERENCES:
            branches = [self._coordinates(name, branch, path, level + 1) for branch in target["anyOf"]]
            return {**target, "anyOf": branches}
        if target.get("type") != "array":
            return self.rewrite(schema, path)
        check_values(target, path)
        count = 4 if name in BOX_NAMES else 2
        if not _allows_numbers(normalized(target), count):
            raise SchemaError(path, f"must be an array of {count} numbers, since it has coordinates of the image")
        number = {"type": "integer", "minimum": 0, "maximum": self._maximum}
        return {"type": "array", "items": number, "minItems": count, "maxItems": count}

    def _dereference(self, schema: Any) -> Any:
        # References without a target are left to the compiler.
        for _ in range(_MAX_REFERENCES):
            pointer = schema.get("$ref") if isinstance(schema, Mapping) else None
            target = self._references.find(pointer) if isinstance(pointer, str) else None
            if target is None:
                break
            schema = target
        return schema


def _allows_numbers(schema: Mapping[str, Any], count: int) -> bool:
    parts = [*schema.get("prefixItems", ()), schema.get("items", True)]
    is_number = all(isinstance(part, bool) or part.get("type", "number") in ("integer", "number") for part in parts)
    return is_number and schema.get("minItems", count) <= count <= schema.get("maxItems", count)
