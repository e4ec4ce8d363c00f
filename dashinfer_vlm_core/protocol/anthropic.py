"""Requests of Anthropic's Messages API, which become chat requests.

| Field | In the chat request |
|---|---|
| those of `_SAME` | the same |
| `system`, `messages` | `messages` |
| `stop_sequences` | `stop` |
| `tools`, `tool_choice` | `tools`, `tool_choice`, `parallel_tool_calls` |
| `output_config.format`, `output_format` | `response_format` |
| `output_config.effort` | `reasoning_effort` |
| those of `IGNORED_IN_ANTHROPIC` | nothing |
| those of `REJECTED_IN_ANTHROPIC` | an error |
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from .anthropic_blocks import AnthropicMessage, Blocks, MessageConverter
from .base import Array, Count, Name, RequestModel, Text
from .body import CheckedBody
from .converted import ChatCall, ConvertedMessage, join_instructions, message_renames, rename_prefix
from .fields import IGNORED_FIELDS, REJECTED_FIELDS, RETURNED_FIELDS, RejectedFields, reject_fields
from .output import MAX_TOOLS, JsonSchema
from .request import DEFAULT_MODEL, MAX_MESSAGES, ChatRequest
from .thinking import Thinking
from .validation_errors import invalid, renamed_errors

_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

REJECTED_IN_ANTHROPIC: RejectedFields = {
    # Anthropic's fields.
    "container": ((), "The server runs no code. Remove it."),
    "context_management": (({"edits": []}, _KEEP_ALL), "Messages are not edited. Remove it, and send fewer."),
    "mcp_servers": (([],), "Connect to MCP servers in the client, and send their tools as `tools`."),
    "service_tier": (("auto", "standard_only"), 'There is only one tier. Remove it, or use "auto".'),
    "speed": (("standard",), "There is only one speed. Remove it."),
    # Fields of chat completion requests, which have another name here.
    "logprobs": ((False,), "Use /v1/chat/completions."),
    "max_completion_tokens": ((), "Use `max_tokens`."),
    "n": ((1,), "A response has one message. Send several requests."),
    "parallel_tool_calls": ((), "Use `tool_choice.disable_parallel_tool_use`."),
    "reasoning_effort": ((), "Use `output_config.effort`."),
    "response_format": ((), "Use `output_config.format`."),
    "stop": ((), "Use `stop_sequences`."),
    "stream_options": ((), "The usage is always sent. Remove it."),
    "top_logprobs": ((), "Use /v1/chat/completions."),
}
IGNORED_IN_ANTHROPIC = frozenset({"cache_control", "diagnostics", "inference_geo", "user_profile_id", "workspace_id"})
"""Fields of Anthropic's API that do not affect the response: here, prefixes are always cached."""

_REJECTED_TOOLS: RejectedFields = {
    "type": (("custom",), "Tools that Anthropic defines are not available. Send a tool with `name` and `input_schema`.")
}
_PASSED_ON = ChatRequest.model_fields.keys() | REJECTED_FIELDS.keys() | IGNORED_FIELDS
"""Fields that the chat request accepts, ignores or rejects."""

_SAME = ("model", "max_tokens", "stream", "temperature", "top_k", "top_p", "thinking")
"""Fields with the same name and meaning in chat requests."""

_RENAMES = (
    ("stop", "stop_sequences"),
    ("tool_choice.function", "tool_choice"),
    ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    ("reasoning_effort", "output_config.effort"),
)


class OutputFormat(RequestModel):
    """The format of the text, which is enforced."""

    type: Literal["json_schema"]
    json_schema: JsonSchema = Field(alias="schema")

    def to_chat(self) -> dict[str, Any]:
        schema = {"name": "output", "schema": self.json_schema, "strict": True}
        return {"type": self.type, "json_schema": schema}


class OutputConfig(RequestModel):
    effort: Text | None = None
    format: OutputFormat | None = None


class ToolDefinition(RequestModel):
    """A tool of the client. The chat request checks its name and schema."""

    _accepted_fields: ClassVar[Collection[str]] = RETURNED_FIELDS | {"eager_input_streaming", "input_examples"}

    type: Text = "custom"
    name: Text = ""
    description: Text | None = None
    input_schema: JsonSchema | None = None
    strict: bool | None = None

    def to_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "strict": self.strict}
        return {"type": "function", "function": function | {"parameters": self.input_schema}}


class AnthropicToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False

    def to_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class AnthropicRequest(CheckedBody):
    """A request of the Messages API. `to_chat` validates what chat requests have too, such as images and schemas.

    Fields that only chat requests of this package define, such as `seed`, are passed to the chat request.
    """

    _rejected_fields: ClassVar[RejectedFields] = REJECTED_IN_ANTHROPIC
    _accepted_fields: ClassVar[Collection[str]] = _PASSED_ON | REJECTED_IN_ANTHROPIC.keys() | IGNORED_IN_ANTHROPIC

    model: Name = DEFAULT_MODEL
    messages: Annotated[Array[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Blocks | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop_sequences: Array[Text] = ()
    tools: Annotated[Array[ToolDefinition], Field(max_length=MAX_TOOLS)] = ()
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None

    @model_validator(mode="after")
    def _check_consistency(self) -> AnthropicRequest:
        for index, tool in enumerate(self.tools):
            reject_fields(vars(tool), _REJECTED_TOOLS, prefix=f"tools[{index}].")
            if tool.input_schema is None:
                raise invalid(f"tools[{index}].input_schema", "is required.")
        if self.tool_choice and self.tool_choice.type == "tool" and self.tool_choice.name is None:
            raise invalid("tool_choice.name", "is required.")
        if self.output_format and self.output_config.format:
            raise invalid("output_format", "and `output_config.format` are synonyms. Pass one of them.")
        if self.messages[-1].role == "assistant":
            raise invalid(
                f"messages[{len(self.messages) - 1}].role",
                "is 'assistant', but a response cannot continue a message. End with a message of the user.",
            )
        return self

    def to_chat(self) -> ChatCall:
        """Convert it to a chat request; a streamed one sends its usage at the beginning and at the end.

        Raises:
            InvalidParameter, UnsupportedParameter: like `ChatRequest.parse`; `param` has the names of this request.
        """
        converter = MessageConverter()
        if self.system is not None:
            converter.add_system(self.system, "system")
        for index, message in enumerate(self.messages):
            converter.add(message, f"messages[{index}]")
        messages = join_instructions(converter.messages)
        renames = (*message_renames(messages), *self._tool_renames(), *self._format_renames(), *_RENAMES)
        rename = partial(rename_prefix, renames=renames)
        with renamed_errors(rename):
            chat = ChatRequest.parse(self._chat_fields(messages))
        return ChatCall(chat=chat, rename=rename)

    def _chat_fields(self, messages: Sequence[ConvertedMessage]) -> dict[str, Any]:
        passed_on = _PASSED_ON - REJECTED_IN_ANTHROPIC.keys()
        fields = {name: value for name, value in (self.model_extra or {}).items() if name in passed_on}
        fields |= {name: getattr(self, name, None) for name in _SAME}
        output_format = self.output_format or self.output_config.format
        fields |= {
            "messages": [message.body for message in messages],
            "stop": self.stop_sequences or None,
            "reasoning_effort": self.output_config.effort,
            "response_format": output_format and output_format.to_chat(),
            "tool_choice": self.tool_choice and self.tool_choice.to_chat(),
        }
        if self.stream:
            fields["stream_options"] = {"include_usage": True, "include_initial_usage": True}
        if self.tools:
            is_single = self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use
            fields |= {
                "tools": [tool.to_chat() for tool in self.tools],
                "parallel_tool_calls": False if is_single else None,
            }
        return fields

    def _tool_renames(self) -> list[tuple[str, str]]:
        names = [f"tools[{index}]" for index in range(len(self.tools))]
        schemas = [(f"{name}.function.parameters", f"{name}.input_schema") for name in names]
        return schemas + [(f"{name}.function", name) for name in names]

    def _format_renames(self) -> list[tuple[str, str]]:
        name = "output_format" if self.output_format else "output_config.format"
        return [("response_format.json_schema", name), ("response_format", name)]


class CountTokensRequest(AnthropicRequest):
    """A request whose tokens are to be counted."""

    max_tokens: Count | None = None


class MessagesRequest(AnthropicRequest):
    """A request to create a message."""

    max_tokens: Count
