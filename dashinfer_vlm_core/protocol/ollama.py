"""Requests of Ollama's API to chat and to generate, which become chat requests.

| Field | In the chat request |
|---|---|
| `model`, `tools`, `logprobs`, `top_logprobs` | the same |
| `messages`, or `system`, `prompt` and `images` | `messages` |
| `options` | see `ollama_options` |
| `format` | `response_format` |
| `think` | `thinking`, or `reasoning_effort` for a level |
| `keep_alive` | nothing; 0 unloads the model |
| those of `REJECTED_IN_OLLAMA` | an error |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from .base import Array, Name, RequestModel, StringOrObject, Text
from .body import CheckedBody
from .converted import ChatCall, ConvertedMessage, message_renames, rename_prefix
from .field_names import UnknownMedia
from .fields import IGNORED_FIELDS, REJECTED_FIELDS, RejectedFields
from .ollama_messages import UNKNOWN_MEDIA, Images, OllamaMessage, convert_messages, convert_parts
from .ollama_options import OPTION_RENAMES, SAME_OPTIONS, KeepAlive, OllamaOptions, is_zero
from .output import MAX_TOOLS, JsonSchema, Tool, ToolFunction
from .request import MAX_MESSAGES, ChatRequest
from .validation_errors import invalid, renamed_errors

_NO_IMAGES = "The models generate text. Remove it."
_NO_SHIFT = "Prompts are never truncated. Remove it, and send fewer messages."

REJECTED_IN_OLLAMA: RejectedFields = {
    # Ollama's fields.
    "_debug_render_only": ((False,), "Use /tokenize."),
    "shift": ((False,), _NO_SHIFT),
    "truncate": ((False,), _NO_SHIFT),
    # Fields of chat completion requests, which have another name here.
    **{name: ((), f"Use `options.{name}`.") for name in SAME_OPTIONS},
    "max_completion_tokens": ((), "Use `options.num_predict`."),
    "max_tokens": ((), "Use `options.num_predict`."),
    "n": ((1,), "A response has one message. Send several requests."),
    "reasoning_effort": ((), "Use `think`."),
    "repetition_penalty": ((), "Use `options.repeat_penalty`."),
    "response_format": ((), "Use `format`."),
    "stream_options": ((), "The token counts are always sent. Remove it."),
    "thinking": ((), "Use `think`."),
}
REJECTED_IN_GENERATE: RejectedFields = {
    **REJECTED_IN_OLLAMA,
    "context": (([],), "Send the conversation as the messages of /api/chat."),
    "height": ((), _NO_IMAGES),
    "raw": ((False,), "Prompts are always rendered with the model's chat template. Remove it."),
    "steps": ((), _NO_IMAGES),
    "suffix": (("",), "The models do not insert text. Remove it."),
    "template": (("",), "Requests cannot change the engine's chat template. Remove it."),
    "tools": (([],), "Use /api/chat."),
    "width": ((), _NO_IMAGES),
}

_PASSED_ON = (ChatRequest.model_fields.keys() | REJECTED_FIELDS.keys() | IGNORED_FIELDS) - REJECTED_IN_OLLAMA.keys()
"""Fields that the chat request accepts, ignores or rejects."""

_RENAMES = (
    ("response_format.json_schema.schema", "format"),
    ("response_format", "format"),
    ("reasoning_effort", "think"),
    ("thinking", "think"),
    *OPTION_RENAMES,
)

_Think: TypeAlias = Annotated[
    Annotated[bool, Tag("boolean")] | Annotated[Literal["low", "medium", "high", "max"], Tag("string")],
    Discriminator(lambda value: "string" if isinstance(value, str) else "boolean"),
]


class OllamaBody(CheckedBody):
    """Base class of requests that use a model."""

    model: Name
    keep_alive: KeepAlive | None = None
    options: OllamaOptions = OllamaOptions()

    @property
    def unloads(self) -> bool:
        """Whether the model is to be unloaded after the request."""
        return is_zero(self.keep_alive)


class OllamaTool(RequestModel):
    type: Literal["function"] = "function"
    function: ToolFunction


class OllamaCompletionRequest(OllamaBody, ABC):
    """Base class of requests to chat and to generate. `to_chat` validates what chat requests have too.

    Fields that only chat requests of this package define, such as `mm_processor_kwargs`, are passed to the chat
    request.
    """

    _unknown_media: ClassVar[UnknownMedia | None] = UNKNOWN_MEDIA
    _renames: ClassVar[Sequence[tuple[str, str]]] = _RENAMES

    stream: bool = True
    format: StringOrObject[Literal["", "json"], JsonSchema] | None = None
    think: _Think | None = None
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing is to be generated, so that the request loads or unloads the model."""

    @abstractmethod
    def _messages(self) -> Sequence[ConvertedMessage]: ...

    def _tools(self) -> Sequence[Tool]:
        return ()

    def to_chat(self) -> ChatCall:
        """Convert it to a chat request, which is streamed in any case, with the usage at the end.

        Raises:
            InvalidParameter, UnsupportedParameter: like `ChatRequest.parse`; `param` has the names of this request.
        """
        messages = self._messages()
        rename = partial(rename_prefix, renames=(*message_renames(messages), *self._renames))
        with renamed_errors(rename):
            chat = ChatRequest.parse(self._chat_fields(messages))
        return ChatCall(chat=chat, rename=rename)

    def _chat_fields(self, messages: Sequence[ConvertedMessage]) -> dict[str, Any]:
        fields = {name: value for name, value in (self.model_extra or {}).items() if name in _PASSED_ON}
        return (
            fields
            | self.options.to_chat()
            | self._reasoning()
            | {
                "model": self.model,
                "messages": [message.body for message in messages],
                "tools": self._tools(),
                "response_format": self._response_format(),
                "logprobs": self.logprobs,
                "top_logprobs": self.top_logprobs or None,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    def _reasoning(self) -> dict[str, Any]:
        if isinstance(self.think, str):
            return {"reasoning_effort": self.think}
        return {} if self.think is None else {"thinking": {"type": "enabled" if self.think else "disabled"}}

    def _response_format(self) -> dict[str, Any] | None:
        """Return the format. As in Ollama, keywords of a schema that cannot be guaranteed are ignored."""
        if isinstance(self.format, str):
            return {"type": "json_object"} if self.format else None
        return self.format and {"type": "json_schema", "json_schema": {"name": "output", "schema": self.format}}


class OllamaChatRequest(OllamaCompletionRequest):
    """A request of /api/chat."""

    _rejected_fields: ClassVar[RejectedFields] = REJECTED_IN_OLLAMA
    _accepted_fields: ClassVar[Collection[str]] = _PASSED_ON | REJECTED_IN_OLLAMA.keys()

    messages: Annotated[Array[OllamaMessage], Field(max_length=MAX_MESSAGES)] = ()
    tools: Annotated[Array[OllamaTool], Field(max_length=MAX_TOOLS)] = ()

    @model_validator(mode="after")
    def _check_consistency(self) -> OllamaChatRequest:
        if self.messages and self.messages[-1].role == "assistant":
            raise invalid(
                f"messages[{len(self.messages) - 1}].role",
                "is 'assistant', but a response cannot continue a message. End with a message of the user.",
            )
        return self

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def _messages(self) -> Sequence[ConvertedMessage]:
        return convert_messages(self.messages)

    def _tools(self) -> Sequence[Tool]:
        return [Tool(type=tool.type, function=tool.function) for tool in self.tools]


class OllamaGenerateRequest(OllamaCompletionRequest):
    """A request of /api/generate."""

    _rejected_fields: ClassVar[RejectedFields] = REJECTED_IN_GENERATE
    _accepted_fields: ClassVar[Collection[str]] = _PASSED_ON | REJECTED_IN_GENERATE.keys()
    _renames: ClassVar[Sequence[tuple[str, str]]] = (("messages", "prompt"), *_RENAMES)

    prompt: Text = ""
    system: Text = ""
    images: Images = ()

    @property
    def is_empty(self) -> bool:
        return not self.prompt and not self.images

    def _messages(self) -> Sequence[ConvertedMessage]:
        system = [ConvertedMessage({"role": "system", "content": self.system}, [("", "system")])]
        parts, sources = convert_parts(self.images, self.prompt, images_path="images", text_path="prompt")
        content = parts if self.images else self.prompt
        user = ConvertedMessage({"role": "user", "content": content}, [*sources, ("", "prompt")])
        return [*(system if self.system else ()), user]
