"""The application: which URL answers what."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from openai.types import Model

from dashinfer_vlm_core.errors import ModelNotFound

from .errors import HANDLERS
from .page import add_page
from .requests import read_chat_request, unless_disconnected
from .sse import EventStream

if TYPE_CHECKING:
    from pydantic import BaseModel

    from dashinfer_vlm_core.engine import ChatEngine
    from dashinfer_vlm_core.schema import ChatRequest

MAX_BODY_BYTES = 288 * 1024 * 1024
"""Most bytes of a request by default: a video of 200 MiB is 267 MiB in base64."""

MAX_BODY_PAUSE = 60.0
"""Seconds that a request's body may stand still by default: one that has stalled would be kept for ever."""


def create_app(
    engine: ChatEngine,
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    max_body_pause: float = MAX_BODY_PAUSE,
    page: bool = True,
) -> FastAPI:
    """An ASGI application that answers OpenAI's chat completions with `engine`.

    Starting and closing the engine is left to the caller; `/health` answers 503 while it is closed.

    Args:
        engine: what answers.
        max_body_bytes: most bytes of a request's body; larger ones are refused with 413.
        max_body_pause: most seconds between two pieces of it; after longer ones it is refused with 408.
        page: whether `/` answers with the page, see `page`.
    """
    routes = _Routes(engine=engine, max_body_bytes=max_body_bytes, max_body_pause=max_body_pause)
    app = FastAPI(title="dashinfer-vlm", redirect_slashes=False, openapi_url=None)
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_api_route("/v1/chat/completions", routes.chat_completions, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", routes.models, response_model=None)
    app.add_api_route("/v1/models/{name:path}", routes.model, response_model=None)
    app.add_api_route("/health", routes.health, response_model=None)
    if page:
        add_page(app, engine, routes.read)
    return app


@dataclass(frozen=True, kw_only=True)
class _Routes:
    engine: ChatEngine
    max_body_bytes: int
    max_body_pause: float
    started: int = field(default_factory=lambda: int(time.time()))

    async def chat_completions(self, request: Request) -> Response:
        chat = await self.read(request)
        if chat.stream:
            return EventStream(self.engine.astream(chat))
        return _json(await unless_disconnected(request.receive, self.engine.achat(chat)))

    async def read(self, request: Request) -> ChatRequest:
        return await read_chat_request(request, max_bytes=self.max_body_bytes, max_pause=self.max_body_pause)

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model().model_dump()]})

    async def model(self, name: str) -> Response:
        model = self._model()
        if name != model.id:
            raise ModelNotFound(f"The model {name!r} is not served here: ask for {model.id!r}.", param="model")
        return _json(model)

    async def health(self) -> Response:
        status = self.engine.status()
        body: dict[str, Any] = {
            "status": status.state,
            "model": status.model,
            "decoder": status.decoder,
            "reason": status.decoder_reason,
            "max_model_len": status.max_model_len,
        }
        if status.trouble:
            body["trouble"] = status.trouble
        return JSONResponse(body, status_code=200 if status.state == "ready" else 503)

    def _model(self) -> Model:
        return Model(id=self.engine.status().model, object="model", created=self.started, owned_by="dashinfer-vlm")


def _json(reply: BaseModel) -> Response:
    """OpenAI's wire form: fields that were set to null stay null, fields that were not set stay away."""
    return Response(reply.model_dump_json(exclude_unset=True), media_type="application/json")
