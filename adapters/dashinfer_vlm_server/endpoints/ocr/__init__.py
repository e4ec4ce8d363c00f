"""`POST /v1/ocr`, in Mistral's format."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from fastapi import Request
from fastapi.responses import Response

from dashinfer_vlm_core.concurrency.streams import with_pauses
from dashinfer_vlm_core.protocol.ocr import OcrRequest
from dashinfer_vlm_core.response.ocr import OcrChunk, OcrResponse

from ...endpoint import Endpoint, post
from ...sse import COMMENT_SECONDS, format_event

if TYPE_CHECKING:
    from ...server_context import ServerContext


PROTOCOL = "ocr"


def create_endpoints(server: ServerContext) -> Sequence[Endpoint]:
    async def ocr(request: Request) -> Response:
        parsed = await server.read(request, OcrRequest.parse)
        chunks = server.engine.aocr(parsed)
        if parsed.stream:
            # A page can take minutes, and waits for those of other documents: comments keep the connection open.
            events = with_pauses(chunks, COMMENT_SECONDS)
            return server.stream(events, encode=_to_event, model=parsed.model)
        response = await server.run(request, _complete(chunks))
        return Response(response.model_dump_json(), media_type="application/json")

    return [post("/v1/ocr", ocr, body=[OcrRequest], response=OcrResponse, generates=True)]


async def _complete(chunks: AsyncGenerator[OcrChunk, None]) -> OcrResponse:
    async with contextlib.aclosing(chunks):
        received = [chunk async for chunk in chunks]
    last = received[-1]
    return OcrResponse(pages=tuple(chunk.page for chunk in received), model=last.model, usage_info=last.usage_info)


def _to_event(chunk: OcrChunk | None) -> str:
    return format_event(chunk.model_dump_json()) if chunk else ": converting pages\n\n"
