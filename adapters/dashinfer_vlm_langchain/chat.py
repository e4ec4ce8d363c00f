"""The chat model: LangChain's four ways to ask, over engines of this process or of others."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.engine.shared import SHARED, SharedEngines
from dashinfer_vlm_core.errors import InvalidParameter, UnsupportedParameter
from dashinfer_vlm_core.protocol import ChatRequest
from dashinfer_vlm_core.protocol.fields import HONOURED, NO_EFFECT, REFUSED

from .client import LOOP, Call, complete, stream
from .messages import to_openai
from .profiles import profile_of
from .results import PROVIDER, chat_chunk, chat_result
from .structured import Method, Schema, bind_schema, output_parser, with_raw

if TYPE_CHECKING:
    from langchain_core.language_models.base import LangSmithParams
    from langchain_core.runnables import Runnable
    from typing_extensions import Self

    from dashinfer_vlm_core.engine import ChatEngine

KNOWN = frozenset(ChatRequest.model_fields) | HONOURED | NO_EFFECT | REFUSED.keys()
"""Fields of a request about which an engine in this process has something to say."""

OWN = frozenset({"messages", "model", "stream", "stream_options"})
"""Fields of a request that this class fills."""

_SAMPLING = ("temperature", "max_tokens", "top_p", "seed", "n", "logprobs", "top_logprobs")


class PerCall(BaseModel):
    """What is about asking rather than about the answer."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    timeout: float | None = Field(gt=0)
    first_token_timeout: float | None = Field(gt=0)
    max_retries: int = Field(ge=0)
    stream_usage: bool


