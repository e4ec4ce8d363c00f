"""The page at `/`: asks the model from a browser, and shows what it sees.

The page is a few static files, which nothing but this server's own API stands behind. It takes no key to look at them;
where the API asks for one, the page does.
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

KINDS: Mapping[str, str] = MappingProxyType(
    {
        ".css": "text/css; charset=utf-8",
        ".html": "text/html; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".png": "image/png",
        ".svg": "image/svg+xml",
    }
)
"""The operating system's table may say otherwise, and `nosniff` would then have the browser refuse the files."""

FILES: Mapping[str, Path] = MappingProxyType(
    {"/" if path.name == "index.html" else f"/page/{path.name}": path for path in sorted(STATIC.iterdir())}
)
"""The page's files by their paths, which need no key."""

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",  # pictures as they were dropped, and as the model sees them
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # what the model writes can become text, never markup
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
    """An engine that can show what it would see; one that stands behind an address cannot."""

    async def apreview(self, request: ChatRequestLike) -> Preview: ...


Read: TypeAlias = Callable[[Request], Awaitable[ChatRequest]]
Finish: TypeAlias = "Callable[[Request, Coroutine[Any, Any, Preview]], Awaitable[Preview]]"


def add_page(app: FastAPI, engine: object, *, read: Read, finish: Finish) -> None:
    """Add `GET /`, the page's files under `/page/`, and, where the engine can, `POST /v1/media/preview`.

    Args:
        app: the application of the API that the page asks.
        engine: what answers there.
        read: gets the request out of a body, under the application's limits.
        finish: waits for the answer, as long as the application allows and the client stays.
    """
    for path, file in FILES.items():
        app.add_api_route(path, _File.read(file).answer, response_model=None, include_in_schema=False)
    if isinstance(engine, Previewer):
        route = _PreviewRoute(engine=engine, read=read, finish=finish)
        app.add_api_route(
            "/v1/media/preview",
            route.answer,
            methods=["POST"],
            response_model=None,
            responses=openapi.errors_of(openapi.CHAT_STATUSES),
            openapi_extra=openapi.body_of(ChatRequest),
        )


@dataclass(frozen=True, kw_only=True)
class _File:
    """A file of the page; they are few and small, and what is not among them cannot be asked for."""

    content: bytes
    media_type: str

    @classmethod
    def read(cls, path: Path) -> _File:
        return cls(content=path.read_bytes(), media_type=KINDS[path.suffix])

    async def answer(self) -> Response:
        return Response(self.content, media_type=self.media_type, headers=HEADERS)


@dataclass(frozen=True, kw_only=True)
class _PreviewRoute:
    engine: Previewer
    read: Read
    finish: Finish

    async def answer(self, request: Request) -> Response:
        """What the model would see of a chat completion request."""
        chat = await self.read(request)
        return JSONResponse(_as_json(await self.finish(request, self.engine.apreview(chat))))


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
        "frames": [{"index": frame.index, "url": _data_url(frame.png)} for frame in item.frames],
    }


def _data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
