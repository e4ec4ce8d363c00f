"""The syntaxes of tool calls: what stands between the tags of a call in a `ConversationFormat`.

Calls that follow a grammar are read piece by piece, since they will be valid. Other calls are read when they are
complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from ..tokenization.conversation import ConversationFormat
from ..tokenization.stop_strings import length_held
from .grammar.parameters import PARAMETER_END, STRING, parameter_json, parameter_types, reject_constant
from .grammar.rules import Steps

Tools: TypeAlias = Mapping[str, Mapping[str, Any] | None]
"""The schemas of the parameters of tools by their names; None for tools without parameters."""


class Call(NamedTuple):
    """A complete call, with its arguments as JSON."""

    name: str
    arguments: str


class Piece(NamedTuple):
    """What was read of the arguments of a call.

    Attributes:
        length: the number of characters.
        arguments: their text as JSON; all pieces together are an object.
        is_last: whether the call ends there.
    """

    length: int
    arguments: str
    is_last: bool


class ArgumentsReader(Protocol):
    """Reads the arguments of a call that follows a grammar."""

    def read(self, text: str) -> Piece:
        """Read the beginning of the text that was not read yet, as far as it is certain."""
        ...

    def flush(self, text: str) -> str:
        """Return what the rest of a truncated call adds to the arguments."""
        ...


class CallSyntax(Protocol):
    """A syntax of calls.

    Attributes:
        named: matches the beginning of a call that follows a grammar, up to the name, its first group.
        head: matches the same, up to the arguments.
    """

    named: re.Pattern[str]
    head: re.Pattern[str]

    def parse(self, text: str) -> Call | None:
        """Parse a complete call, without its tags; None if it is malformed."""
        ...

    def arguments(self, name: str) -> ArgumentsReader:
        """Return a reader of the arguments of the tool `name`."""
        ...


def call_syntax(conversation: ConversationFormat, tools: Tools) -> CallSyntax:
    """Return the syntax of the calls of `tools`."""
    return (_XmlCalls if conversation.call_syntax == "xml" else _JsonCalls)(conversation, tools)


class _JsonCalls:
    def __init__(self, conversation: ConversationFormat, tools: Tools) -> None:
        self._tools = tools
        self._end = "}\n" + conversation.call_end
        name = rf'\s*{re.escape(conversation.call_begin)}\s*\{{"name": ?"([^"\\]*)"'
        self.named = re.compile(name)
        self.head = re.compile(name + r', ?"arguments": ?(?=\{)')

    def parse(self, text: str) -> Call | None:
        call = _parse(text)
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in self._tools or not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        return Call(name, text.encode(errors="replace").decode())  # half of a surrogate pair cannot be sent

    def arguments(self, _name: str) -> ArgumentsReader:
        return _JsonArguments(self._end)


class _JsonArguments:
    def __init__(self, end: str) -> None:
        self._end = end
        self._text: list[str] = []

    def read(self, text: str) -> Piece:
        piece, tag, _ = text.partition(self._end)
        if not tag:
            piece = piece[: len(piece) - length_held(piece, (self._end,))]
        self._text.append(piece)
        return Piece(len(piece + tag), piece, bool(tag))

    def flush(self, text: str) -> str:
        is_argument = _parse("".join(self._text)) is None  # a brace ends an inner object, or the call
        return text if is_argument else ""


class _XmlCalls:
    def __init__(self, conversation: ConversationFormat, tools: Tools) -> None:
        self._tools = tools
        self._end = f"</function>\n{conversation.call_end}"
        self.named = self.head = re.compile(rf"\s*{re.escape(conversation.call_begin)}\s*<function=([^>\n]+)>\n")

    def parse(self, text: str) -> Call | None:
        call = _FUNCTION.fullmatch(text)
        parameters = _parse_parameters(call[2].lstrip()) if call and call[1] in self._tools else None
        if call is None or parameters is None:
            return None
        types_of = self._types_of(call[1])
        pairs = [f"{_quoted(name)}: {parameter_json(value, types_of(name))}" for name, value in parameters.items()]
        return Call(call[1], f"{{{', '.join(pairs)}}}")

    def arguments(self, name: str) -> ArgumentsReader:
        return _XmlArguments(self._end, self._types_of(name))

    def _types_of(self, tool: str) -> Callable[[str], frozenset[str]]:
        schema = self._tools[tool] or {}
        return lambda name: parameter_types(schema, name, Steps())


class _XmlArguments:
    def __init__(self, end: str, types_of: Callable[[str], frozenset[str]]) -> None:
        self._end = end
        self._types_of = types_of
        self._types: frozenset[str] | None = None  # of the parameter that is being read
        self._value: list[str] = []  # its text so far, if it is no string
        self._separator = "{"

    def read(self, text: str) -> Piece:
        length = 0
        arguments = ""
        while True:
            piece = (self._read_tag if self._types is None else self._read_value)(text[length:])
            length += piece.length
            arguments += piece.arguments
            if piece.is_last or not piece.length:
                return Piece(length, arguments, piece.is_last)

    def flush(self, _text: str) -> str:
        return ""  # it may be the beginning of a tag

    def _read_tag(self, text: str) -> Piece:
        if text.startswith(self._end):
            return Piece(len(self._end), "{}" if self._separator == "{" else "}", True)
        tag = _PARAMETER_BEGIN.match(text)
        if tag is None:
            return Piece(0, "", False)
        self._types = self._types_of(tag[1])
        quote = '"' if self._types == STRING else ""
        begin = f"{self._separator}{_quoted(tag[1])}: {quote}"
        self._separator = ", "
        return Piece(tag.end(), begin, False)

    def _read_value(self, text: str) -> Piece:
        assert self._types is not None, "a parameter has begun"
        value, tag, _ = text.partition(PARAMETER_END)
        if not tag:
            value = value[: len(value) - length_held(value, (PARAMETER_END,))]
        if self._types == STRING:
            arguments = _escaped(value) + ('"' if tag else "")
        else:
            self._value.append(value)
            arguments = parameter_json("".join(self._value), self._types) if tag else ""
        if tag:
            self._types = None
            self._value = []
        return Piece(len(value + tag), arguments, False)


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER_BEGIN = re.compile(r"<parameter=([^>\n]+)>\n")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def _parse_parameters(text: str) -> dict[str, str] | None:
    found: dict[str, str] = {}
    position = 0
    while position < len(text):
        parameter = _PARAMETER.match(text, position)
        if parameter is None:
            return None
        found[parameter[1]] = parameter[2]
        position = parameter.end()
    return found


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return _quoted(text)[1:-1]


def _parse(text: str) -> object:
    try:
        return json.loads(text, parse_constant=reject_constant)
    except (ValueError, RecursionError):
        return None