class ChatDashInferVLM(BaseChatModel):
    """A vision-language model as LangChain's chat model.

    By default the model runs in this process: it is loaded when it is first asked, once per configuration, and shared
    by all chat models, threads and event loops. With `base_url` a server is asked instead, with `engine` an engine that
    the caller has started. What the engine refuses or fails at reaches the caller as an error of the tree in
    `dashinfer_vlm_core.errors`.

    Each field of the request may be given here, or per call (`model.invoke(..., temperature=0)`, `bind`), which comes
    first; those without an argument of their own go to `model_kwargs`.

    Raises:
        InvalidParameter, UnsupportedParameter: a value that the engine would refuse.
        ConfigError: an option of the engine that there is not, or that is out of range.
        pydantic.ValidationError: an argument that there is not, or of another type.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        populate_by_name=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=()
    )

    model: str = Field(default="demo", alias="model_name")
    """A registered name (`demo` is the bundled one), a checkpoint folder, or a hub id; for a server, its name there."""
    temperature: float | None = None
    max_tokens: int | None = Field(default=None, alias="max_completion_tokens")
    top_p: float | None = None
    stop: list[str] | str | None = Field(default=None, alias="stop_sequences")
    seed: int | None = None
    n: int | None = None
    """Answers per question; above 1 in `generate` alone, since LangChain's streams hold one answer."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request, such as `top_k` or `mm_processor_kwargs`."""
    extra_body: dict[str, Any] | None = None
    """Further fields that are not checked here, for servers of others."""

    streaming: bool = False
    """Whether `invoke` streams inside, so that callbacks see tokens."""
    stream_usage: bool = True
    """Whether the last chunk of a stream holds the usage."""
    timeout: float | None = Field(default=None, alias="request_timeout", gt=0)
    """Seconds for the whole answer, of a stream too; loading the model is counted."""
    first_token_timeout: float | None = Field(default=None, gt=0)
    """Seconds until a stream begins."""
    max_retries: int = Field(default=0, ge=0)
    """How often to try again what may succeed later, such as a full queue; a stream only before its first chunk."""

    base_url: str | None = None
    """Address of a server, up to and with `/v1`."""
    api_key: SecretStr | None = None
    """The server's key; an engine in this process needs none."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Fields of EngineConfig for an engine in this process."""
    engine: Any = Field(default=None, exclude=True, repr=False)
    """A `ChatEngine` to ask, in place of one that is looked up."""
    engines: SharedEngines = Field(default_factory=lambda: SHARED, exclude=True, repr=False)
    """Where engines come from; those that all adapters of this process share by default."""

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, values: Any) -> Any:
        """Fields of the request that have no argument of their own go to `model_kwargs`; the rest is pydantic's."""
        if not isinstance(values, dict):
            return values
        names = {name for name, field in cls.model_fields.items()}
        names |= {field.alias for field in cls.model_fields.values() if field.alias}
        loose = {key: value for key, value in values.items() if key in KNOWN - OWN - names}
        kept = {key: value for key, value in values.items() if key not in loose}
        return kept | {"model_kwargs": {**(values.get("model_kwargs") or {}), **loose}} if loose else kept

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.engine is not None and (self.base_url or self.engine_options):
            raise InvalidParameter("`engine` goes without `base_url` and `engine_options`.", param="engine")
        if self.base_url and self.engine_options:
            raise InvalidParameter(
                "`engine_options` are for an engine in this process; the one at `base_url` has options of its own.",
                param="engine_options",
            )
        if self.base_url:
            self.engines.remote(self.base_url, api_key=self._key)  # refuses what is no address
        elif self.engine is None:
            self._config(self.model)
            hello = {"messages": [{"role": "user", "content": ""}]}
            ChatRequest.parse({**self._request({}, stop=None, stream=False), **hello})
        return self

    # What LangChain asks about the model

    @property
    def model_name(self) -> str:
        return self.model

    @property
    def _llm_type(self) -> str:
        return PROVIDER

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that the answer depends on: LangChain's caches go by it."""
        where = self.base_url or getattr(self.engine, "api_base", None) or getattr(self.engine, "config", None)
        return {
            "model_name": self.model,
            **self._request({}, stop=None, stream=False),
            "engine": str(where or ""),
            "engine_options": self.engine_options,
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or _listed(self.stop), **kwargs)
        params["ls_provider"] = PROVIDER
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        """None for servers: what they serve is not known before they are asked."""
        if self.base_url:
            return None
        return profile_of(self.engine) if self.engine is not None else profile_of(self._config(self.model))

    # Ask

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
        return chat_result(await complete(self._call(messages, stop, kwargs, stream=False)))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with contextlib.closing(LOOP.get().iterate(self._chunks(messages, stop, kwargs))) as chunks:
            yield from chunks

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with contextlib.aclosing(self._chunks(messages, stop, kwargs)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _chunks(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> AsyncGenerator[ChatGenerationChunk, None]:
        async with contextlib.aclosing(stream(self._call(messages, stop, kwargs, stream=True))) as chunks:
            async for chunk in chat_chunk(chunks):
                yield chunk

    def _call(
        self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any], *, stream: bool
    ) -> Call:
        about = PerCall(**{name: kwargs.get(name, getattr(self, name)) for name in PerCall.model_fields})
        given = {key: value for key, value in kwargs.items() if key not in PerCall.model_fields}
        model = given.pop("model", None) or given.pop("model_name", None)
        request = self._request(given, stop=stop, stream=stream and about.stream_usage)
        if stream and (request.get("n") or 1) > 1:
            raise UnsupportedParameter("`n` cannot be above 1 in a stream: ask by `generate`.", param="n")
        name, engine = self._engine(model)
        return Call(
            engine=engine,
            request={**request, "messages": to_openai(messages), "stream": stream, **name},
            timeout=about.timeout,
            first_token_timeout=about.first_token_timeout,
            max_retries=about.max_retries,
        )

    def _request(self, given: dict[str, Any], *, stop: list[str] | None, stream: bool) -> dict[str, Any]:
        """The fields of the request but for the messages: those of the call, and where it has none those from here.

        Raises:
            UnsupportedParameter: a field that an engine in this process does not know, and would pass over.
        """
        if "max_completion_tokens" in given:
            given = {"max_tokens": given["max_completion_tokens"]} | given
            del given["max_completion_tokens"]
        own = {name: getattr(self, name) for name in _SAMPLING}
        body = {**(self.extra_body or {}), **(given.get("extra_body") or {})}
        given = {key: value for key, value in given.items() if key != "extra_body"}
        fields = {**own, **self.model_kwargs, **given, "stop": self.stop if stop is None else stop}
        if not self._remote and (unknown := fields.keys() - KNOWN):
            name = min(unknown)
            raise UnsupportedParameter(
                f"`{name}` is no field of a request: leave it out, or mend its name.", param=name
            )
        asks = {"stream_options": {"include_usage": True}} if stream else {}
        return {key: value for key, value in {**fields, **body}.items() if value is not None} | asks

    # What answers

    @property
    def _key(self) -> str | None:
        return self.api_key.get_secret_value() if self.api_key else None

    @property
    def _remote(self) -> bool:
        return bool(self.base_url) or hasattr(self.engine, "api_base")

    def _engine(self, model: str | None) -> tuple[dict[str, str], Callable[[], Any]]:
        """By which name to ask, and how to find what answers."""
        if self.engine is not None:
            named = model or (self.model if "model" in self.model_fields_set else None)
            return {"model": named} if named else {}, self._given
        if self.base_url:
            return {"model": model or self.model}, self._remotely
        config = self._config(model or self.model)
        return {"model": config.name}, lambda: self.engines.aget(config)

    async def _given(self) -> ChatEngine:
        return self.engine  # type: ignore[no-any-return]  # pydantic cannot check a protocol

    async def _remotely(self) -> ChatEngine:
        assert self.base_url is not None
        return self.engines.remote(self.base_url, api_key=self._key)

    def _config(self, model: str) -> EngineConfig:
        return self.engines.config(model, self.engine_options)

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
        """The model with tools that it may call, or has to.

        Args:
            tools: functions, LangChain's tools, pydantic classes, TypedDicts, or tools as OpenAI writes them.
            tool_choice: `auto` (call or not; the default), `any`, `required` or True, `none` or False, or the name of a
                tool.
            strict: whether to refuse parameters that cannot be guaranteed; a call always follows those that can.
            parallel_tool_calls: False allows one call.
        """
        bound: dict[str, Any] = {"tools": [convert_to_openai_tool(tool, strict=strict) for tool in tools]}
        if tool_choice is not None:
            bound["tool_choice"] = _choice(tool_choice)
        if parallel_tool_calls is not None:
            bound["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(**bound, **kwargs)

    def with_structured_output(
        self,
        schema: Schema | None = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """The model with answers of a given form.

        Args:
            schema: a pydantic class, a TypedDict, or a JSON schema; `json_mode` needs none.
            method: `json_schema` and `function_calling` follow the schema to the letter; `json_mode` gives any JSON
                object, which the prompt has to describe.
            include_raw: whether to give `raw`, `parsed` and `parsing_error` rather than to raise.
            strict: whether to refuse what cannot be guaranteed in a tool's parameters too.
        """
        bound = bind_schema(method, schema, strict)
        ask = self.bind_tools if "tools" in bound else self.bind
        model: Runnable[LanguageModelInput, AIMessage] = ask(**bound, **kwargs)
        read = output_parser(method, schema)
        return with_raw(model, read) if include_raw else model | read


def _listed(stop: list[str] | str | None) -> list[str] | None:
    return [stop] if isinstance(stop, str) else stop


def _choice(choice: str | dict[str, Any] | bool) -> str | dict[str, Any]:
    if isinstance(choice, bool):
        return "required" if choice else "none"
    if isinstance(choice, dict) or choice in {"auto", "none", "required"}:
        return choice
    return "required" if choice == "any" else {"type": "function", "function": {"name": choice}}
