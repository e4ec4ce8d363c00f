"""The chat page at `/`: sends requests from a browser, and shows images and videos as the model sees them.

The page consists of static files and uses only this server's API. The files are served without an API key; if the API
requires one, the page prompts for it.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from dashinfer_vlm_core.protocol import ChatRequest

from . import openapi

if TYPE_CHECKING:
    from dashinfer_vlm_core.engine import Request as ChatRequestLike
    from dashinfer_vlm_core.preprocessing.preview import MediaPreview, Preview

STATIC = Path(__file__).with_name("static")

MEDIA_TYPES: Mapping[str, str] = MappingProxyType(
    {
        ".css": "text/css; charset=utf-8",
        ".html": "text/html; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".png": "image/png",
        ".svg": "image/svg+xml",
    }
)
"""Fixed, because with a different entry in the operating system's table, `nosniff` would make browsers reject files."""

FILES: Mapping[str, Path] = MappingProxyType(
    {"/" if path.name == "index.html" else f"/page/{path.name}": path for path in sorted(STATIC.iterdir())}
)
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

HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": POLICY,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
)


@runtime_checkable
class Previewer(Protocol):
    """An engine that can preview media; a remote engine cannot."""

    async def apreview(self, request: ChatRequestLike) -> Preview: ...


ReadRequest: TypeAlias = Callable[[Request], Awaitable[ChatRequest]]
RunPreview: TypeAlias = "Callable[[Request, Coroutine[Any, Any, Preview]], Awaitable[Preview]]"


def add_page(app: FastAPI, engine: object, *, read: ReadRequest, run: RunPreview) -> None:
    """Add `GET /`, the page's files under `/page/` and, if the engine supports it, `POST /v1/media/preview`.

    Args:
        app: the application with the API.
        engine: the application's engine.
        read: reads and parses a request under the application's limits.
        run: awaits the preview with the application's timeout, and cancels it when the client disconnects.
    """
    for path, file in FILES.items():
        app.add_api_route(path, _File.read(file).serve, response_model=None, include_in_schema=False)
    if isinstance(engine, Previewer):
        route = _PreviewRoute(engine=engine, read=read, run=run)
        app.add_api_route(
            "/v1/media/preview",
            route.preview,
            methods=["POST"],
            response_model=None,
            responses=openapi.error_responses(openapi.CHAT_STATUSES),
            openapi_extra=openapi.request_body(ChatRequest),
        )


@dataclass(frozen=True, kw_only=True)
class _File:
    """A file of the page. Each has a separate route and stays in memory, so no request can reach other files."""

    content: bytes
    media_type: str

    @classmethod
    def read(cls, path: Path) -> _File:
        return cls(content=path.read_bytes(), media_type=MEDIA_TYPES[path.suffix])

    async def serve(self) -> Response:
        return Response(self.content, media_type=self.media_type, headers=HEADERS)


@dataclass(frozen=True, kw_only=True)
class _PreviewRoute:
    engine: Previewer
    read: ReadRequest
    run: RunPreview

    async def preview(self, request: Request) -> Response:
        """Show the images and videos of a chat completion request as the model sees them."""
        chat = await self.read(request)
        return JSONResponse(_as_json(await self.run(request, self.engine.apreview(chat))))


def _as_json(preview: Preview) -> dict[str, Any]:
    return {
        "object": "media.preview",
        "prompt_tokens": preview.prompt_tokens,
        "max_model_len": preview.max_model_len,
        "data": [_item(item) for item in preview.items],
    }


def _item(item: MediaPreview) -> dict[str, Any]:
    return {
        "part": item.path,
        "kind": item.kind,
        "source_size": item.source_size,
        "size": item.size,
        "grid": item.grid,
        "cells": item.cells,
        "tokens": item.tokens,
        "frame_count": item.frame_count,
        "coordinate_extent": item.coordinates and item.coordinates.extent,
        "frames": [{"index": frame.index, "url": _data_url(frame.png)} for frame in item.frames],
    }


def _data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
