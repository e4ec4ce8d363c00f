"""The provider: completions and streams, synchronous and asynchronous, with an engine in process or a server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Generator
from typing import TYPE_CHECKING, Any

from litellm.llms.custom_llm import CustomLLM
from litellm.types.utils import (
    EmbeddingResponse,
    GenericStreamingChunk,
    ImageResponse,
    ModelResponse,
    ModelResponseStream,
)

from dashinfer_vlm_core.concurrency.deadline import stream_with_timeout, with_timeout
from dashinfer_vlm_core.concurrency.loop import LoopThread
from dashinfer_vlm_core.engine.shared import SHARED, PerProcess, SharedEngines
from dashinfer_vlm_core.errors import UnsupportedParameter

from .call import Call, is_proxied, read_call
from .errors import litellm_errors
from .model_info import register_model_info
from .responses import model_response, stream_chunks

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    from dashinfer_vlm_core.engine import ChatEngine

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
        # An event loop for synchronous callers, so that timeouts and cancellation have one implementation.
        self._loop = PerProcess(lambda: LoopThread("dashinfer-vlm-litellm"))

    def completion(self, *_: Any, **arguments: Any) -> ModelResponse:
        return self._loop.get().call(self.acompletion(**arguments))

    # LiteLLM accepts ModelResponseStream too, which its annotations lack. It accepts only async generators.

    def streaming(  # type: ignore[override]
        self, *_: Any, **arguments: Any
    ) -> Generator[ModelResponseStream | GenericStreamingChunk, None, None]:
        return self._loop.get().iterate(self.astreaming(**arguments))

    async def acompletion(self, *_: Any, **arguments: Any) -> ModelResponse:
        with self._errors(arguments):
            call = read_call(arguments, stream=False)
            return model_response(arguments["model_response"], await with_timeout(self._chat(call), call.timeout))

    async def astreaming(  # type: ignore[override]
        self, *_: Any, **arguments: Any
    ) -> AsyncGenerator[ModelResponseStream | GenericStreamingChunk, None]:
        with self._errors(arguments):
            call = read_call(arguments, stream=True)
            limited = stream_with_timeout(self._stream(call), seconds=call.timeout, first=call.first_token_timeout)
            async with contextlib.aclosing(limited) as chunks:
                async for chunk in stream_chunks(chunks):
                    yield chunk

    # Without these methods, LiteLLM reports that they are not implemented yet.

    def embedding(self, *_: Any, **arguments: Any) -> EmbeddingResponse:
        with self._errors(arguments):
            raise _generates_text("Embeddings are")

    async def aembedding(self, *_: Any, **arguments: Any) -> EmbeddingResponse:
        return self.embedding(**arguments)

    def image_generation(self, *_: Any, **arguments: Any) -> ImageResponse:
        with self._errors(arguments):
            raise _generates_text("Image generation is")

    async def aimage_generation(self, *_: Any, **arguments: Any) -> ImageResponse:
        return self.image_generation(**arguments)

    async def _chat(self, call: Call) -> ChatCompletion:
        engine, model = await self._engine(call)
        return await engine.achat({**call.request, "model": model})

    async def _stream(self, call: Call) -> AsyncGenerator[ChatCompletionChunk, None]:
        engine, model = await self._engine(call)
        async with contextlib.aclosing(engine.astream({**call.request, "model": model})) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _engine(self, call: Call) -> tuple[ChatEngine, str]:
        if call.api_base:
            return self._engines.remote(call.api_base, api_key=call.api_key), call.model
        config = self._engines.config(call.model, call.engine_options)
        engine = await self._engines.aget(config)
        register_model_info(f"{self.name}/{call.model}", engine.capabilities())
        return engine, config.request_name(call.model)

    def _errors(self, arguments: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        return litellm_errors(model=arguments["model"], provider=self.name, hide_setup=is_proxied(arguments))


def _generates_text(subject: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"{subject} not available, because the models of this provider generate text. Use `completion`, or another"
        " provider.",
        param="model",
    )
