"""How a model writes tool calls and reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_TOOLS = """

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationFormat:
    """The format of a model's tool calls and of its reasoning.

    The defaults are the Hermes format, and the tags of Qwen's models for reasoning.

    Attributes:
        call_syntax: what a call is between its tags: "json" is an object with `name` and `arguments`, "xml" the element
            `<function=name>` with an element `<parameter=name>` for each argument.
        call_begin: tag before a call.
        call_end: tag after a call.
        call_separator: text between the content and the first call.
        result_begin: tag before a result.
        result_end: tag after a result.
        reasoning_begin: tag before the reasoning. The model reasons if its chat template contains a tag.
        reasoning_end: tag after the reasoning.
        default_system: the chat template's default system message; used to describe tools if the template does not
            support them.
        tools_prompt: describes tools in the system message for such templates; `{tools}` is replaced by one JSON object
            per line, `{begin}` and `{end}` by the tags of a call.
    """

    call_syntax: Literal["json", "xml"] = "json"
    call_begin: str = "<tool_call>"
    call_end: str = "</tool_call>"
    call_separator: str = "\n"
    result_begin: str = "<tool_response>"
    result_end: str = "</tool_response>"
    reasoning_begin: str = "<think>"
    reasoning_end: str = "</think>"
    default_system: str = "You are a helpful assistant."
    tools_prompt: str = f"""{_TOOLS}For each function call, return a json object with function name and arguments\
 within {{begin}}{{end}} XML tags:
{{begin}}
{{{{"name": <function-name>, "arguments": <args-json-object>}}}}
{{end}}"""

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags: templates search for them in messages."""
        calls = self.call_begin, self.call_end, self.result_begin, self.result_end
        return (*calls, self.reasoning_begin, self.reasoning_end)


HERMES = ConversationFormat()
"""The format that most vision language models were trained on."""

QWEN_XML = ConversationFormat(
    call_syntax="xml",
    call_separator="\n\n",
    tools_prompt=f"""{_TOOLS}For each function call, return the function name and each argument within {{begin}}{{end}}\
 XML tags. Write strings as they are, and other values as JSON:
{{begin}}
<function=function-name>
<parameter=argument-name>
value
</parameter>
</function>
{{end}}""",
)
"""The format of Qwen3-Coder and of the models since Qwen3.5."""
