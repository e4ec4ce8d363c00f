"""`POST /v1/rerank`, with the fields of Jina and Cohere."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from dashinfer_vlm_core.protocol import RerankRequest

from ...endpoint import Endpoint, PromptUsage, json_response, post

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import PoolingResult

    from ...server_context import ServerContext

PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")


class RankedText(BaseModel):
    """The text of a document."""

    text: str


class RerankResult(BaseModel):
    """A document; `index` is its index in the request."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class RerankResponse(BaseModel):
    """Documents, the most relevant first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PromptUsage


def create_endpoints(server: ServerContext) -> Sequence[Endpoint]:
    async def rerank(request: Request) -> Response:
        parsed = await server.read(request, RerankRequest.parse)
        result = await server.run(request, server.engine.ascore(parsed))
        return json_response(await asyncio.to_thread(_response, parsed, result))

    return [post(path, rerank, body=[RerankRequest], response=RerankResponse, generates=True) for path in PATHS]


def _response(request: RerankRequest, result: PoolingResult) -> RerankResponse:
    scores: list[float] = result.values.tolist()
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    texts = request.texts() if request.return_documents else [None] * len(scores)
    return RerankResponse(
        id=f"rerank-{uuid.uuid4().hex}",
        model=result.model,
        results=[
            RerankResult(index=index, relevance_score=scores[index])
            if (text := texts[index]) is None
            else RerankResult(index=index, relevance_score=scores[index], document=RankedText(text=text))
            for index in order[: request.top_n or None]
        ],
        usage=PromptUsage.of(result.prompt_tokens),
    )
