"""`POST /v1/embeddings`, in OpenAI's format, with vLLM's `messages`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from fastapi import Request
from fastapi.responses import Response
from openai.types import CreateEmbeddingResponse
from pydantic_core import to_json

from dashinfer_vlm_core.protocol import EmbeddingRequest

from ...endpoint import Endpoint, PromptUsage, post

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import PoolingResult

    from ...server_context import ServerContext


PROTOCOL = "openai"


def create_endpoints(server: ServerContext) -> Sequence[Endpoint]:
    async def embeddings(request: Request) -> Response:
        parsed = await server.read(request, EmbeddingRequest.parse)
        result = await server.run(request, server.engine.aembed(parsed))
        # In a thread: thousands of embeddings are many megabytes.
        body = await asyncio.to_thread(_body, result, parsed.encoding_format)
        return Response(body, media_type="application/json")

    return [
        post("/v1/embeddings", embeddings, body=[EmbeddingRequest], response=CreateEmbeddingResponse, generates=True)
    ]


def _body(result: PoolingResult, encoding_format: Literal["float", "base64"]) -> bytes:
    rows = result.encoded(encoding_format)
    return to_json({
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)],
        "model": result.model,
        "usage": PromptUsage.of(result.prompt_tokens),
    })  # fmt: skip
