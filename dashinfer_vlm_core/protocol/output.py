"""The requested output: response format, vLLM's structured outputs, and tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, Tag, model_validator
from typing_extensions import Self

from .base import Array, ClosedModel, RequestModel, Text, encodable, string_or_object
from .fields import NO_CUSTOM_GRAMMAR, RejectedFields, reject_fields
from .validation_errors import invalid, show

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 32
MAX_CHOICES = 1024
MAX_GUIDED_CHARACTERS = 1024


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


def _parse_schema(value: object) -> object:
    """Parse a schema that is JSON text, as vLLM's clients may send it."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_SCHEMA_BYTES:
        raise ValueError(f"must have at most {MAX_SCHEMA_BYTES} bytes")
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError("must be a JSON schema: an object, or the text of one") from None


def _identifier(name: str) -> str:
    if not re.fullmatch(r"[a-zA-Z0-9_.-]{1,128}", name):
        raise ValueError("must be 1 to 128 letters, digits, underscores, dots and dashes")
    return name


_Identifier: TypeAlias = Annotated[str, AfterValidator(_identifier)]
JsonSchema: TypeAlias = Annotated[dict[str, Any], AfterValidator(_check_size)]
GuidedSchema: TypeAlias = Annotated[
    dict[str, Any],
    BeforeValidator(_parse_schema, json_schema_input_type=dict[str, Any] | str),
    AfterValidator(_check_size),
]
"""A schema, or its text."""

GuidedText: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_GUIDED_CHARACTERS), AfterValidator(encodable)]
"""A regular expression, or a text to choose."""

