"""The chat model: LangChain's `invoke`, `ainvoke`, `stream` and `astream`, with an engine in process or a server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, Field, model_validator

from dashinfer_vlm_core.engine.shared import LOOP, EngineCall
from dashinfer_vlm_core.protocol import ChatRequest
from dashinfer_vlm_core.protocol.fields import IGNORED_FIELDS, REJECTED_FIELDS, SUPPORTED_FIELDS
from dashinfer_vlm_core.protocol.validation_errors import unsupported

from .client import CallOptions, count_tokens, encode
from .connection import EngineConnection
from .messages import to_openai
from .profiles import profile_of
from .results import PROVIDER, chat_chunks, chat_result
from .structured import Method, Schema, bind_schema, output_parser, with_raw

if TYPE_CHECKING:
    from langchain_core.language_models.base import LangSmithParams
    from langchain_core.runnables import Runnable
    from typing_extensions import Self


KNOWN_FIELDS = frozenset(ChatRequest.model_fields) | SUPPORTED_FIELDS | IGNORED_FIELDS | REJECTED_FIELDS.keys()
"""Request fields that an engine in this process accepts, ignores with a reason, or rejects with a reason."""

RESERVED_FIELDS = frozenset({"messages", "model", "stream", "stream_options"})
"""Request fields that this class sets."""

CONSTRUCTOR_FIELDS = frozenset(
    {"api_key", "base_url", "engine", "engine_options", "engines", "model_kwargs", "streaming"}
)
"""Fields of this class that a call cannot set. A server would receive them, and the key with them, in the request."""

PROMPT_FIELDS = frozenset(
    {"chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "reasoning_effort", "thinking"}
)
"""Request fields that the number of prompt tokens depends on, in addition to messages and tools."""

_SAMPLING = ("temperature", "max_tokens", "top_p", "seed", "n", "logprobs", "top_logprobs")


class ChatDashInferVLM(EngineConnection, BaseChatModel):
    """A LangChain chat model for vision-language models.

    `EngineConnection` has the fields that select the model and its engine. Errors of the engine are raised as the
    classes of `dashinfer_vlm_core.errors`.

    Every request field can be set here or per call (`model.invoke(..., temperature=0)`, `bind`). Values per call take
    precedence. Fields that are not arguments of this class are stored in `model_kwargs`.

    Raises:
        InvalidParameter, UnsupportedParameter: a value that the engine would reject.
        ConfigError: an engine option that does not exist, or is out of range.
        pydantic.ValidationError: an argument that does not exist, or has the wrong type.
    """

    model_config: ClassVar[ConfigDict] = EngineConnection.model_config  # BaseChatModel's ignores unknown arguments

    temperature: float | None = None
    max_tokens: int | None = Field(default=None, alias="max_completion_tokens")
    top_p: float | None = None
    stop: list[str] | str | None = Field(default=None, alias="stop_sequences")
    seed: int | None = None
    n: int | None = None
    """Completions per prompt. Values above 1 work only with `generate`: LangChain's streams have one completion."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Other request fields, such as `top_k` or `mm_processor_kwargs`."""
    extra_body: dict[str, Any] | None = None
    """Other fields that are not validated here, for third-party servers."""

    streaming: bool = False
    """Whether `invoke` streams internally, so that callbacks receive tokens."""
    stream_usage: bool = True
    """Whether the last chunk of a stream contains the usage."""
    first_token_timeout: float | None = Field(default=None, gt=0)
    """Timeout in seconds for the first chunk of a stream."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, values: Any) -> Any:
        """Move request fields that are not arguments of this class to `model_kwargs`. Pydantic validates the others."""
        if not isinstance(values, dict):
            return values
        names = {*cls.model_fields, *(field.alias for field in cls.model_fields.values())}
        extra = {key: value for key, value in values.items() if key in KNOWN_FIELDS - RESERVED_FIELDS - names}
        own = {key: value for key, value in values.items() if key not in extra}
        return own | {"model_kwargs": {**(values.get("model_kwargs") or {}), **extra}} if extra else own

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.engine is None and not self.base_url:
            placeholder = {"messages": [{"role": "user", "content": ""}]}
            ChatRequest.parse({**self._request({}, stop=None, include_usage=False), **placeholder})
        return self

    # Model properties for LangChain

    @property
    def _llm_type(self) -> str:
        return PROVIDER

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that a response depends on. LangChain's caches use it as a key."""
        return {
            "model_name": self.model,
            **self._request({}, stop=None, include_usage=False),
            "stop_sequences": self.stop,  # LangChain replaces `stop` by the argument of the call
            "engine": self._engine_id,
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        own = [self.stop] if isinstance(self.stop, str) else self.stop
        params = super()._get_ls_params(stop=stop or own, **kwargs)
        params["ls_provider"] = PROVIDER
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        """Return None for servers, whose models are unknown before the first request."""
        if self.base_url:
            return None
        return profile_of(self.engine) if self.engine is not None else profile_of(self._config(self.model))

    # Requests

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return LOOP.get().call(self._agenerate(messages, stop, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return chat_result(await self._call(messages, stop, kwargs, stream=False).complete())

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        return LOOP.get().iterate(self._astream(messages, stop, **kwargs))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[ChatGenerationChunk, None]:
        async with contextlib.aclosing(self._call(messages, stop, kwargs, stream=True).stream()) as chunks:
            async for chunk in chat_chunks(chunks):
                yield chunk

    def _call(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any], *, stream: bool
    ) -> EngineCall:
        if fixed := kwargs.keys() & CONSTRUCTOR_FIELDS:
            raise unsupported(min(fixed), "can only be set on the chat model, not per call.")
        options = CallOptions(**{name: kwargs.get(name, getattr(self, name)) for name in CallOptions.model_fields})
        given = {key: value for key, value in kwargs.items() if key not in CallOptions.model_fields}
        model = given.pop("model", None) or given.pop("model_name", None)
        request = self._request(given, stop=stop, include_usage=stream and options.stream_usage)
        if stream and (request.get("n") or 1) > 1:
            raise unsupported("n", "must be 1 in a stream. Use `generate`.")
        name, engine = self._engine(model)
        return EngineCall(
            engine=engine,
            request={**request, "messages": to_openai(messages), "stream": stream, **name},
            timeout=options.timeout,
            first_token_timeout=options.first_token_timeout,
            max_retries=options.max_retries,
        )

    def _request(self, given: dict[str, Any], *, stop: list[str] | None, include_usage: bool) -> dict[str, Any]:
        """Return the request fields except the messages. Those of the call take precedence over those of this object.

        Raises:
            UnsupportedParameter: a field that an engine in this process does not know, and would ignore.
        """
        own = {name: getattr(self, name) for name in _SAMPLING}
        fields = {**own, **_renamed(self.model_kwargs), **_renamed(given), "stop": self.stop if stop is None else stop}
        body = {**(self.extra_body or {}), **(fields.pop("extra_body", None) or {})}
        if not self._is_remote and (unknown := fields.keys() - KNOWN_FIELDS):
            raise unsupported(min(unknown), "is not a known request field. Check its spelling, or leave it out.")
        stream_options = {"stream_options": {"include_usage": True}} if include_usage else {}
        return {key: value for key, value in {**fields, **body}.items() if value is not None} | stream_options

    # Token counts

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token IDs of a text with the model's tokenizer. Special tokens in it are recognized.

        Raises the errors of `invoke`. A model in this process is loaded; a server must have vLLM's `/tokenize`.
        """
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return LOOP.get().call(encode(self._engine(None)[1], text))

    def get_num_tokens_from_messages(
        self,
        messages: list[BaseMessage],
        tools: Sequence[Any] | None = None,
    ) -> int:
        """Return the number of prompt tokens of a request with these messages, including images and videos.

        Messages that do not fit the context can be counted too, for `trim_messages`. The count is then at least 1 more
        than the context length.

        Raises the errors of `get_token_ids`.
        """
        if not messages:
            return 0
        name, engine = self._engine(None)
        fields = self._request({}, stop=None, include_usage=False)
        request = {key: value for key, value in fields.items() if key in PROMPT_FIELDS}
        if tools:
            request["tools"] = [convert_to_openai_tool(tool) for tool in tools]
        return LOOP.get().call(count_tokens(engine, {**request, "messages": to_openai(messages), **name}))

    # Tools and structured output

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return the model with tools that it may call, or must call.

        Args:
            tools: functions, LangChain's tools, pydantic classes, TypedDicts, or tools in OpenAI's format.
            tool_choice: `auto` (call or not; the default), `any`, `required` or True, `none` or False, or the name of a
                tool.
            strict: whether to reject parameter schemas that cannot be enforced. Others are always enforced.
            parallel_tool_calls: False allows at most one call.
        """
        bound = {
            "tools": [convert_to_openai_tool(tool, strict=strict) for tool in tools],
            "tool_choice": _tool_choice(tool_choice),
            "parallel_tool_calls": parallel_tool_calls,
        }
        return self.bind(**{name: value for name, value in bound.items() if value is not None}, **kwargs)

    def with_structured_output(
        self,
        schema: Schema | None = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return the model with structured responses.

        Args:
            schema: a pydantic class, a TypedDict, or a JSON schema; `json_mode` needs none.
            method: `json_schema` and `function_calling` enforce the schema; `json_mode` returns any JSON object,
                which the prompt has to describe.
            include_raw: whether to return `raw`, `parsed` and `parsing_error` instead of raising parsing errors.
            strict: whether to reject schemas that cannot be enforced, also in the parameters of a tool.
        """
        bound = bind_schema(method, schema, strict)
        bind = self.bind_tools if "tools" in bound else self.bind
        model: Runnable[LanguageModelInput, AIMessage] = bind(**bound, **kwargs)
        parser = output_parser(method, schema)
        return with_raw(model, parser) if include_raw else model | parser


def _renamed(fields: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens" if name == "max_completion_tokens" else name: value for name, value in fields.items()}


def _tool_choice(choice: str | dict[str, Any] | bool | None) -> str | dict[str, Any] | None:
    if isinstance(choice, bool):
        return "required" if choice else "none"
    if choice is None or isinstance(choice, dict) or choice in {"auto", "none", "required"}:
        return choice
    return "required" if choice == "any" else {"type": "function", "function": {"name": choice}}
