"""`POST /pooling`, in vLLM's format, for models with late interaction."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from pydantic_core import to_json

from dashinfer_vlm_core.engine.late_interaction import to_base64
from dashinfer_vlm_core.protocol import PoolingRequest

from ...endpoint import Endpoint, PromptUsage, post

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import TokenEmbeddings

    from ...server_context import ServerContext


class PooledItem(BaseModel):
    """The embeddings of the tokens of an item: a row for each token, or all rows as float32 in base64."""

    index: int
    object: str = "pooling"
    data: list[list[float]] | str


class PoolingResponse(BaseModel):
    """The embeddings of the tokens of each item, in the order of the request."""

    id: str
    object: str
    created: int
    model: str
    data: list[PooledItem]
    usage: PromptUsage


def create_endpoints(server: ServerContext) -> Sequence[Endpoint]:
    async def pooling(request: Request) -> Response:
        parsed = await server.read(request, PoolingRequest.parse)
        result = await server.run(request, server.engine.aembed_tokens(parsed))
        # In a thread: the embeddings of a few pages are many megabytes.
        body = await asyncio.to_thread(_body, result, as_base64=parsed.encoding_format == "base64")
        return Response(body, media_type="application/json")

    return [post("/pooling", pooling, body=[PoolingRequest], response=PoolingResponse, generates=True)]


def _body(result: TokenEmbeddings, *, as_base64: bool) -> bytes:
    # Item by item: numbers as Python objects take several times the memory of their text.
    items: list[bytes] = []
    for index, rows in enumerate(result.vectors):
        data = to_base64(rows) if as_base64 else rows.tolist()
        items.append(to_json({"index": index, "object": "pooling", "data": data}))
    others = to_json({
        "id": f"pool-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": result.model,
        "usage": PromptUsage.of(result.prompt_tokens),
    })  # fmt: skip
    return others[:-1] + b',"data":[' + b",".join(items) + b"]}"
