"""The application: which URL answers what."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from openai.types import Model
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware

from dashinfer_vlm_core.concurrency.deadline import stream_with_timeout, with_timeout
from dashinfer_vlm_core.errors import EngineClosed, ModelNotFound
from dashinfer_vlm_core.protocol import ChatRequest, DetokenizeRequest, TokenizeChat, TokenizePrompt, parse_tokenize
from dashinfer_vlm_core.version import __version__

from . import openapi
from .api_keys import OPEN_ROUTES, ApiKeyMiddleware
from .errors import DRAINING, HANDLERS, LATER_SECONDS
from .metrics import Metrics, ObservableEngine
from .page import FILES, add_page
from .request_body import read_request, unless_disconnected
from .request_context import HEADER, ByteBudget, RequestContextMiddleware, current_request
from .settings import DrainState, Settings
from .sse import EventStream
from .tokens import Detokenized, Tokenized, detokenize, tokenize

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import TypeVar

    from dashinfer_vlm_core.engine import ChatEngine

    T = TypeVar("T")


def create_app(
    engine: ChatEngine, settings: Settings | None = None, *, drain_state: DrainState | None = None
) -> FastAPI:
    """An ASGI application that answers OpenAI's chat completions with `engine`.

    Starting and closing the engine is left to the caller; until it is ready, `/health/ready` and every question are
    answered with 503.

    Args:
        engine: what answers.
        settings: limits, keys and origins; `Settings()` if None.
        gate: closed by whoever is about to end the server, so that nothing new is begun.
    """
    settings, metrics = settings or Settings(), Metrics(engine)
    if settings.tracer and isinstance(engine, ObservableEngine):
        engine.add_observer(settings.tracer)
    app = FastAPI(
        title="dashinfer-vlm",
        description="OpenAI's chat completions about pictures and videos.",
        redirect_slashes=False,
        openapi_url=None,
    )
    app.router.route_class = _Route
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    routes = _Routes(engine=engine, settings=settings, drain_state=drain_state or DrainState(), metrics=metrics)
    routes.add_to(app)
    if settings.page:
        add_page(app, engine, read=routes.read_chat, finish=routes.unless_left)
    app.add_middleware(
        ApiKeyMiddleware, keys=settings.keys, open_routes=OPEN_ROUTES.union(FILES if settings.page else ())
    )
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", HEADER],
            expose_headers=[HEADER, "Retry-After"],
        )
    budget = ByteBudget(settings.max_buffered_bytes)
    app.add_middleware(
        RequestContextMiddleware, routes=app.routes, metrics=metrics, budget=budget, tracer=settings.tracer
    )
    return app


class _Route(APIRoute):
    """What answers GET answers HEAD too (RFC 9110, 9.1); the HTTP server leaves the body out."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.methods and "GET" in self.methods:
            self.methods.add("HEAD")


class ModelList(BaseModel):
    """The models that are served: one."""

    object: str
    data: list[Model]


class Health(BaseModel):
    """How the engine is."""

    status: str
    model: str
    decoder: str
    reason: str
    max_model_len: int
    fatal_error: str | None = None


class Version(BaseModel):
    """Of this package."""

    version: str


