"""How a model writes what is no plain text: calls of tools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationFormat:
    """How a model was trained to call tools: a JSON object with `name` and `arguments` between two tags. The defaults
    are those of the Hermes format.

    Attributes:
        call_begin: tag in front of a call.
        call_end: tag behind it.
        result_begin: tag in front of a result.
        result_end: tag behind it.
        default_system: what the chat template says where a conversation has no system message; used where tools have to
            be described by a template that knows nothing of them.
        tools_prompt: describes tools in the system message for such templates; `{tools}` takes one JSON object per
            line, `{begin}` and `{end}` the tags of a call.
    """

    call_begin: str = "<tool_call>"
    call_end: str = "</tool_call>"
    result_begin: str = "<tool_response>"
    result_end: str = "</tool_response>"
    default_system: str = "You are a helpful assistant."
    tools_prompt: str = """

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within {begin}{end} XML tags:
{begin}
{{"name": <function-name>, "arguments": <args-json-object>}}
{end}"""


HERMES = ConversationFormat()
"""What most models of this kind were trained on."""
