"""What a request wants its answer to look like -> a grammar."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidParameter
from ..protocol import ChatRequest
from ..protocol.output import ToolFunction
from ..tokenization.conversation import HERMES, ConversationFormat
from .grammar import COLON, COMMA, Rules, SchemaError, any_object, json_schema, literal

MAX_CALLS = 16
"""Most calls of one answer."""

_ANYTHING = r"/(.|\n)*/"
SCHEMA_PARAM = "response_format.json_schema.schema"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OutputGrammar:
    """A grammar that an answer has to follow.

    Attributes:
        rules: of the grammar.
        start: the rule that the answer follows.
        param: the field that asks for it.
    """

    rules: Rules
    start: str
    param: str

    @property
    def field(self) -> str:
        """The field of the request that `param` belongs to."""
        return self.param.partition(".")[0].partition("[")[0]


def grammar_for_request(request: ChatRequest, conversation: ConversationFormat = HERMES) -> OutputGrammar | None:
    """The grammar that a request asks for; None if its answer is free.

    Tools that may be called, but need not, are part of it: text is free until a call begins.

    Args:
        request: says what it wants.
        conversation: how the model writes calls.

    Raises:
        InvalidParameter: a schema is malformed or too large, or cannot be guaranteed; `param` names it.
    """
    rules = Rules()
    content = _content(rules, request)
    if not request.callable_tools:
        return content
    begin, calls = literal(conversation.call_begin), _calls(rules, request, conversation)
    if request.must_call:
        return OutputGrammar(rules=rules, start=f"{begin} {calls}", param="tool_choice")
    if content:
        return OutputGrammar(rules=rules, start=f"{content.start} | {begin} {calls}", param=content.param)
    tag = re.escape(conversation.call_begin).replace("/", r"\/")
    text = rules.terminal(f"{_ANYTHING} & ~/(.|\\n)*{tag}(.|\\n)*/")
    return OutputGrammar(rules=rules, start=f"{text} | {_until_call(rules, begin)} {calls}", param="tools")


def _content(rules: Rules, request: ChatRequest) -> OutputGrammar | None:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None:
        return OutputGrammar(rules=rules, start=any_object(rules), param="response_format")
    start = _compiled(rules, wanted.json_schema.json_schema, SCHEMA_PARAM)
    return OutputGrammar(rules=rules, start=start, param=SCHEMA_PARAM)


def _until_call(rules: Rules, begin: str) -> str:
    return rules.lazy(f"{rules.terminal(_ANYTHING)} {begin}")


def _calls(rules: Rules, request: ChatRequest, conversation: ConversationFormat) -> str:
    """What follows the first tag: a call, and more of them where there may be several."""
    allowed = {tool.function.name for tool in request.callable_tools}
    calls = [
        _call(rules, tool.function, f"tools[{index}].function.parameters", conversation)
        for index, tool in enumerate(request.tools)
        if tool.function.name in allowed
    ]
    call = rules.either(calls)
    if request.parallel_tool_calls is False:
        return call
    following = literal("\n" + conversation.call_begin)
    return f"{call} ({following} {call}){{0,{MAX_CALLS - 1}}}"


def _call(rules: Rules, tool: ToolFunction, param: str, conversation: ConversationFormat) -> str:
    schema = tool.parameters or {"properties": {}}
    if schema.get("type", "object") != "object":
        raise InvalidParameter(f"`{param}` must be a schema of type object.", param=param)
    arguments = _compiled(rules, {**schema, "type": "object"}, param, lenient=not tool.strict)
    name, key = literal(f'"{tool.name}"'), literal('"arguments"')
    begin, end = literal('\n{"name"'), literal("}\n" + conversation.call_end)
    return rules.add(f"{begin} {COLON} {name} {COMMA} {key} {COLON} {arguments} {end}")


def _compiled(rules: Rules, schema: Mapping[str, Any], param: str, *, lenient: bool = False) -> str:
    try:
        return json_schema(rules, schema, field=param, lenient=lenient)
    except SchemaError as fault:
        place = f" at {fault.place!r}" if fault.place else ""
        raise InvalidParameter(f"`{param}`{place} {fault.words}.", param=param) from None