@dataclass(frozen=True, kw_only=True)
class _Routes:
    engine: ChatEngine
    settings: Settings
    drain_state: DrainState
    metrics: Metrics
    started: int = field(default_factory=lambda: int(time.time()))

    def add_to(self, app: FastAPI) -> None:
        """Every route, with what its OpenAPI document says."""

        def add(path: str, answer: Callable[..., Any], model: Any, statuses: tuple[int, ...], **options: Any) -> None:
            responses = {200: {"model": model}, **openapi.errors_of(statuses)}
            app.add_api_route(path, answer, response_model=None, responses=responses, **options)

        chat, tokens, plain = openapi.CHAT_STATUSES, openapi.TOKEN_STATUSES, openapi.PLAIN_STATUSES
        post: dict[str, Any] = {"methods": ["POST"]}
        body = openapi.body_of
        add(
            "/v1/chat/completions", self.chat_completions, ChatCompletion, chat, openapi_extra=body(ChatRequest), **post
        )
        add("/v1/models", self.models, ModelList, plain)
        add("/v1/models/{name:path}", self.model, Model, plain)
        add("/tokenize", self.tokenize, Tokenized, tokens, openapi_extra=body(TokenizePrompt, TokenizeChat), **post)
        add("/detokenize", self.detokenize, Detokenized, tokens, openapi_extra=body(DetokenizeRequest), **post)
        add("/health", self.health, Health, ())
        ready: dict[int | str, dict[str, Any]] = {
            200: {"model": Health},
            503: {"model": Health, "description": "Requests cannot be answered now"},
        }
        app.add_api_route("/health/ready", self.ready, response_model=None, responses=ready)
        add("/version", self.version, Version, plain)
        app.add_api_route("/metrics", self.show_metrics, response_model=None, include_in_schema=False)
        app.add_api_route(
            "/openapi.json", lambda: JSONResponse(openapi.document(app)), response_model=None, include_in_schema=False
        )

    async def chat_completions(self, request: Request) -> Response:
        chat = await self.read_chat(request)
        seconds = self.settings.request_timeout
        if chat.stream:
            return EventStream(stream_with_timeout(self.engine.astream(chat), seconds=seconds, first=None))
        return _json(await self.unless_left(request, self.engine.achat(chat)))

    async def read_chat(self, request: Request) -> ChatRequest:
        return await self._read(request, ChatRequest.parse)

    async def tokenize(self, request: Request) -> Response:
        return _json(await self.unless_left(request, tokenize(self.engine, await self._read(request, parse_tokenize))))

    async def detokenize(self, request: Request) -> Response:
        tokens = await self._read(request, DetokenizeRequest.parse)
        return _json(await self.unless_left(request, detokenize(self.engine, tokens)))

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model().model_dump()]})

    async def model(self, name: str) -> Response:
        model = self._model()
        if name != model.id:
            raise ModelNotFound(f"The model {name!r} is not served here: ask for {model.id!r}.", param="model")
        return _json(model)

    async def health(self) -> Response:
        """The process serves, whatever became of its engine."""
        return _json(self._health())

    async def ready(self) -> Response:
        """Whether a question would be answered."""
        health = self._health()
        if health.status == "ready":
            return _json(health)
        return _json(health, status=503, headers={"Retry-After": str(LATER_SECONDS)})

    async def version(self) -> Response:
        return _json(Version(version=__version__))

    async def show_metrics(self, request: Request) -> Response:
        text, content_type = self.metrics.text(request.headers.get("accept", ""))
        return Response(text, media_type=content_type)

    async def _read(self, request: Request, parse: Callable[[object], T]) -> T:
        if self.drain_state.draining:
            raise EngineClosed("The server is ending: ask another one, or try again when it is back.", code=DRAINING)
        settings = self.settings
        return await read_request(
            request,
            parse,
            max_bytes=settings.max_body_bytes,
            max_pause=settings.max_body_pause,
            hold=current_request(request.scope).hold,
        )

    async def unless_left(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        return await unless_disconnected(request.receive, with_timeout(work, self.settings.request_timeout))

    def _health(self) -> Health:
        status = self.engine.status()
        health = Health(
            status="draining" if self.drain_state.draining else status.state,
            model=status.model,
            decoder=status.decoder,
            reason=status.decoder_reason,
            max_model_len=status.max_model_len,
        )
        return health.model_copy(update={"fatal_error": status.fatal_error}) if status.fatal_error else health

    def _model(self) -> Model:
        return Model(id=self.engine.status().model, object="model", created=self.started, owned_by="dashinfer-vlm")


def _json(reply: BaseModel, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """OpenAI's wire form: fields that were set to null stay null, fields that were not set stay away."""
    text = reply.model_dump_json(exclude_unset=True)
    return Response(text, status_code=status, headers=headers, media_type="application/json")
