"""`POST /score`, in vLLM's format."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from dashinfer_vlm_core.protocol import ScoreRequest

from ...endpoint import Endpoint, PromptUsage, json_response, post

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import PoolingResult

    from ...server_context import ServerContext

PATHS = ("/v1/score", "/score")


class Score(BaseModel):
    """The probability that the document of a pair is relevant for its query."""

    index: int
    object: str = "score"
    score: float


class ScoreResponse(BaseModel):
    """The scores of pairs, in the order of the request."""

    id: str
    object: str
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


def create_endpoints(server: ServerContext) -> Sequence[Endpoint]:
    async def score(request: Request) -> Response:
        parsed = await server.read(request, ScoreRequest.parse)
        return json_response(_response(await server.run(request, server.engine.ascore(parsed))))

    return [post(path, score, body=[ScoreRequest], response=ScoreResponse, generates=True) for path in PATHS]


def _response(result: PoolingResult) -> ScoreResponse:
    return ScoreResponse(
        id=f"score-{uuid.uuid4().hex}",
        object="list",
        created=int(time.time()),
        model=result.model,
        data=[Score(index=index, object="score", score=score) for index, score in enumerate(result.values.tolist())],
        usage=PromptUsage.of(result.prompt_tokens),
    )
