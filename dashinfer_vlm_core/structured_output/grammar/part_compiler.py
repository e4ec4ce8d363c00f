"""What the compilers of objects and of property names use of the compiler of schemas, which uses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .rules import Rules
from .schema_shape import SchemaError


class PartCompiler(Protocol):
    """Compiles the parts of a schema; see `SchemaCompiler`."""

    rules: Rules

    def compile(self, schema: Mapping[str, Any] | bool, level: int, path: str) -> str | None: ...

    def tolerate(self, error: SchemaError) -> None: ...

    def resolve(self, schema: Mapping[str, Any] | bool, path: str) -> Mapping[str, Any]: ...

    def enum_values(self, schema: Mapping[str, Any], path: str) -> list[Any]: ...
