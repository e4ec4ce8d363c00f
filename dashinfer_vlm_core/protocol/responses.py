"""ResponsesRequest: a validated request of the Responses API, which becomes a chat request."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from openai.types.responses import ResponseIncludable
from pydantic import Field, model_validator
from typing_extensions import Self

from .base import Array, Count, Name, RequestModel, StringOrArray, StringOrObject, Text
from .body import CheckedBody, RequestBody
from .converted import ChatCall, ConvertedMessage, join_instructions, message_renames, rename_prefix
from .fields import IGNORED_FIELDS, REJECTED_FIELDS, RejectedFields, reject_fields
from .output import MAX_TOOLS, JsonSchema
from .request import DEFAULT_MODEL, MAX_MESSAGES, ChatRequest, StreamOptions, check_stream_options
from .response_items import FILE_FIELDS, InputItem, ItemConverter
from .validation_errors import invalid, renamed_errors

LOGPROBS = "message.output_text.logprobs"

REJECTED_IN_RESPONSES: RejectedFields = {
    # OpenAI's fields.
    "access_programs": (({"cyber": "standard"},), "There are no access programs. Remove it."),
    "background_options": (
        ({"completion_window": "soonest"},),
        "Such responses begin at once. Remove it.",
    ),
    "context_management": (([],), "Requests are not compacted. Use `truncation`."),
    "conversation": ((), "Conversations are not stored. Use `previous_response_id`, or send all items."),
    "image": (
        ({"context_compression": "auto"}, {"context_compression": "disabled"}),
        "Images are not compressed. Remove it, and limit their size with `mm_processor_kwargs`.",
    ),
    "moderation": ((), "Moderation is not available. Remove it."),
    "prompt": ((), "Prompt templates are not stored. Use `instructions`."),
    "service_tier": (("auto", "default"), 'There is only one tier. Remove it, or use "auto".'),
    # Fields of chat completion requests, which have another name here.
    "logprobs": ((False,), f'Use `include` with "{LOGPROBS}".'),
    "max_completion_tokens": ((), "Use `max_output_tokens`."),
    "max_tokens": ((), "Use `max_output_tokens`."),
    "messages": ((), "Use `input`."),
    "n": ((1,), "A response has one output. Send several requests."),
    "reasoning_effort": ((), "Use `reasoning.effort`."),
    "response_format": ((), "Use `text.format`."),
    "verbosity": ((), "Use `text.verbosity`."),
}
_NO_SUMMARY = 'Reasoning is not summarized, it is returned as a whole. Use "auto", or remove it.'
_REJECTED_IN_REASONING: RejectedFields = {
    "summary": (("auto",), _NO_SUMMARY),
    "generate_summary": (("auto",), _NO_SUMMARY),
    "context": (("auto",), "Remove it."),
    "mode": (("standard",), "Remove it."),
}
_REJECTED_IN_TEXT: RejectedFields = {
    "verbosity": (("medium",), "The models cannot control it. Describe the desired length in `instructions`.")
}
_REJECTED_TYPES: RejectedFields = {"type": (("function",), "Only functions are available.")}
_REJECTED_CHOICES: RejectedFields = {"type": (("function", "allowed_tools"), "Only functions are available.")}

SUMMARY_PROMPT = (
    "Summarize this conversation so that it can be continued from the summary alone. Include every fact, name, number"
    " and decision, and what the images and videos show."
)

_SHARED = ("model", "temperature", "top_p", "presence_penalty", "frequency_penalty")
"""Fields with the same name and meaning in chat requests."""

_PASSED_ON = ChatRequest.model_fields.keys() | REJECTED_FIELDS.keys() | IGNORED_FIELDS
"""Fields that the chat request accepts, ignores or rejects."""


class TextFormat(RequestModel):
    """The format of the output text; a JSON schema has `name` and `schema`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Any = None
    json_schema: Any = Field(default=None, alias="schema")
    description: Any = None
    strict: Any = None

    def to_chat(self) -> dict[str, Any]:
        schema = self.model_dump(exclude={"type"})
        return {"type": self.type, "json_schema": schema if self.type == "json_schema" else None}


class TextConfig(RequestModel):
    format: TextFormat = TextFormat()
    verbosity: Literal["low", "medium", "high"] = "medium"


class ReasoningConfig(RequestModel):
    """How a model that reasons does so. Other models support none of it."""

    effort: Text | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Text | None = None
    mode: Text | None = None