GuidedTexts: TypeAlias = Annotated[Array[GuidedText], Field(min_length=1, max_length=MAX_CHOICES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputConstraint:
    """What the content of a completion has to be.

    Attributes:
        kind: a JSON object, JSON that follows a schema, a match of a regular expression, or one of several texts.
        param: the field of the request that requires it.
        json_schema: the schema, for `json_schema`.
        regex: the regular expression, for `regex`.
        choices: the texts, for `choice`.
        strict: whether a schema that cannot be guaranteed is rejected; otherwise it is widened.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice"]
    param: str
    json_schema: Mapping[str, Any] | None = None
    regex: str = ""
    choices: tuple[str, ...] = ()
    strict: bool = True

    @property
    def field(self) -> str:
        """The top-level field of the request that contains `param`."""
        return self.param.partition(".")[0]


class SchemaFormat(RequestModel):
    """A schema for the completion. With `strict`, a schema that cannot be guaranteed is rejected, else widened."""

    name: _Identifier
    description: Text | None = None
    json_schema: JsonSchema = Field(alias="schema")
    strict: bool = False


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise invalid(
                "response_format.json_schema", "is required with this type. Pass an object with `name` and `schema`."
            )
        return self

    def constraints(self) -> Iterator[OutputConstraint]:
        if self.json_schema is not None and self.type == "json_schema":
            yield OutputConstraint(
                kind="json_schema",
                param="response_format.json_schema.schema",
                json_schema=self.json_schema.json_schema,
                strict=self.json_schema.strict,
            )
        elif self.type != "text":
            yield OutputConstraint(kind="json_object", param="response_format")


class StructuredOutputs(ClosedModel):
    """vLLM's `structured_outputs`: one of `json`, `regex`, `choice` and `json_object`, and options."""

    json_schema: GuidedSchema | None = Field(None, alias="json")
    regex: GuidedText | None = None
    choice: GuidedTexts | None = None
    json_object: bool = False
    grammar: Any = None
    structural_tag: Any = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: Text | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        reject_fields(vars(self), REJECTED_OPTIONS, prefix="structured_outputs.")
        if not list(self.constraints()):
            raise invalid("structured_outputs", "needs one of `json`, `regex`, `choice` and `json_object`.")
        return self

    def constraints(self) -> Iterator[OutputConstraint]:
        yield from guided_constraints(
            "structured_outputs.", json_schema=self.json_schema, regex=self.regex, choices=self.choice
        )
        if self.json_object:
            yield OutputConstraint(kind="json_object", param="structured_outputs.json_object")


_NO_WHITESPACE = "JSON has at most one space after commas and colons. Remove it."
REJECTED_OPTIONS: RejectedFields = {
    "grammar": ((), NO_CUSTOM_GRAMMAR),
    "structural_tag": ((), "Use `tools` for calls, or a JSON schema."),
    "disable_any_whitespace": ((False,), _NO_WHITESPACE),
    "disable_additional_properties": ((False,), 'Set "additionalProperties": false in the schema.'),
    "whitespace_pattern": ((), _NO_WHITESPACE),
}
"""Options of `structured_outputs` that are not supported."""


def guided_constraints(
    prefix: str, *, json_schema: Mapping[str, Any] | None, regex: str | None, choices: tuple[str, ...] | None
) -> Iterator[OutputConstraint]:
    """Yield the constraints of vLLM's fields; `prefix` is what their names begin with."""
    if json_schema is not None:
        yield OutputConstraint(kind="json_schema", param=f"{prefix}json", json_schema=json_schema)
    if regex is not None:
        yield OutputConstraint(kind="regex", param=f"{prefix}regex", regex=regex)
    if choices is not None:
        yield OutputConstraint(kind="choice", param=f"{prefix}choice", choices=choices)


class ToolFunction(RequestModel):
    """A tool. With `strict`, parameters that cannot be guaranteed are rejected, else widened."""

    name: _Identifier
    description: Text | None = None
    parameters: JsonSchema | None = None
    strict: bool = False


class Tool(RequestModel):
    type: Literal["function"]
    function: ToolFunction

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates expect."""
        function = self.function.model_dump(include={"name", "description"}, exclude_none=True)
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function | {"parameters": parameters}}


class _Named(RequestModel):
    name: _Identifier


class NamedTool(RequestModel):
    type: Literal["function"]
    function: _Named


class ToolSubset(RequestModel):
    """The tools that may be called, or one of which must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[Array[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.tools)


class AllowedTools(RequestModel):
    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


def _choice_tag(value: object) -> str | None:
    if isinstance(value, str):
        return "string"
    if isinstance(value, AllowedTools) or (isinstance(value, dict) and value.get("type") == "allowed_tools"):
        return "subset"
    return "object" if isinstance(value, (dict, NamedTool)) else None


ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("string")]
    | Annotated[AllowedTools, Tag("subset")]
    | Annotated[NamedTool, Tag("object")],
    string_or_object(_choice_tag),
]
Tools: TypeAlias = Annotated[Array[Tool], Field(max_length=MAX_TOOLS)]


def check_tools(tools: Tools, choice: ToolChoice | None, parallel: bool | None) -> None:
    """Raise InvalidParameter if the fields for tools contradict each other."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in names:
            path = f"tools[{index}].function.name"
            raise invalid(path, f"is {show(tool.function.name)}, which another tool has, too. Rename one of them.")
        names.add(tool.function.name)
    if not tools and (parallel is not None or choice not in {None, "none", "auto"}):
        name = "parallel_tool_calls" if parallel is not None else "tool_choice"
        raise invalid(name, "requires `tools`. Remove it, or pass tools.")
    for path, chosen in _chosen_tools(choice):
        if chosen.function.name not in names:
            raise invalid(path, f"is {show(chosen.function.name)}, which is not one of `tools`.")


def _chosen_tools(choice: ToolChoice | None) -> Iterator[tuple[str, NamedTool]]:
    if isinstance(choice, NamedTool):
        yield "tool_choice.function.name", choice
    elif isinstance(choice, AllowedTools):
        for index, tool in enumerate(choice.allowed_tools.tools):
            yield f"tool_choice.allowed_tools.tools[{index}].function.name", tool
