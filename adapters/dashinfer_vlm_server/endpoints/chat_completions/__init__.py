"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastapi import Request
from fastapi.responses import Response
from openai.types.chat import ChatCompletion

from dashinfer_vlm_core.protocol import ChatRequest

from ...endpoint import Endpoint, completion_response, post
from ...sse import format_event

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionChunk

    from ...server_context import ServerContext


PROTOCOL = "openai"


def create_endpoints(server: ServerContext) -> Sequence[Endpoint]:
    async def chat_completions(request: Request) -> Response:
        chat = await server.read(request, ChatRequest.parse)
        if chat.stream:
            chunks = server.engine.astream(chat)
            return server.stream(chunks, encode=_chunk_event, model=chat.model)
        return await completion_response(await server.run(request, server.engine.achat(chat)))

    return [post("/v1/chat/completions", chat_completions, body=[ChatRequest], response=ChatCompletion, generates=True)]


def _chunk_event(chunk: ChatCompletionChunk) -> str:
    return format_event(chunk.model_dump_json(exclude_unset=True))
