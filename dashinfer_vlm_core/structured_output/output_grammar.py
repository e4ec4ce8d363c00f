"""Response format and tools of a request to a grammar."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InvalidParameter
from ..protocol import ChatRequest
from ..protocol.output import ToolFunction
from ..tokenization.conversation import HERMES, ConversationFormat
from .grammar import COLON, COMMA, Rules, SchemaError, any_object, json_schema, literal

MAX_CALLS = 16
"""Maximum number of tool calls in one completion."""

_ANYTHING = r"/(.|\n)*/"
_BLANK = r"/\n{0,2}/"
"""What models write between reasoning and content."""
SCHEMA_PARAM = "response_format.json_schema.schema"


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


def grammar_for_request(request: ChatRequest, conversation: ConversationFormat = HERMES) -> OutputGrammar | None:
    """Return the grammar that a request requires; None if its response is unconstrained.

    Optional tools are part of the grammar: text is unconstrained until a tool call begins.

    Args:
        request: the request.
        conversation: how the model writes tool calls.

    Raises:
        InvalidParameter: a schema is invalid, too large, or cannot be guaranteed; `param` names it.
    """
    rules = Rules()
    content = _content(rules, request)
    if not request.callable_tools:
        return content
    begin, calls = literal(conversation.call_begin), _tool_calls(rules, request, conversation)
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


def _content(rules: Rules, request: ChatRequest) -> OutputGrammar | None:
    response_format = request.response_format
    if response_format is None or response_format.type == "text":
        return None
    if response_format.json_schema is None:
        return OutputGrammar(rules=rules, start=any_object(rules), param="response_format")
    start = _compile_schema(rules, response_format.json_schema.json_schema, SCHEMA_PARAM)
    return OutputGrammar(rules=rules, start=start, param=SCHEMA_PARAM)


def _until_call(rules: Rules, begin: str) -> str:
    return rules.lazy(f"{rules.terminal(_ANYTHING)} {begin}")


def _tool_calls(rules: Rules, request: ChatRequest, conversation: ConversationFormat) -> str:
    """Return the rule of what follows the first tag: one call, or several if parallel calls are allowed."""
    allowed = {tool.function.name for tool in request.callable_tools}
    calls = [
        _tool_call(rules, tool.function, f"tools[{index}].function.parameters", conversation)
        for index, tool in enumerate(request.tools)
        if tool.function.name in allowed
    ]
    call = rules.either(calls)
    if request.parallel_tool_calls is False:
        return call
    following = literal("\n" + conversation.call_begin)
    return f"{call} ({following} {call}){{0,{MAX_CALLS - 1}}}"


def _tool_call(rules: Rules, tool: ToolFunction, param: str, conversation: ConversationFormat) -> str:
    schema = tool.parameters or {"properties": {}}
    if schema.get("type", "object") != "object":
        raise InvalidParameter(f"`{param}` must be a schema of type object.", param=param)
    arguments = _compile_schema(rules, {**schema, "type": "object"}, param, lenient=not tool.strict)
    name, key = literal(f'"{tool.name}"'), literal('"arguments"')
    begin, end = literal('\n{"name"'), literal("}\n" + conversation.call_end)
    return rules.add(f"{begin} {COLON} {name} {COMMA} {key} {COLON} {arguments} {end}")


def _compile_schema(rules: Rules, schema: Mapping[str, Any], param: str, *, lenient: bool = False) -> str:
    try:
        return json_schema(rules, schema, field=param, lenient=lenient)
    except SchemaError as error:
        location = f" at {error.path!r}" if error.path else ""
        raise InvalidParameter(f"`{param}`{location} {error.reason}.", param=param) from None
