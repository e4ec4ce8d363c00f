"""Tools and calls as text, in the words of a `ConversationFormat`.

    tools, messages ─▶ messages of plain text, for templates that know nothing of tools

`calls` reads them from answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeAlias

from .conversation import HERMES, ConversationFormat

Message: TypeAlias = dict[str, Any]


def with_objects(messages: list[Message]) -> list[Message]:
    """The messages, with the arguments of calls as objects: a string would be spelled as one once more.

    Arguments that are no JSON stay what they are.
    """
    return [
        message | {"tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def as_text(messages: list[Message], tools: Sequence[Any], conversation: ConversationFormat = HERMES) -> list[Message]:
    """The conversation in messages of system, user and assistant alone, without any field but the content.

    Args:
        messages: as `ChatRequest.template_messages` gives them, after `with_objects`.
        tools: what may be called; told at the end of the system message.
        conversation: how the model writes calls.
    """
    if tools:
        first, rest = messages[:1], messages[1:]
        if not first or first[0]["role"] != "system":
            first, rest = [{"role": "system", "content": conversation.default_system}], messages
        told = conversation.tools_prompt.format(
            tools="\n".join(map(_spelled, tools)), begin=conversation.call_begin, end=conversation.call_end
        )
        messages = [{"role": "system", "content": _joined([first[0]["content"], told])}, *rest]
    groups = [(of_tools, list(group)) for of_tools, group in groupby(messages, key=lambda item: item["role"] == "tool")]
    return [
        turn
        for of_tools, group in groups
        for turn in (
            [_results(group, conversation)] if of_tools else [_without_calls(item, conversation) for item in group]
        )
    ]


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}}


def _without_calls(message: Message, conversation: ConversationFormat) -> Message:
    calls = [
        "\n".join(
            [
                conversation.call_begin,
                _spelled({key: call["function"][key] for key in ("name", "arguments")}),
                conversation.call_end,
            ]
        )
        for call in message.get("tool_calls", ())
    ]
    if not calls:
        return message
    content = message["content"]
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return plain | {"content": _joined([content, "\n" if content else "", "\n".join(calls)])}


def _results(messages: list[Message], conversation: ConversationFormat) -> Message:
    """One turn of the user for the results of calls that were made together."""
    pieces: list[Any] = []
    for message in messages:
        begin, end = f"{conversation.result_begin}\n", f"\n{conversation.result_end}"
        pieces += ["\n" if pieces else "", begin, message["content"], end]
    return {"role": "user", "content": _joined(pieces)}


def _joined(contents: list[Any]) -> str | list[Any]:
    """Contents, strings or lists of parts, as one: a string if all of them are."""
    if all(isinstance(content, str) for content in contents):
        return "".join(contents)
    parts: list[Any] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _spelled(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