class FunctionTool(RequestModel):
    """A function that the model can call. The chat request checks its name and parameters."""

    type: Text
    name: Text = ""
    description: Text | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None

    def to_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"})}


class ToolReference(RequestModel):
    type: Text = "function"
    name: Name

    def to_chat(self) -> dict[str, Any]:
        return {"type": self.type, "function": {"name": self.name}}


class ToolSelection(RequestModel):
    """A tool that must be called (`function`), or the tools that may be called (`allowed_tools`)."""

    type: Text
    name: Name | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[Array[ToolReference], Field(max_length=MAX_TOOLS)] = ()


_Input: TypeAlias = StringOrArray[Text, Annotated[Array[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]]
_MetadataKey = Annotated[Text, Field(max_length=64)]
_MetadataValue = Annotated[Text, Field(max_length=512)]


class ResponsesRequest(CheckedBody):
    """A request to create a response. `to_chat` validates what chat requests have too, such as images and schemas.

    Fields that only chat requests of this package define, such as `top_k`, are passed to the chat request.
    """

    _rejected_fields: ClassVar[RejectedFields] = REJECTED_IN_RESPONSES
    _accepted_fields: ClassVar[Collection[str]] = _PASSED_ON | REJECTED_IN_RESPONSES.keys()

    input: _Input
    model: Name = DEFAULT_MODEL
    instructions: Text | None = None
    previous_response_id: Name | None = None
    store: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    background: bool = False
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    text: TextConfig = TextConfig()
    tools: Annotated[Array[FunctionTool], Field(max_length=MAX_TOOLS)] = ()
    tool_choice: StringOrObject[Literal["none", "auto", "required"], ToolSelection] = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: Count | None = None
    reasoning: ReasoningConfig = ReasoningConfig()
    include: Annotated[Array[ResponseIncludable], Field(max_length=16)] = ()
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], Field(max_length=16)] = Field(default_factory=dict)
    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

    @model_validator(mode="after")
    def _check_consistency(self) -> ResponsesRequest:
        for index, item in enumerate(self.items()):
            if item.is_reference and not item.id:
                raise invalid(f"input[{index}].id", "is required.")
        for index, tool in enumerate(self.tools):
            reject_fields(vars(tool), _REJECTED_TYPES, prefix=f"tools[{index}].")
        if isinstance(self.tool_choice, ToolSelection):
            reject_fields(vars(self.tool_choice), _REJECTED_CHOICES, prefix="tool_choice.")
            if self.tool_choice.type == "function" and self.tool_choice.name is None:
                raise invalid("tool_choice.name", "is required.")
        reject_fields(vars(self.text), _REJECTED_IN_TEXT, prefix="text.")
        reject_fields(vars(self.reasoning), _REJECTED_IN_REASONING, prefix="reasoning.")
        check_stream_options(self.stream_options, stream=self.stream)
        if self.background and not self.store:
            raise invalid("background", "requires `store`, since the response is retrieved later. Remove one of them.")
        return self

    @property
    def has_events(self) -> bool:
        """Whether the events of the response are sent, or kept for clients that ask for them later."""
        return self.stream or self.background

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include or self.top_logprobs > 0

    @property
    def wants_summary(self) -> bool:
        """Whether the request asks for a summary of the reasoning, which requires a model that reasons."""
        return bool(self.reasoning.summary or self.reasoning.generate_summary)

    def items(self) -> tuple[InputItem, ...]:
        """Return the input as items."""
        return _items(self.input)

    def with_references(self, stored: Mapping[str, Mapping[str, Any]]) -> ResponsesRequest:
        """Return the request with stored items, given by ID, in place of the references to them."""
        found = {item_id: InputItem.model_validate(item) for item_id, item in stored.items()}
        items = tuple(found[item.id or ""] if item.is_reference else item for item in self.items())
        return self.model_copy(update={"input": items})

    def to_chat(self, history: Sequence[InputItem] = (), *, dropped_turns: int = 0) -> ResponsesCall:
        """Convert it to a chat request.

        Args:
            history: the items of the previous response and of those before it.
            dropped_turns: how many of the oldest turns to leave out. A turn begins with a message of the user.

        Raises:
            InvalidParameter, UnsupportedParameter: like `ChatRequest.parse`; `param` has the names of this request.
        """
        converter = ItemConverter()
        if self.instructions is not None:
            converter.add_instructions(self.instructions)
        for index, item in enumerate(history):
            converter.add(item, f"previous_response_id[{index}]")
        for index, item in enumerate(self.items()):
            converter.add(item, f"input[{index}]")
        if isinstance(self.input, str):
            converter.messages[-1].sources = [(".content", "input"), ("", "input")]
        messages = join_instructions(_without_turns(converter.messages, dropped_turns))
        rename = partial(_rename, renames=(*message_renames(messages), *_RENAMES))
        with renamed_errors(rename):
            chat = ChatRequest.parse(self._chat_fields(messages))
        turns = sum(message.body["role"] == "user" for message in converter.messages)
        return ResponsesCall(chat=chat, rename=rename, turns=turns)

    def _chat_fields(self, messages: Sequence[ConvertedMessage]) -> dict[str, Any]:
        extra = self.model_extra or {}
        fields = {name: value for name, value in extra.items() if name not in REJECTED_IN_RESPONSES}
        fields |= {name: getattr(self, name) for name in _SHARED}
        fields |= {
            "messages": [message.body for message in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort,
        }
        if self.wants_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.text.format.type != "text":
            fields["response_format"] = self.text.format.to_chat()
        if self.tools:
            fields |= {
                "tools": [tool.to_chat() for tool in self.tools],
                "parallel_tool_calls": None if self.parallel_tool_calls else False,
            }
        return fields | {"tool_choice": self._chat_tool_choice()}

    def _chat_tool_choice(self) -> Any:
        choice = self.tool_choice
        if not isinstance(choice, ToolSelection):
            return choice
        if choice.type == "allowed_tools":
            allowed = {"mode": choice.mode, "tools": [tool.to_chat() for tool in choice.tools]}
            return {"type": choice.type, "allowed_tools": allowed}
        return {"type": "function", "function": {"name": choice.name}}


class CompactRequest(RequestBody):
    """A request to replace a conversation by a summary, which the model writes."""

    _accepted_fields: ClassVar[Collection[str]] = IGNORED_FIELDS | {"service_tier"}

    model: Name
    input: _Input | None = None
    instructions: Text | None = None
    previous_response_id: Name | None = None
    prompt_cache_key: Text | None = None

    @classmethod
    def parse(cls, data: object) -> Self:
        """Validate a request from JSON. Raises the same errors as `ResponsesRequest.parse`."""
        request = super().parse(data)
        if request.input is None and request.previous_response_id is None:
            raise invalid("input", "or `previous_response_id` is required.")
        return request

    def to_summary_request(self, effort: str | None) -> ResponsesRequest:
        """Return the request that lets the model write the summary, with this effort for reasoning."""
        return ResponsesRequest.parse(
            {
                "model": self.model,
                "input": (*_items(self.input or ()), _user_message(SUMMARY_PROMPT)),
                "instructions": self.instructions,
                "previous_response_id": self.previous_response_id,
                "reasoning": {"effort": effort},
                "store": False,
            }
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponsesCall(ChatCall):
    """A chat request in place of a responses request; it is streamed, with its usage.

    Attributes:
        turns: the number of the user's messages, including dropped ones.
    """

    turns: int


_RENAMES = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("tool_choice.function", "tool_choice"),
    ("tool_choice.allowed_tools", "tool_choice"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    ("logprobs", "include"),
    ("messages", "input"),
)
_TOOL_FIELD = re.compile(r"(?<=tools)(\[\d+\])\.function")
_URL = re.compile(rf"(\.(?:image|video)_url)\.url$|\.file(\.(?:{'|'.join(FILE_FIELDS)}))$|\.file$")


def _items(value: str | tuple[InputItem, ...]) -> tuple[InputItem, ...]:
    return (_user_message(value),) if isinstance(value, str) else value


def _user_message(text: str) -> InputItem:
    return InputItem(type="message", role="user", content=text)


def _rename(path: str, renames: Sequence[tuple[str, str]]) -> str:
    renamed = rename_prefix(_TOOL_FIELD.sub(r"\1", path, count=1), renames)
    return _URL.sub(r"\1\2", renamed)


def _without_turns(messages: Sequence[ConvertedMessage], dropped: int) -> list[ConvertedMessage]:
    starts = [index for index, message in enumerate(messages) if message.body["role"] == "user"]
    first = starts[dropped] if dropped else 0
    return [message for index, message in enumerate(messages) if index >= first or message.is_instruction]
