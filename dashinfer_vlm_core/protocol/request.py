"""ChatRequest: a validated chat completion request."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, InstanceOf, model_validator
from typing_extensions import Self

from .base import LARGEST, Array, Count, Label, Name, RequestModel, StringOrArray, Text, encodable
from .body import CheckedBody
from .document_part import DocumentPart
from .fields import IGNORED_FIELDS, REJECTED_FIELDS, RejectedFields
from .media_part import MediaPart
from .messages import Message, Part, check_tool_arguments
from .options import MediaIO, MediaOptions, ProcessorOptions
from .output import (
    AllowedTools,
    GuidedSchema,
    GuidedText,
    GuidedTexts,
    NamedTool,
    OutputConstraint,
    ResponseFormat,
    StructuredOutputs,
    Tool,
    ToolChoice,
    Tools,
    check_tools,
    guided_constraints,
)
from .sampling import GREEDY_BELOW, Sampling
from .thinking import Thinking
from .validation_errors import invalid
from .vllm_xargs import MAX_LISTED_TOKENS, NgramSize, TokenId, VllmXargs

DEFAULT_MODEL = "model"
"""Model name of requests without `model`."""

DEFAULT_MAX_TOKENS = 4096
"""Maximum number of completion tokens for requests without a limit; lower if less of the context remains."""

REST_OF_CONTEXT = LARGEST
"""The value of `max_tokens` for no limit but the context, which requests of Ollama's API can ask for."""

MAX_COMPLETIONS = 16
MAX_MESSAGES = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_TEMPLATE_OPTIONS = 32

_Penalty = Annotated[float, Field(ge=-2, le=2)]
_TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS), AfterValidator(encodable)]
_TemplateValue = bool | Annotated[int, Field(ge=-LARGEST, le=LARGEST)] | float | Label


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter of a request from code in this process, as vLLM's `LoRARequest`.

    Attributes:
        lora_name: the adapter's name. An adapter that was loaded under this name is used again.
        lora_int_id: a positive number, for compatibility with vLLM. The name alone identifies the adapter.
        lora_path: its folder or Hugging Face ID; empty for an adapter of `EngineConfig.lora`.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    def __post_init__(self) -> None:
        """Raise InvalidParameter if a value is invalid."""
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise invalid("lora_name", f"must be a name, got {self.lora_name!r}.")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise invalid("lora_int_id", f"must be at least 1, got {self.lora_int_id!r}.")


class StreamOptions(RequestModel):
    """Options of a stream. `include_obfuscation`, OpenAI's padding of chunks, has no effect.

    With `include_usage` and `include_initial_usage`, the first chunk has the usage so far, too.
    """

    include_usage: bool = False
    include_initial_usage: bool = False
    include_obfuscation: bool = False


def check_stream_options(options: StreamOptions | None, *, stream: bool) -> None:
    """Raise InvalidParameter if a request that is not streamed has options of a stream."""
    if options and not stream:
        raise invalid("stream_options", "requires `stream`. Set `stream` to true, or remove `stream_options`.")


