"""Response format and tools of a request to a grammar."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..errors import InvalidParameter
from ..models.coordinates import CoordinateSpec
from ..protocol import ChatRequest
from ..protocol.output import OutputConstraint, ToolFunction
from ..tokenization.conversation import HERMES, ConversationFormat
from .coordinate_schema import with_model_coordinates
from .grammar.json_schema import SchemaCompiler
from .grammar.rules import Rules, literal
from .grammar.schema_shape import TYPES, SchemaError
from .grammar.values import COLON, COMMA, any_value, matching_text
from .grammar.xml_calls import CallCompiler

MAX_CALLS = 16
"""Maximum number of tool calls in one completion."""

_ANYTHING = r"/(.|\n)*/"
_CALL = literal('\n{"name"')
_BLANK = r"/\n{0,2}/"
"""What models write between reasoning and content."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OutputGrammar:
    """A grammar that a completion has to follow.

    Attributes:
        rules: the grammar's rules.
        start: the rule that the completion follows.
        param: the request field that requires it.
        widened: the parts of schemas that allow any value, because they cannot be guaranteed.
    """

    rules: Rules
    start: str
    param: str
    widened: tuple[str, ...]


def grammar_for_request(
    request: ChatRequest,
    conversation: ConversationFormat = HERMES,
    coordinates: CoordinateSpec | None = None,
    *,
    rules: Rules | None = None,
    is_widest: bool = False,
    reasons: bool = False,
) -> OutputGrammar:
    """Return the grammar of a request's response format and tools.

    Optional tools are part of the grammar: text is unconstrained until a tool call begins.

    Args:
        request: the request.
        conversation: how the model writes tool calls and reasoning.
        coordinates: how the model writes positions in images, for requests that want pixels of the original.
        rules: the empty rules to add to, which bound the work; defaults to new ones.
        is_widest: whether all schemas without `strict` are widened to any value of their types.
        reasons: whether the completion begins with reasoning, without its first tag. The reasoning is unconstrained and
            of any length; the completion's limit of tokens bounds it.

    Raises:
        InvalidParameter: a schema is invalid; or it is strict, and too large or cannot be guaranteed. `param` names it.
    """
    maximum = coordinates.maximum if coordinates and request.coordinates == "original" else None
    rules = Rules() if rules is None else rules
    builder = _GrammarBuilder(rules, conversation, maximum, is_widest)
    param = request.output_constraint.param if request.output_constraint else "tools"
    param = "tool_choice" if request.must_call else param
    with _naming(param):
        start = builder.start(request)
        if reasons:
            reasoning = rules.lazy(f"{rules.terminal(_ANYTHING)} {literal(conversation.reasoning_end)}")
            start = f"{reasoning} {rules.terminal(_BLANK)} ({start})"
    return OutputGrammar(rules=rules, start=start, param=param, widened=tuple(dict.fromkeys(builder.widened)))


@dataclass(slots=True)
class _GrammarBuilder:
    """Builds the grammar of one request.

    Attributes:
        maximum: the model's largest coordinate; None if coordinates are not converted.
        widened: the parts of schemas that were widened, for the log.
    """

    rules: Rules
    conversation: ConversationFormat
    maximum: int | None
    is_widest: bool
    widened: list[str] = field(default_factory=list)

    def start(self, request: ChatRequest) -> str:
        """Return the rule of a completion."""
        constraint = request.output_constraint
        content = self._content(constraint) if constraint else ""
        if not request.callable_tools:
            return content
        begin = literal(self.conversation.call_begin)
        calls = self._tool_calls(request)
        if request.must_call:
            return f"{begin} {calls}"
        if content:
            return f"{content} | {begin} {calls}"
        tag = re.escape(self.conversation.call_begin).replace("/", r"\/")
        text = self.rules.terminal(f"{_ANYTHING} & ~/(.|\\n)*{tag}(.|\\n)*/")
        until_call = self.rules.lazy(f"{self.rules.terminal(_ANYTHING)} {begin}")
        return f"{text} | {until_call} {calls}"

    def _content(self, constraint: OutputConstraint) -> str:
        if constraint.kind == "choice":
            return self.rules.one_of(constraint.choices)
        if constraint.kind == "json_object":
            return any_value(self.rules, ("object",))
        with _naming(constraint.param):
            if constraint.json_schema is None:
                return matching_text(self.rules, constraint.regex)
            return self._schema(constraint.json_schema, constraint.field, strict=constraint.strict)

    def _tool_calls(self, request: ChatRequest) -> str:
        """Return the rule of what follows the first tag: one call, or several if the request allows them."""
        allowed = {tool.function.name for tool in request.callable_tools}
        calls = [
            self._tool_call(tool.function, f"tools[{index}].function.parameters")
            for index, tool in enumerate(request.tools)
            if tool.function.name in allowed
        ]
        call = self.rules.either(calls)
        if request.has_single_call:
            return call
        following = literal("\n" + self.conversation.call_begin)
        return f"{call} ({following} {call}){{0,{MAX_CALLS - 1}}}"

    def _tool_call(self, tool: ToolFunction, param: str) -> str:
        schema = tool.parameters or {"properties": {}}
        if not _allows_object(schema, strict=tool.strict):
            raise InvalidParameter(f"`{param}` must be a schema of type object.", param=param)
        schema = {**schema, "type": "object"}
        with _naming(param):
            if self.conversation.call_syntax == "xml":
                return self._xml_call(tool, schema)
            arguments = self._schema(schema, tool.name, strict=tool.strict)
        name = literal(f'"{tool.name}"')
        key = literal('"arguments"')
        end = literal("}\n" + self.conversation.call_end)
        return self.rules.add(f"{_CALL} {COLON} {name} {COMMA} {key} {COLON} {arguments} {end}")

    def _xml_call(self, tool: ToolFunction, schema: Mapping[str, Any]) -> str:
        compiler = partial(CallCompiler, end=f"</function>\n{self.conversation.call_end}")
        arguments = self._schema(schema, tool.name, strict=tool.strict, compiler=compiler)
        begin = literal(f"\n<function={tool.name}>\n")
        return self.rules.add(f"{begin} {arguments}")

    def _schema(
        self,
        schema: Mapping[str, Any],
        name: str,
        *,
        strict: bool,
        compiler: Callable[[Rules, Mapping[str, Any], list[str] | None], SchemaCompiler] = SchemaCompiler,
    ) -> str:
        if self.maximum is not None:
            schema = with_model_coordinates(schema, self.maximum, self.rules.steps)
        if strict:
            return compiler(self.rules, schema, None).compile_root()
        if self.is_widest:
            self.widened.append(f"{name}: the whole schema")
            return compiler(self.rules, schema, []).widest(schema)
        paths: list[str] = []
        rule = compiler(self.rules, schema, paths).compile_root()
        self.widened += [f"{name}: {path or 'the whole schema'}" for path in paths]
        return rule


def _allows_object(schema: Mapping[str, Any], *, strict: bool) -> bool:
    types = schema.get("type", "object")
    names = [types] if isinstance(types, str) else types
    # Without `strict`, an unknown type may be one of objects.
    return isinstance(names, list) and ("object" in names or not (strict or all(name in TYPES for name in names)))


@contextlib.contextmanager
def _naming(param: str) -> Iterator[None]:
    try:
        yield
    except SchemaError as error:
        location = f" at {error.path!r}" if error.path else ""
        raise InvalidParameter(f"`{param}`{location} {error.reason}.", param=param) from None
