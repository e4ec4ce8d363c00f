"""Render tools and tool calls as text in a `ConversationFormat`, for chat templates that do not support tools.

    tools, messages ─▶ messages of plain text

`structured_output.tool_parser` parses tool calls from completions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeAlias

from .conversation import HERMES, ConversationFormat

Message: TypeAlias = dict[str, Any]


def parse_tool_arguments(messages: list[Message], conversation: ConversationFormat = HERMES) -> list[Message]:
    """Parse the arguments of tool calls to objects, because templates would encode a string as JSON a second time.

    Empty arguments are an empty object, and those that are not valid JSON stay strings. Since templates with calls in
    XML accept only objects, others become the argument `arguments` there.
    """
    return [
        message | {"tool_calls": [_parse_arguments(call, conversation) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def render_tools_as_text(
    messages: list[Message], tools: Sequence[Any], conversation: ConversationFormat = HERMES
) -> list[Message]:
    """Convert a conversation to system, user and assistant messages that have only content.

    Args:
        messages: the result of `ChatRequest.template_messages`, after `parse_tool_arguments`.
        tools: available tools, described at the end of the system message.
        conversation: the model's tool call format.
    """
    if tools:
        if not messages or messages[0]["role"] != "system":
            messages = [{"role": "system", "content": conversation.default_system}, *messages]
        tools_prompt = conversation.tools_prompt.format(
            tools="\n".join(map(_to_json, tools)), begin=conversation.call_begin, end=conversation.call_end
        )
        described = _join_contents([messages[0]["content"], tools_prompt])
        messages = [{"role": "system", "content": described}, *messages[1:]]
    converted: list[Message] = []
    for is_tool, group in groupby(messages, key=lambda item: item["role"] == "tool"):
        if is_tool:
            converted.append(_results_as_user_message(list(group), conversation))
        else:
            converted += [_calls_as_text(item, conversation) for item in group]
    return converted


def _parse_arguments(call: dict[str, Any], conversation: ConversationFormat) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    try:
        parsed = json.loads(arguments or "{}")
        if r"\u" in arguments:  # half of a surrogate pair in an escape sequence is no text
            json.dumps(parsed, ensure_ascii=False).encode()
        arguments = parsed
    except (ValueError, RecursionError):
        pass
    if conversation.call_syntax == "xml" and not isinstance(arguments, dict):
        arguments = {"arguments": arguments} if arguments else {}
    return call | {"function": function | {"arguments": arguments}}


def _calls_as_text(message: Message, conversation: ConversationFormat) -> Message:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    if not functions:
        return message
    to_text = _xml_call if conversation.call_syntax == "xml" else _json_call
    calls = "\n".join(f"{conversation.call_begin}\n{to_text(each)}\n{conversation.call_end}" for each in functions)
    content = message["content"]
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return plain | {"content": _join_contents([content, conversation.call_separator if content else "", calls])}


def _json_call(function: dict[str, Any]) -> str:
    return _to_json({"name": function["name"], "arguments": function["arguments"]})


def _xml_call(function: dict[str, Any]) -> str:
    parameters = "".join(
        f"<parameter={name}>\n{value if isinstance(value, str) else _to_json(value)}\n</parameter>\n"
        for name, value in function["arguments"].items()
    )
    return f"<function={function['name']}>\n{parameters}</function>"


def _results_as_user_message(messages: list[Message], conversation: ConversationFormat) -> Message:
    pieces: list[Any] = []
    for message in messages:
        begin = "\n" if pieces else ""
        pieces += [f"{begin}{conversation.result_begin}\n", message["content"], f"\n{conversation.result_end}"]
    return {"role": "user", "content": _join_contents(pieces)}


def _join_contents(contents: list[Any]) -> str | list[Any]:
    if all(isinstance(content, str) for content in contents):
        return "".join(contents)
    parts: list[Any] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
