"""The provider: LiteLLM's four ways to ask for a chat completion, over engines of this process or of others."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Generator
from typing import TYPE_CHECKING, Any

from litellm.llms.custom_llm import CustomLLM
from litellm.types.utils import GenericStreamingChunk, ModelResponse, ModelResponseStream

from dashinfer_vlm_core.concurrency.deadline import stream_with_timeout, with_timeout
from dashinfer_vlm_core.concurrency.loop import LoopThread
from dashinfer_vlm_core.engine.shared import SHARED, PerProcess, SharedEngines

from .call import Call, is_proxied, read_call
from .errors import litellm_errors
from .model_info import register_model_info
from .responses import model_response, stream_chunks

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    from dashinfer_vlm_core.engine import ChatEngine

PROVIDER = "dashinfer_vlm"


class DashInferVLM(CustomLLM):
    """Answers LiteLLM's calls for `dashinfer_vlm/<model>`.

    The model is a registered name (`demo`), a checkpoint folder or a hub id. Its engine is loaded in this process on
    first use, with `engine_options` and the environment as EngineConfig takes them, and shared by all calls of equal
    options; with `api_base`, a server is asked instead. LiteLLM leaves deadlines to the provider: `timeout` is for the
    whole answer, `first_token_timeout` for the beginning of a stream.

    Args:
        engines: where engines come from; those that all adapters of this process share if None.
        name: the provider's, in front of the model's.
    """

    def __init__(self, engines: SharedEngines | None = None, *, name: str = PROVIDER) -> None:
        super().__init__()
        self.name = name
        self._engines = engines or SHARED
        # Callers without an event loop get this one: so there is one way to keep deadlines, and to cancel.
        self._loop = PerProcess(lambda: LoopThread("dashinfer-vlm-litellm"))

    def completion(self, *_: Any, **arguments: Any) -> ModelResponse:
        return self._loop.get().call(self.acompletion(**arguments))

    # LiteLLM takes ModelResponseStream too, which its annotations do not know yet; and it takes async generators alone.

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

    async def _chat(self, call: Call) -> ChatCompletion:
        engine, model = await self._engine(call)
        return await engine.achat({**call.request, "model": model})

    async def _stream(self, call: Call) -> AsyncGenerator[ChatCompletionChunk, None]:
        engine, model = await self._engine(call)
        async with contextlib.aclosing(engine.astream({**call.request, "model": model})) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _engine(self, call: Call) -> tuple[ChatEngine, str]:
        """What answers a call, and by which name it knows the model."""
        if call.api_base:
            return self._engines.remote(call.api_base, api_key=call.api_key), call.model
        config = self._engines.config(call.model, call.engine_options)
        engine = await self._engines.aget(config)
        register_model_info(f"{self.name}/{call.model}", engine.status().max_model_len)
        return engine, config.name

    def _errors(self, arguments: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
        return litellm_errors(model=arguments["model"], provider=self.name, hide_setup=is_proxied(arguments))
