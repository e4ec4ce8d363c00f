"""The chat page at `/`: sends requests from a browser, and shows images and videos as the model sees them.

The page consists of static files and uses only this server's API. The files are served without an API key; if the API
requires one, the page prompts for it.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from dashinfer_vlm_core.protocol import ChatRequest

from ...endpoint import Endpoint, post

if TYPE_CHECKING:
    from dashinfer_vlm_core.preprocessing.preview import MediaPreview, Preview

    from ...server_context import ServerContext

STATIC = Path(__file__).with_name("static")

MEDIA_TYPES: Mapping[str, str] = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}
"""Fixed, because with a different entry in the operating system's table, `nosniff` would make browsers reject files."""

FILES: Mapping[str, Path] = {
    "/" if path.name == "index.html" else f"/page/{path.name}": path for path in sorted(STATIC.iterdir())
}
"""The page's files by URL path. They require no key."""

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",  # images as they were added, and as the model sees them
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # model output is displayed as text, never as markup
        "trusted-types 'none'",
    ]
)

HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), display-capture=(self), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def create_endpoints(server: ServerContext) -> Sequence[Endpoint]:
    if not server.settings.page:
        return []
    contents = {path: file.read_bytes() for path, file in FILES.items()}  # no request can reach other files

    def respond(path: str) -> Response:
        if path not in contents:
            raise HTTPException(404)
        return Response(contents[path], media_type=MEDIA_TYPES[FILES[path].suffix], headers=HEADERS)

    async def index() -> Response:
        return respond("/")

    async def file(name: str) -> Response:
        return respond(f"/page/{name}")

    async def preview(request: Request) -> Response:
        """Show the images and videos of a chat completion request as the model sees them."""
        chat = await server.read(request, ChatRequest.parse)
        shown = await server.run(request, server.engine.apreview(chat))
        return await asyncio.to_thread(_response, shown)  # the frames of a video are megabytes

    page = partial(Endpoint, public=True, include_in_schema=False)
    return [
        page("/", index),
        page("/page/{name}", file),
        post("/v1/media/preview", preview, body=[ChatRequest]),
    ]


def _response(preview: Preview) -> Response:
    return JSONResponse({
        "object": "media.preview",
        "prompt_tokens": preview.prompt_tokens,
        "max_model_len": preview.max_model_len,
        "data": [_item(item) for item in preview.items],
    })  # fmt: skip


def _item(item: MediaPreview) -> dict[str, Any]:
    return {
        "part": item.path,
        "kind": item.kind,
        "source_size": item.source_size,
        "size": item.size,
        "grid": item.grid,
        "cells": item.cells,
        "tokens": item.kept_tokens,
        "pruned_tokens": item.pruned_tokens,
        "frame_count": item.frame_count,
        "coordinate_extent": item.coordinates and item.coordinates.extent,
        "frames": [
            {"index": frame.index, "url": f"data:image/png;base64,{base64.b64encode(frame.png).decode()}"}
            for frame in item.frames
        ],
    }
