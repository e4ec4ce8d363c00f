"""The provider: completions, streams and embeddings, synchronous and asynchronous, in process or with a server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from typing import TYPE_CHECKING, Any, Literal, cast

import litellm
from litellm.llms.custom_llm import CustomLLM
from litellm.types.llms.custom_llm import CustomLLMItem
from litellm.types.utils import (
    Choices,
    Embedding,
    EmbeddingResponse,
    GenericStreamingChunk,
    ImageResponse,
    ModelResponse,
    ModelResponseStream,
    Usage,
)
from litellm.utils import custom_llm_setup

from dashinfer_vlm_core.engine.shared import LOOP, SHARED, EngineCall, GetEngine, SharedEngines, call_engine
from dashinfer_vlm_core.errors import UnsupportedParameter
from dashinfer_vlm_core.models.pooling import Task
from dashinfer_vlm_core.protocol import EmbeddingRequest

from .call import is_proxied, read_embedding_request, read_engine_options, read_request, read_seconds
from .errors import litellm_errors
from .model_info import register_known_models, register_model_info

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    from dashinfer_vlm_core.engine import ChatEngine, PoolingResult

PROVIDER = "dashinfer_vlm"


class DashInferVLM(CustomLLM):
    """The LiteLLM provider for `dashinfer_vlm/<model>`.

    The model is a registered name (`demo`), a checkpoint folder or a Hugging Face model ID. Its engine is loaded here
    on first use, configured by `engine_options` and the environment like EngineConfig, and shared by all calls
    with equal options. With `api_base`, requests are sent to a server instead. LiteLLM leaves timeouts to the provider:
    `timeout` applies to the complete response, `first_token_timeout` to the first token of a stream.

    Args:
        engines: the registry of engines. By default, all adapters of this process share one.
        name: the provider prefix of model names.
    """

    def __init__(self, engines: SharedEngines | None = None, *, name: str = PROVIDER) -> None:
        super().__init__()
        self.name = name
        self._engines = engines or SHARED

    def completion(self, *_: Any, **arguments: Any) -> ModelResponse:
        return LOOP.get().call(self.acompletion(**arguments))

    # LiteLLM accepts ModelResponseStream too, which its annotations lack. It accepts only async generators.

    def streaming(  # type: ignore[override]
        self, *_: Any, **arguments: Any
    ) -> Generator[ModelResponseStream | GenericStreamingChunk, None, None]:
        return LOOP.get().iterate(self.astreaming(**arguments))

    async def acompletion(self, *_: Any, **arguments: Any) -> ModelResponse:
        with self._errors(arguments):
            completion = await self._call(arguments, stream=False).complete()
            return model_response(arguments["model_response"], completion)

    async def astreaming(  # type: ignore[override]
        self, *_: Any, **arguments: Any
    ) -> AsyncGenerator[ModelResponseStream | GenericStreamingChunk, None]:
        with self._errors(arguments):
            async with contextlib.aclosing(self._call(arguments, stream=True).stream()) as chunks:
                async for chunk in stream_chunks(chunks):
                    yield chunk

    def embedding(self, *_: Any, **arguments: Any) -> EmbeddingResponse:
        return LOOP.get().call(self.aembedding(**arguments))

    async def aembedding(self, *_: Any, **arguments: Any) -> EmbeddingResponse:
        """Return embeddings. A model in this process that was not trained for them is used as with `--task embed`."""
        with self._errors(arguments):
            given = read_embedding_request(arguments)
            engine, model = self._engine(arguments, task="embed")
            request = EmbeddingRequest.parse({**given, "model": model})
            result = await call_engine(
                engine,
                lambda started: started.aembed(request),
                timeout=read_seconds(arguments.get("timeout"), "timeout"),
            )
            return embedding_response(arguments["model_response"], result, request.encoding_format)

    # Without these methods, LiteLLM reports that they are not implemented yet.

    def image_generation(self, *_: Any, **arguments: Any) -> ImageResponse:
        with self._errors(arguments):
            raise UnsupportedParameter(
                "Image generation is not available, because the models of this provider generate text. Use another"
                " provider.",
                param="model",
            )

    async def aimage_generation(self, *_: Any, **arguments: Any) -> ImageResponse:
        return self.image_generation(**arguments)

    def _call(self, arguments: dict[str, Any], *, stream: bool) -> EngineCall:
        request = read_request(arguments, stream=stream)
        engine, model = self._engine(arguments)
        return EngineCall(
            engine=engine,
            request={**request, "model": model},
            timeout=read_seconds(arguments.get("timeout"), "timeout"),
            first_token_timeout=read_seconds(
                arguments["optional_params"].get("first_token_timeout"), "first_token_timeout"
            ),
        )

    def _engine(self, arguments: dict[str, Any], *, task: Task | None = None) -> tuple[GetEngine, str]:
        model = arguments["model"]
        options = {**({"task": task} if task else {}), **read_engine_options(arguments)}

        async def remote() -> ChatEngine:
            return self._engines.remote(arguments["api_base"], api_key=arguments.get("api_key"))

        async def local() -> ChatEngine:
            engine = await self._engines.aget(config)
            register_model_info(f"{self.name}/{model}", engine.capabilities(), task=engine.status().task)
            return engine

        if arguments.get("api_base"):
            return remote, model
        config = self._engines.config(model, options)
        return local, config.request_name(model)

    def _errors(self, arguments: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        return litellm_errors(
            model=arguments["model"],
            provider=self.name,
            api_base=arguments.get("api_base"),
            hide_setup=is_proxied(arguments),
        )


handler: DashInferVLM = DashInferVLM()
"""The provider of this process. Engines are started on first use."""


def register() -> DashInferVLM:
    """Register the provider for `dashinfer_vlm/<model>` in this process. Repeated calls have no effect.

    Call it before creating a `Router`, which validates its models on creation.
    """
    others = [item for item in litellm.custom_provider_map if item["provider"] != PROVIDER]
    # Create a new list, because LiteLLM or the proxy may hold a reference to the old one.
    litellm.custom_provider_map = [*others, CustomLLMItem(provider=PROVIDER, custom_handler=handler)]
    custom_llm_setup()  # type: ignore[no-untyped-call]  # LiteLLM has no annotations there
    register_known_models(PROVIDER)
    return handler


def model_response(response: ModelResponse, completion: ChatCompletion) -> ModelResponse:
    """Copy a completion into LiteLLM's response object."""
    response.id = completion.id
    response.created = completion.created
    response.model = completion.model
    response.choices = [Choices(**choice.model_dump(exclude_unset=True)) for choice in completion.choices]
    if completion.usage is not None:
        response.usage = Usage(**completion.usage.model_dump(exclude_none=True))  # type: ignore[attr-defined]  # LiteLLM sets it in the same way
    return response


