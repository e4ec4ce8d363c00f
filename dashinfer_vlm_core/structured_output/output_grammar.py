"""Response format and tools of a request to a grammar."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InvalidParameter
from ..models.coordinates import CoordinateSpec
from ..protocol import ChatRequest
from ..protocol.output import OutputConstraint, ToolFunction
from ..tokenization.conversation import HERMES, ConversationFormat
from .coordinate_schema import with_model_coordinates
from .grammar import (
    COLON,
    COMMA,
    Rules,
    SchemaError,
    any_object,
    json_schema,
    literal,
    matching_text,
    one_of,
)

MAX_CALLS = 16
"""Maximum number of tool calls in one completion."""

_ANYTHING = r"/(.|\n)*/"
_BLANK = r"/\n{0,2}/"
"""What models write between reasoning and content."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OutputGrammar:
    """A grammar that a completion has to follow.

    Attributes:
        rules: the grammar's rules.
        start: the rule that the completion follows.
        param: the request field that requires it.
    """

    rules: Rules
    start: str
    param: str

    @property
    def field(self) -> str:
        """The top-level field of the request that contains `param`."""
        return self.param.partition(".")[0].partition("[")[0]


def grammar_for_request(
    request: ChatRequest, conversation: ConversationFormat = HERMES, coordinates: CoordinateSpec | None = None
) -> OutputGrammar | None:
    """Return the grammar that a request requires; None if its response is unconstrained.

    Optional tools are part of the grammar: text is unconstrained until a tool call begins.

    Args:
        request: the request.
        conversation: how the model writes tool calls.
        coordinates: how the model writes positions in images, for requests that want pixels of the original.

    Raises:
        InvalidParameter: a schema is invalid, too large, or cannot be guaranteed; `param` names it.
    """
    rules = Rules()
    maximum = coordinates.maximum if coordinates and request.coordinates == "original" else None
    content = _content(rules, request, maximum)
    if not request.callable_tools:
        return content
    begin, calls = literal(conversation.call_begin), _tool_calls(rules, request, conversation, maximum)
    if request.must_call:
        return OutputGrammar(rules=rules, start=f"{begin} {calls}", param="tool_choice")
    if content:
        return OutputGrammar(rules=rules, start=f"{content.start} | {begin} {calls}", param=content.param)
    tag = re.escape(conversation.call_begin).replace("/", r"\/")
    text = rules.terminal(f"{_ANYTHING} & ~/(.|\\n)*{tag}(.|\\n)*/")
    return OutputGrammar(rules=rules, start=f"{text} | {_until_call(rules, begin)} {calls}", param="tools")


def after_reasoning(grammar: OutputGrammar, conversation: ConversationFormat) -> OutputGrammar:
    """Return the grammar of a completion that begins with reasoning, without its first tag.

    The reasoning is unconstrained and of any length; the completion's limit of tokens bounds it.
    """
    rules = grammar.rules
    reasoning = rules.lazy(f"{rules.terminal(_ANYTHING)} {literal(conversation.reasoning_end)}")
    return replace(grammar, start=f"{reasoning} {rules.terminal(_BLANK)} ({grammar.start})")


def _content(rules: Rules, request: ChatRequest, maximum: int | None) -> OutputGrammar | None:
    constraint = request.output_constraint
    if constraint is None:
        return None
    with _naming(constraint.param):
        return OutputGrammar(rules=rules, start=_start(rules, constraint, maximum), param=constraint.param)


def _start(rules: Rules, constraint: OutputConstraint, maximum: int | None) -> str:
    if constraint.kind == "regex":
        return matching_text(rules, constraint.regex, field=constraint.param)
    if constraint.kind == "choice":
        return one_of(rules, constraint.choices)
    if constraint.json_schema is None:
        return any_object(rules)
    return json_schema(rules, _in_model_coordinates(constraint.json_schema, maximum), field=constraint.param)


def _in_model_coordinates(schema: Mapping[str, Any], maximum: int | None) -> Mapping[str, Any]:
    """Return the schema of what the model writes; `maximum` is its largest coordinate, or None if none is converted."""
    return schema if maximum is None else with_model_coordinates(schema, maximum)


def _until_call(rules: Rules, begin: str) -> str:
    return rules.lazy(f"{rules.terminal(_ANYTHING)} {begin}")


def _tool_calls(rules: Rules, request: ChatRequest, conversation: ConversationFormat, maximum: int | None) -> str:
    """Return the rule of what follows the first tag: one call, or several if the request allows them."""
    allowed = {tool.function.name for tool in request.callable_tools}
    calls = [
        _tool_call(rules, tool.function, f"tools[{index}].function.parameters", conversation, maximum)
        for index, tool in enumerate(request.tools)
        if tool.function.name in allowed
    ]
    call = rules.either(calls)
    if request.has_single_call:
        return call
    following = literal("\n" + conversation.call_begin)
    return f"{call} ({following} {call}){{0,{MAX_CALLS - 1}}}"


def _tool_call(
    rules: Rules, tool: ToolFunction, param: str, conversation: ConversationFormat, maximum: int | None
) -> str:
    schema = tool.parameters or {"properties": {}}
    if schema.get("type", "object") != "object":
        raise InvalidParameter(f"`{param}` must be a schema of type object.", param=param)
    with _naming(param):
        parameters = _in_model_coordinates({**schema, "type": "object"}, maximum)
        arguments = json_schema(rules, parameters, field=param, lenient=not tool.strict)
    name, key = literal(f'"{tool.name}"'), literal('"arguments"')
    begin, end = literal('\n{"name"'), literal("}\n" + conversation.call_end)
    return rules.add(f"{begin} {COLON} {name} {COMMA} {key} {COLON} {arguments} {end}")


@contextlib.contextmanager
def _naming(param: str) -> Iterator[None]:
    """Convert errors of a schema or an expression to errors that name its field."""
    try:
        yield
    except SchemaError as error:
        location = f" at {error.path!r}" if error.path else ""
        raise InvalidParameter(f"`{param}`{location} {error.reason}.", param=param) from None