class ChatRequest(CheckedBody):
    """A chat completion request. All validation happens on creation, so an instance is always valid.

    In addition to OpenAI's fields, it has fields that are common in inference servers: `top_k`, `min_p`,
    `repetition_penalty`, `min_tokens`, `ignore_eos`, `stop_token_ids`, `skip_special_tokens`,
    `include_stop_str_in_output`, options for all media (module `options`), and `cache_salt`: cache entries are shared
    only between requests with the same salt, `chat_template_kwargs`: variables of the chat template, such as
    `enable_thinking`, and `coordinates`: whether positions in images are those that the model writes, or pixels of the
    original image. `structured_outputs` and its older spellings `guided_json`, `guided_regex` and `guided_choice` are
    vLLM's. The module `fields` lists ignored and rejected fields.
    """

    parses_tool_calls: ClassVar[bool] = True
    """Whether tool calls in the completion are parsed; otherwise, they are part of its text."""

    parses_reasoning: ClassVar[bool] = True
    """Whether reasoning in the completion is separated from its text."""

    _rejected_fields: ClassVar[RejectedFields] = REJECTED_FIELDS
    _accepted_fields: ClassVar[Collection[str]] = IGNORED_FIELDS | REJECTED_FIELDS.keys()

    messages: Annotated[Array[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: Name = DEFAULT_MODEL
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=LARGEST)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    frequency_penalty: _Penalty = 0.0
    presence_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] = 1.0  # logits are divided by it: 1e-300 would overflow
    no_repeat_ngram_size: NgramSize = 0
    vllm_xargs: VllmXargs = VllmXargs()
    logit_bias: Annotated[dict[_TokenKey, _Bias], Field(max_length=MAX_LISTED_TOKENS)] = Field(default_factory=dict)
    stop: StringOrArray[_Stop, Annotated[Array[_Stop], Field(max_length=MAX_STOP_STRINGS)]] | None = None
    stop_token_ids: Annotated[Array[TokenId], Field(max_length=MAX_LISTED_TOKENS)] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] = 1
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: GuidedSchema | None = None
    guided_regex: GuidedText | None = None
    guided_choice: GuidedTexts | None = None
    coordinates: Literal["model", "original"] = "model"
    tools: Tools = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    media_io_kwargs: MediaIO = MediaIO()
    mm_processor_kwargs: ProcessorOptions = ProcessorOptions()
    cache_salt: Label | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: Annotated[dict[Name, _TemplateValue], Field(max_length=MAX_TEMPLATE_OPTIONS)] = Field(
        default_factory=dict
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> ChatRequest:
        for index, message in enumerate(self.messages):
            message.check(f"messages[{index}]")
        check_tool_arguments(self.messages)
        self._media_options.check()
        self.vllm_xargs.sampling(self.no_repeat_ngram_size)
        check_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        outputs = [constraint.param for constraint in self._output_constraints()]
        if len(outputs) > 1:
            raise invalid(outputs[1], f"and `{outputs[0]}` both define the output. Pass one of them.")
        self._check_combinations()
        return self

    def _check_combinations(self) -> None:
        if self.coordinates == "original" and self.logprobs:
            raise invalid(
                "logprobs",
                'cannot be combined with `coordinates` "original": the text is not that of the tokens. Remove one of'
                " them.",
            )
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise invalid(
                "max_tokens", "and `max_completion_tokens` are synonyms but have different values. Pass one of them."
            )
        if self.min_tokens > (self._token_limit or LARGEST):
            raise invalid(
                "min_tokens",
                f"is {self.min_tokens}, more than the maximum number of completion tokens, {self._token_limit}.",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "requires `logprobs`. Set `logprobs` to true, or remove `top_logprobs`.")
        check_stream_options(self.stream_options, stream=self.stream)

    @property
    def _token_limit(self) -> int | None:
        limit = self.max_completion_tokens or self.max_tokens
        return None if limit == REST_OF_CONTEXT else limit

    @property
    def uses_rest_of_context(self) -> bool:
        """Whether the completion may be longer than by default, up to the end of the context."""
        return REST_OF_CONTEXT in {self.max_completion_tokens, self.max_tokens}

    @property
    def _media_options(self) -> MediaOptions:
        return MediaOptions(self.media_io_kwargs, self.mm_processor_kwargs)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that contains the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def include_initial_usage(self) -> bool:
        """Whether the first chunk of a stream contains the usage so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.include_initial_usage

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end the completion; none is empty."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    @property
    def output_constraint(self) -> OutputConstraint | None:
        """What the content of the completion has to be; None if it is unconstrained."""
        return next(self._output_constraints(), None)

    def _output_constraints(self) -> Iterator[OutputConstraint]:
        if self.response_format:
            yield from self.response_format.constraints()
        if self.structured_outputs:
            yield from self.structured_outputs.constraints()
        yield from guided_constraints(
            "guided_", json_schema=self.guided_json, regex=self.guided_regex, choices=self.guided_choice
        )

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the completion can call or has to call."""
        if isinstance(self.tool_choice, NamedTool):
            return tuple(tool for tool in self.tools if tool.function.name == self.tool_choice.function.name)
        return self.offered_tools

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the prompt describes."""
        if isinstance(self.tool_choice, AllowedTools):
            names = self.tool_choice.allowed_tools.names
            return tuple(tool for tool in self.tools if tool.function.name in names)
        return () if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        """Whether the completion has to be a tool call."""
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def has_single_call(self) -> bool:
        """Whether the completion can have at most one tool call. A tool that is forced by name is called once."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool)

    def media(self) -> tuple[MediaPart, ...]:
        """Return all images and videos in the order of the prompt, with the options that the request sets for all.

        Raises:
            InvalidParameter: an option for all videos does not apply to them.
        """
        return self._media_options.apply_to(self._parts())

    def _parts(self) -> Iterable[MediaPart]:
        return [media for path, part in self._content_parts() for media in part.media(path)]

    def _content_parts(self) -> Iterator[tuple[str, Part]]:
        return (item for i, message in enumerate(self.messages) for item in message.parts(f"messages[{i}]"))

    def documents(self) -> list[DocumentPart]:
        """Return all documents that were not read yet, in the order of the prompt."""
        return [document for path, part in self._content_parts() if (document := part.document(path))]

    def with_documents(self, contents: Mapping[str, tuple[str | MediaPart, ...]]) -> Self:
        """Return the request with the texts and images of documents, given by their paths, in place of these."""
        messages = [message.with_documents(f"messages[{i}]", contents) for i, message in enumerate(self.messages)]
        return self.model_copy(update={"messages": tuple(messages)})

    @property
    def raw_prompt(self) -> str | tuple[int, ...] | None:
        """The rendered prompt, which replaces the messages; always None for requests from JSON."""
        return None

    @property
    def prompt_limit(self) -> int | None:
        """The most tokens of the prompt, whose text is cut; -1 for the context length. None to reject longer ones."""
        return None

    @property
    def requested_lora(self) -> LoRARequest | None:
        """The LoRA adapter to use instead of one that `model` names; always None for requests from JSON."""
        return None

    def template_messages(self) -> list[dict[str, Any]]:
        """Return the messages in the form that chat templates expect.

        Each has `role` ("developer" becomes "system") and `content`: a string, or a list of
        `{"type": "text", "text": ...}`, `{"type": "image"}` and `{"type": "video"}`. `name`, `tool_calls` and
        `tool_call_id` are included. Text is unchanged user input and must not be trusted.
        """
        return [message.for_template() for message in self.messages]

    def sampling(self) -> Sampling:
        """Return the sampling parameters; `max_tokens` is None if the request sets no limit."""
        greedy = self.temperature < GREEDY_BELOW or self.top_p == 0  # the smallest set of tokens is the most likely one
        return Sampling(
            max_tokens=self._token_limit,
            min_tokens=self.min_tokens,
            temperature=0.0 if greedy else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            **self.vllm_xargs.sampling(self.no_repeat_ngram_size),
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class OfflineRequest(ChatRequest):
    """A request from code in this process, which can contain media as Python objects and a rendered prompt.

    Attributes:
        messages: as in `ChatRequest`; empty if there is a `prompt`.
        contents: objects that replace the URLs of content parts, by the path of the part (`messages[0].content[1]`);
            `media.python_objects` describes them.
        prompt: text in which special tokens are recognized, or token IDs; each image and video is one placeholder.
        attached: the media of `prompt`; those of each kind are in the order of their placeholders.
        lora_request: the LoRA adapter to use.
    """

    parses_tool_calls: ClassVar[bool] = False  # as in vLLM, whose offline outputs have text only

    messages: Annotated[Array[Message], Field(max_length=MAX_MESSAGES)] = ()
    contents: Mapping[str, Any] = Field(default_factory=dict, repr=False)
    prompt: StringOrArray[Text, tuple[int, ...]] | None = None
    attached: tuple[InstanceOf[MediaPart], ...] = ()
    lora_request: InstanceOf[LoRARequest] | None = None

    @property
    def raw_prompt(self) -> str | tuple[int, ...] | None:
        return self.prompt

    @property
    def requested_lora(self) -> LoRARequest | None:
        return self.lora_request

    def _parts(self) -> Iterable[MediaPart]:
        if self.prompt is not None:
            return self.attached
        return [
            replace(part, url=None, content=self.contents[part.path]) if part.path in self.contents else part
            for part in super()._parts()
        ]
