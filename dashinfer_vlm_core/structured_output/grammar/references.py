"""References within a JSON schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from .schema_shape import SchemaError

Schema: TypeAlias = Mapping[str, Any] | bool


class References:
    """Looks up references in one schema.

    Args:
        root: the schema.
        count_step: is called for each reference that is found; raises SchemaError if there are too many.
    """

    def __init__(self, root: Mapping[str, Any], count_step: Callable[[], None]) -> None:
        self._root = root
        self._count_step = count_step
        self._reachable: dict[str, frozenset[str]] = {}

    def target(self, pointer: str, path: str) -> Schema:
        """Return the target of the reference at `path`.

        Raises:
            SchemaError: it has no target, or one that is not a schema.
        """
        target = self._find(pointer)
        if target is None:
            raise SchemaError(f"{path}.$ref", "must refer to a part of the same schema, such as #/$defs/Name")
        if not isinstance(target, (Mapping, bool)):
            raise SchemaError(f"{path}.$ref", "does not refer to a schema")
        return target

    def is_recursive(self, pointer: str) -> bool:
        """Return whether the target of a reference contains that reference, directly or through others."""
        if pointer not in self._reachable:
            seen: set[str] = set()
            waiting = [pointer]
            while waiting:
                for reference in _references(self._find(waiting.pop())):
                    self._count_step()
                    if reference not in seen:
                        seen.add(reference)
                        waiting.append(reference)
            self._reachable[pointer] = frozenset(seen)
        return pointer in self._reachable[pointer]

    def _find(self, pointer: str) -> Any:
        """Return what a JSON Pointer (RFC 6901) refers to; None if there is nothing."""
        target: Any = self._root
        if not pointer.startswith("#"):
            return None
        try:
            for step in filter(None, pointer[1:].split("/")):
                key = step.replace("~1", "/").replace("~0", "~")
                target = target[int(key)] if isinstance(target, list) else target[key]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
        return target


def _references(schema: object) -> Iterator[str]:
    """Yield all `$ref`s within a part of a schema."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            if isinstance(part.get("$ref"), str):
                yield part["$ref"]
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)
