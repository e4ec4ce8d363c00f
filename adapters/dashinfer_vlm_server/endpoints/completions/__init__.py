"""`POST /v1/completions`: OpenAI's legacy completions, which continue prompts without a chat template."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import pydantic_core
from fastapi import Request
from fastapi.responses import Response
from openai.types import Completion

from dashinfer_vlm_core.concurrency.streams import merge_streams
from dashinfer_vlm_core.protocol.completions import CompletionRequest, PlainRequest
from dashinfer_vlm_core.protocol.request import MAX_COMPLETIONS
from dashinfer_vlm_core.protocol.validation_errors import renamed_errors
from dashinfer_vlm_core.response.completion_builder import CompletionBuilder, Json

from ...endpoint import Endpoint, completion_response, post
from ...sse import format_event

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionChunk

    from dashinfer_vlm_core.engine import ChatEngine

    from ...server_context import ServerContext


PROTOCOL = "openai"


def create_endpoints(server: ServerContext) -> Sequence[Endpoint]:
    async def completions(request: Request) -> Response:
        creation = _Creation(server.engine, await server.read(request, CompletionRequest.parse))
        if creation.request.stream:
            return server.stream(creation.chunks(), encode=_chunk_event, model=creation.request.model)
        return await completion_response(await server.run(request, creation.complete()))

    return [post("/v1/completions", completions, body=[CompletionRequest], response=Completion, generates=True)]


class _Creation:
    """The creation of the response to one request, whose prompts are continued concurrently.

    No more completions are computed at a time than a chat request can have, or the decoder surely accepts.
    """

    def __init__(self, engine: ChatEngine, request: CompletionRequest) -> None:
        self.request = request
        self._engine = engine

    async def complete(self) -> Completion:
        """Create the response. It is built like a streamed one, so that both are equal."""
        builder = await self._builder()
        async with contextlib.aclosing(self._chat_chunks()) as chunks:
            async for prompt, chunk in chunks:
                builder.add_chunk(prompt, chunk)
        return await asyncio.to_thread(builder.completion)

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """Create the response; yield it as chunks."""
        builder = await self._builder()
        async with contextlib.aclosing(self._chat_chunks()) as chunks:
            async for prompt, added in chunks:
                for chunk in builder.add_chunk(prompt, added):
                    yield chunk
        for chunk in builder.usage_chunks():
            yield chunk

    async def _builder(self) -> CompletionBuilder:
        echoed = [await self._echo(index, prompt) for index, prompt in enumerate(self.request.prompts())]
        return CompletionBuilder(self.request, echoed)

    async def _echo(self, index: int, prompt: str | tuple[int, ...]) -> str:
        if not self.request.echo:
            return ""
        if isinstance(prompt, str):
            return prompt
        with renamed_errors(partial(self.request.rename, index)):
            return await self._engine.for_model(self.request.model).adecode(prompt)

    def _chat_chunks(self) -> AsyncGenerator[tuple[int, ChatCompletionChunk], None]:
        streams = [self._stream(index, request) for index, request in enumerate(self.request.to_requests())]
        status = self._engine.for_model(self.request.model).status()
        limit = max(1, min(MAX_COMPLETIONS, status.max_parallel) // self.request.n)
        return merge_streams(streams, limit=limit)

    async def _stream(self, index: int, request: PlainRequest) -> AsyncGenerator[ChatCompletionChunk, None]:
        with renamed_errors(partial(self.request.rename, index)):
            async with contextlib.aclosing(self._engine.astream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk


def _chunk_event(chunk: Json) -> str:
    return format_event(pydantic_core.to_json(chunk).decode())
