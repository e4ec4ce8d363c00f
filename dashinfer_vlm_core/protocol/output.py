"""The requested output: response format and tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, Strict, Tag

from ..errors import InvalidParameter
from .base import RequestModel, Text, string_or_object
from .validation_errors import show

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 32


def _check_size(schema: dict[str, Any]) -> dict[str, Any]:
    """Reject a schema that is nested too deeply or too long, before other code traverses it."""
    layer: list[object] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        layer = [item for part in layer for item in _children(part)]
    if layer:
        raise ValueError(f"must have at most {MAX_SCHEMA_DEPTH} levels")
    try:
        size = len(json.dumps(schema, ensure_ascii=False, allow_nan=False).encode())
    except (ValueError, TypeError):
        raise ValueError("must contain only values that JSON can represent") from None
    if size > MAX_SCHEMA_BYTES:
        raise ValueError(f"must have at most {MAX_SCHEMA_BYTES} bytes (this one has {size})")
    return schema


def _children(part: object) -> Iterable[object]:
    if isinstance(part, dict):
        return part.values()
    return part if isinstance(part, (list, tuple)) else ()


def _identifier(name: str) -> str:
    if not re.fullmatch(r"[a-zA-Z0-9_.-]{1,64}", name):
        raise ValueError("must be 1 to 64 letters, digits, underscores, dots and dashes")
    return name


_Identifier: TypeAlias = Annotated[str, AfterValidator(_identifier)]
JsonSchema: TypeAlias = Annotated[dict[str, Any], AfterValidator(_check_size)]


class SchemaFormat(RequestModel):
    """A schema for the completion. `strict` has no effect, since every schema is enforced exactly."""

    name: _Identifier
    description: Text | None = None
    json_schema: JsonSchema = Field(alias="schema")
    strict: bool = False


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    def find_conflicts(self) -> Iterator[InvalidParameter]:
        if self.type == "json_schema" and self.json_schema is None:
            yield InvalidParameter(
                "`response_format.json_schema` is required with this type. Pass an object with `name` and `schema`.",
                param="response_format.json_schema",
            )


class ToolFunction(RequestModel):
    """Name, purpose and parameters of a tool. With `strict`, schemas that cannot be enforced are rejected."""

    name: _Identifier
    description: Text | None = None
    parameters: JsonSchema | None = None
    strict: bool = False


class Tool(RequestModel):
    type: Literal["function"]
    function: ToolFunction

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates expect."""
        function = {"name": self.function.name, "description": self.function.description}
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        function = {key: value for key, value in function.items() if value is not None}
        return {"type": "function", "function": {**function, "parameters": parameters}}


class _Named(RequestModel):
    name: _Identifier


class NamedTool(RequestModel):
    type: Literal["function"]
    function: _Named


def _choice_tag(value: object) -> str | None:
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, (dict, NamedTool)) else None


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("string")] | Annotated[NamedTool, Tag("object")],
    string_or_object(_choice_tag),
]
Tools: TypeAlias = Annotated[tuple[Tool, ...], Strict(False), Field(max_length=MAX_TOOLS, fail_fast=True)]


def find_tool_conflicts(tools: Tools, choice: ToolChoice | None, parallel: bool | None) -> Iterator[InvalidParameter]:
    """Yield an error for each conflict between the fields for tools."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in names:
            path = f"tools[{index}].function.name"
            yield InvalidParameter(
                f"`{path}` {show(tool.function.name)} is used twice. Rename one of the tools.", param=path
            )
        names.add(tool.function.name)
    if not tools and (parallel is not None or choice not in {None, "none", "auto"}):
        name = "parallel_tool_calls" if parallel is not None else "tool_choice"
        yield InvalidParameter(f"`{name}` requires `tools`. Remove it, or pass tools.", param=name)
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        yield InvalidParameter(
            f"`tool_choice` names {show(choice.function.name)}, which is not one of `tools`.",
            param="tool_choice.function.name",
        )
