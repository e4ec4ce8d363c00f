"""ChatRequest: everything that a caller may ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AfterValidator, Field, InstanceOf, Strict, Tag, ValidationError, model_validator

from ..errors import InvalidParameter, RequestError, UnsupportedParameter
from .base import LARGEST, STRING_OR_ARRAY, Count, Label, LenientModel, Name, Text, encodable
from .fields import REFUSED
from .messages import MediaPart, Message
from .options import MediaIO, MediaOptions, ProcessorOptions
from .output import NamedTool, ResponseFormat, Tool, ToolChoice, Tools, tool_faults
from .sampling import GREEDY_BELOW, Sampling
from .validation_errors import explain, show

DEFAULT_MODEL = "model"
"""Name of the model in a request that names none."""

DEFAULT_MAX_TOKENS = 4096
"""Most tokens of an answer whose request names no limit; the engine takes less where the context leaves less."""

MAX_ANSWERS = 16
MAX_MESSAGES = 4096
MAX_STOP_CHARACTERS = 256
MAX_LISTED_TOKENS = 1024

_Penalty = Annotated[float, Field(ge=-2, le=2)]
_TokenId = Annotated[int, Field(ge=0, le=LARGEST)]
_TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS), AfterValidator(encodable)]
_Stops = Annotated[tuple[_Stop, ...], Strict(False), Field(max_length=4, fail_fast=True)]


class StreamOptions(LenientModel):
    include_usage: bool = False
    include_obfuscation: bool = False


class ChatRequest(LenientModel):
    """A chat completion request. Whoever holds one may rely on it: it was checked whole when it was made.

    Besides OpenAI's fields it has some that engines of this kind share: `top_k`, `repetition_penalty`, `min_tokens`,
    `ignore_eos`, `stop_token_ids`, options for all media (`options`), and `cache_salt`: what requests of one salt leave
    in caches is found by requests of the same salt alone. `fields` says what becomes of those that it does not have.
    """

    messages: Annotated[
        tuple[Message, ...], Strict(False), Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    model: Name = DEFAULT_MODEL
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=LARGEST)] = 0
    frequency_penalty: _Penalty = 0.0
    presence_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] = 1.0  # logits are divided by it: 1e-300 would overflow
    logit_bias: Annotated[dict[_TokenKey, _Bias], Field(max_length=MAX_LISTED_TOKENS)] = Field(default_factory=dict)
    stop: Annotated[Annotated[_Stop, Tag("string")] | Annotated[_Stops, Tag("array")], STRING_OR_ARRAY] | None = None
    stop_token_ids: Annotated[
        tuple[_TokenId, ...], Strict(False), Field(max_length=MAX_LISTED_TOKENS, fail_fast=True)
    ] = ()
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1
    response_format: ResponseFormat | None = None
    tools: Tools = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    media_io_kwargs: MediaIO = MediaIO()
    mm_processor_kwargs: ProcessorOptions = ProcessorOptions()
    cache_salt: Label | None = None

    @classmethod
    def parse(cls, data: object) -> ChatRequest:
        """Check a request that came as JSON; one that was checked already is returned as it is.

        Raises:
            InvalidParameter: a value has the wrong type, range or shape; `param` is the deepest field to blame, in
                OpenAI's notation, such as `messages[1].content[0].image_url.url`.
            UnsupportedParameter: a known field asks for what is not done here.
        """
        if isinstance(data, Mapping) and not isinstance(data, dict):
            data = dict(data)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise explain(error) from None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: object) -> object:
        given = data if isinstance(data, dict) else {}
        for name, (nothing, next_step) in REFUSED.items():
            value = given.get(name)
            if value is not None and not any(type(value) is type(other) and value == other for other in nothing):
                raise UnsupportedParameter(f"`{name}` cannot be {show(value)} here. {next_step}", param=name)
        return data

    @model_validator(mode="after")
    def _check_sense(self) -> ChatRequest:
        for index, message in enumerate(self.messages):
            message.check(f"messages[{index}]")
        for error in self._contradictions():
            raise error
        return self

    def _contradictions(self) -> Iterator[RequestError]:
        yield from self._media_options.faults()
        yield from tool_faults(self.tools, self.tool_choice, self.parallel_tool_calls)
        if self.response_format:
            yield from self.response_format.faults()
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            yield InvalidParameter(
                "`max_tokens` and `max_completion_tokens` mean the same, but differ: give one of them.",
                param="max_tokens",
            )
        if self.min_tokens > (self._most_tokens or LARGEST):
            yield InvalidParameter(
                f"`min_tokens` is {self.min_tokens}, more than the most tokens of the answer, {self._most_tokens}.",
                param="min_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            yield InvalidParameter(
                "`top_logprobs` goes with `logprobs` only: set that to true, or leave this out.", param="top_logprobs"
            )
        if self.stream_options and not self.stream:
            yield InvalidParameter(
                "`stream_options` goes with `stream` only: set that to true, or leave this out.", param="stream_options"
            )
        if self.stream_options and self.stream_options.include_obfuscation:
            yield UnsupportedParameter(
                "`stream_options.include_obfuscation` cannot be true here. Leave it out.",
                param="stream_options.include_obfuscation",
            )

    @property
    def _most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def _media_options(self) -> MediaOptions:
        return MediaOptions(self.media_io_kwargs, self.mm_processor_kwargs)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end the answer and are no part of it; none is empty."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call, or has to."""
        if isinstance(self.tool_choice, NamedTool):
            return tuple(tool for tool in self.tools if tool.function.name == self.tool_choice.function.name)
        return () if self.tool_choice == "none" else self.tools

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the prompt tells of."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def media(self) -> tuple[MediaPart, ...]:
        """Every picture and video, in the order of the prompt, with what the request asks for all of them."""
        return tuple(map(self._media_options.applied, self._parts()))

    def _parts(self) -> Iterable[MediaPart]:
        parts = (item for i, message in enumerate(self.messages) for item in message.parts(f"messages[{i}]"))
        return [media for where, part in parts if (media := part.media(where))]

    @property
    def raw_prompt(self) -> str | tuple[int, ...] | None:
        """The whole prompt, which then stands for the messages; never from JSON."""
        return None

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates expect them.

        Each has `role` (a developer speaks as the system) and `content`: a string, or a list of
        `{"type": "text", "text": ...}`, `{"type": "image"}` and `{"type": "video"}`. `name`, `tool_calls` and
        `tool_call_id` are kept. Text is as the user wrote it: nothing in it may be trusted.
        """
        return [message.for_template() for message in self.messages]

    def sampling(self) -> Sampling:
        """How to choose the tokens of the answer; `max_tokens` is None where the request names no limit."""
        return Sampling(
            max_tokens=self._most_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature if self.temperature >= GREEDY_BELOW else 0.0,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=MappingProxyType({int(token): bias for token, bias in self.logit_bias.items()}),
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class OfflineRequest(ChatRequest):
    """A request of code in this process: it may hand over media as objects, and a prompt that was rendered already.

    Attributes:
        messages: as in `ChatRequest`, unless there is a `prompt`.
        contents: objects that stand for the URLs of parts, by the place of the part (`messages[0].content[1]`); what
            they may be says `media.memory`.
        prompt: text whose control tokens count as such, or token ids. Each picture and video is one placeholder in it.
        attached: the media of `prompt`; those of each kind are in the order of their placeholders.
    """

    messages: Annotated[tuple[Message, ...], Strict(False), Field(max_length=MAX_MESSAGES)] = ()
    contents: Mapping[str, Any] = Field(default_factory=dict, repr=False)
    prompt: (
        Annotated[Annotated[Text, Tag("string")] | Annotated[tuple[int, ...], Tag("array")], STRING_OR_ARRAY] | None
    ) = None
    attached: tuple[InstanceOf[MediaPart], ...] = ()

    @property
    def raw_prompt(self) -> str | tuple[int, ...] | None:
        return self.prompt

    def _parts(self) -> Iterable[MediaPart]:
        if self.prompt is not None:
            return self.attached
        return [
            replace(part, url=None, content=self.contents[part.path]) if part.path in self.contents else part
            for part in super()._parts()
        ]