def embedding_response(
    response: EmbeddingResponse, result: PoolingResult, encoding_format: Literal["float", "base64"]
) -> EmbeddingResponse:
    """Copy embeddings into LiteLLM's response object."""
    tokens = sum(result.prompt_tokens)
    response.model = result.model
    response.data = [
        Embedding(embedding=row, index=index, object="embedding")
        for index, row in enumerate(result.encoded(encoding_format))
    ]
    response.usage = Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens)
    return response


async def stream_chunks(
    chunks: AsyncIterator[ChatCompletionChunk],
) -> AsyncIterator[ModelResponseStream | GenericStreamingChunk]:
    """Convert chunks to LiteLLM's.

    LiteLLM creates the chunks with the finish reason and the usage itself, and drops the usage of a stream that ends
    like OpenAI's. It keeps both if they arrive together in a final GenericStreamingChunk, its older chunk type. Both
    concern the first choice; the finish reasons of others are sent next to an empty delta of the first one, because
    LiteLLM inspects only that.
    """
    usage: dict[str, Any] | None = None
    finish_reason = "stop"
    async for chunk in chunks:
        data = chunk.model_dump(exclude_unset=True)
        usage = data.pop("usage", None) or usage
        finished = {each["index"]: each["finish_reason"] for each in data["choices"] if each.get("finish_reason")}
        finish_reason = finished.pop(0, finish_reason)
        for choice in data["choices"]:
            choice["finish_reason"] = None
        if any(_has_content(choice["delta"]) for choice in data["choices"]):
            yield ModelResponseStream(**data)
        for index, other in finished.items():
            choices = [{"index": 0, "delta": {}}, {"index": index, "delta": {}, "finish_reason": other}]
            yield ModelResponseStream(**{**data, "choices": choices})
    last = {"text": "", "is_finished": True, "finish_reason": finish_reason, "usage": usage}
    yield cast("GenericStreamingChunk", {**last, "index": 0, "tool_use": None})


def _has_content(delta: dict[str, Any]) -> bool:
    return any(value is not None for value in delta.values())
