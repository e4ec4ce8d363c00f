"""References within a JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from .rules import Steps
from .schema_shape import Schema, SchemaError


class References:
    """Looks up references in one schema.

    Args:
        root: the schema.
        steps: counts the parts that are searched.
    """

    def __init__(self, root: Mapping[str, Any], steps: Steps) -> None:
        self._root = root
        self._steps = steps
        self._direct: dict[str, frozenset[str]] = {}
        self._recursive: dict[str, bool] = {}

    def target(self, pointer: str, path: str) -> Schema:
        """Return the target of the reference at `path`.

        Raises:
            SchemaError: it has no target, or one that is not a schema.
        """
        target = self.find(pointer)
        if target is None:
            raise SchemaError(f"{path}.$ref", "must refer to a part of the same schema, such as #/$defs/Name")
        if not isinstance(target, (Mapping, bool)):
            raise SchemaError(f"{path}.$ref", "does not refer to a schema")
        return target

    def is_recursive(self, pointer: str) -> bool:
        """Return whether the target of a reference contains that reference, directly or through others."""
        if pointer not in self._recursive:
            seen: set[str] = set()
            waiting = [pointer]
            while waiting:
                found = self._references_in(waiting.pop())
                self._steps.count(len(found))
                waiting += found - seen
                seen |= found
            self._recursive[pointer] = pointer in seen
        return self._recursive[pointer]

    def find(self, pointer: str) -> Any:
        """Return what a JSON Pointer in a URI fragment (RFC 6901, section 6) refers to; None if there is nothing."""
        self._steps.count_text(pointer)
        target: Any = self._root
        if not pointer.startswith("#"):
            return None
        try:
            for step in filter(None, unquote(pointer[1:]).split("/")):
                key = step.replace("~1", "/").replace("~0", "~")
                target = target[int(key)] if isinstance(target, list) else target[key]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
        return target

    def _references_in(self, pointer: str) -> frozenset[str]:
        if pointer not in self._direct:
            references = (part.get("$ref") for part in self._steps.count_values(self.find(pointer)))
            self._direct[pointer] = frozenset(name for name in references if isinstance(name, str))
        return self._direct[pointer]
