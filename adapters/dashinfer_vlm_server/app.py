"""The ASGI application and its routes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from openai.types import Model
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field
from starlette.middleware.cors import CORSMiddleware

from dashinfer_vlm_core import __version__
from dashinfer_vlm_core.concurrency.deadline import stream_with_timeout, with_timeout
from dashinfer_vlm_core.errors import EngineClosed, ModelNotFound
from dashinfer_vlm_core.protocol import ChatRequest, DetokenizeRequest, TokenizeChat, TokenizePrompt, parse_tokenize

from . import openapi
from .authentication import ApiKeyMiddleware, ApiKeyReloader
from .body_memory import BodyMemoryBudget
from .cross_origin import CrossOriginMiddleware, normalize_allowed_host
from .errors import DRAINING, HANDLERS, RETRY_AFTER_SECONDS
from .metrics import Metrics, ObservableEngine
from .page import FILES, add_page
from .rate_limits import RATE_LIMIT_HEADERS, KeyLimiter, charge, count_usage
from .request_body import cancel_on_disconnect, read_request
from .request_context import HEADER, RequestContextMiddleware, get_request_context
from .response_store import ResponseStore
from .responses import ResponseRoutes
from .routes import PUBLIC_ROUTES
from .settings import BUFFERED_BODIES, DrainState, Settings
from .sse import EventStream, chat_error_event, chat_event
from .tokens import DetokenizeResponse, TokenizeResponse, detokenize, tokenize

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine
    from typing import TypeVar

    from openai.types.chat import ChatCompletionChunk

    from dashinfer_vlm_core.engine import ChatEngine

    from .tracing import Tracer

    T = TypeVar("T")


def create_app(
    engine: ChatEngine,
    settings: Settings | None = None,
    *,
    tracer: Tracer | None = None,
    drain_state: DrainState | None = None,
) -> FastAPI:
    """Create an ASGI application that serves OpenAI's chat completions API.

    The caller starts and closes the engine. Until it is ready, `/health/ready` and all requests to the model return
    503. Without API keys, requests of web pages of other origins, and with unknown host names, are rejected.

    Args:
        engine: the engine that serves the requests.
        settings: limits, keys, hosts and origins; `Settings()` if None.
        tracer: records traces of requests, in addition to the metrics.
        drain_state: set its `draining` before shutdown to reject new requests.

    Raises:
        ConfigError: `settings.allowed_hosts` contains something that is not a host name.
    """
    settings, metrics = settings or Settings(), Metrics(engine)
    limiter = KeyLimiter(clock=settings.clock, on_rejection=metrics.count_rate_limited)
    if isinstance(engine, ObservableEngine):
        for observer in filter(None, (tracer, limiter if len(settings.keys) else None)):
            engine.add_observer(observer)
    app = FastAPI(
        title="dashinfer-vlm",
        description="OpenAI's chat completions API with images and videos.",
        redirect_slashes=False,
        openapi_url=None,
    )
    app.router.route_class = openapi.DocumentedRoute
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    routes = _Routes(engine=engine, settings=settings, drain_state=drain_state or DrainState(), metrics=metrics)
    routes.add_to(app)
    store = ResponseStore(max_responses=settings.max_stored_responses, max_bytes=settings.max_stored_bytes)
    ResponseRoutes(
        engine=engine,
        store=store,
        read=routes.read,
        run=routes.run_with_limits,
        stream=routes.stream_chat,
        timeout=settings.request_timeout,
    ).add_to(app)
    if settings.page:
        add_page(app, engine, read=routes.read_chat, run=routes.run_with_limits)
    reloader = ApiKeyReloader(settings.keys, clock=settings.clock)
    app.state.reload_api_keys = reloader.reload
    app.add_middleware(
        ApiKeyMiddleware,
        reloader=reloader,
        limiter=limiter,
        isolated=settings.isolates_keys,
        store=store,
        namespace_secret=settings.namespace_secret,
        public_routes=PUBLIC_ROUTES.union(FILES if settings.page else ()),
    )
    if not len(settings.keys):
        hosts = tuple(map(normalize_allowed_host, settings.allowed_hosts))
        app.add_middleware(
            CrossOriginMiddleware,
            routes=app.routes,
            allowed_hosts=hosts,
            allowed_origins=settings.allowed_origins,
        )
    if settings.allowed_origins:  # outside of the other checks, so that an allowed page can read their errors
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["DELETE", "GET", "POST"],
            allow_headers=["Authorization", "Content-Type", HEADER],
            expose_headers=[HEADER, "Retry-After", *RATE_LIMIT_HEADERS],
        )
    budget = BodyMemoryBudget(settings.max_buffered_bytes or BUFFERED_BODIES * settings.max_body_bytes)
    app.add_middleware(RequestContextMiddleware, routes=app.routes, metrics=metrics, budget=budget, tracer=tracer)
    return app


class ServedModel(Model):
    """A model in OpenAI's format, with vLLM's fields for LoRA adapters."""

    root: str = Field(description="The model's name, or the folder's name or Hugging Face ID of an adapter.")
    parent: str | None = Field(description="The model that an adapter changes; null for the model itself.")


class ModelList(BaseModel):
    """The served model, and its LoRA adapters."""

    object: str
    data: list[ServedModel]


class Health(BaseModel):
    """The status of the server and its engine."""

    status: str
    model: str
    decoder: str
    decoder_reason: str
    max_model_len: int
    supports_reasoning: bool | None = Field(
        default=None, description="Whether the model can reason before it responds; absent if unknown."
    )
    fatal_error: str | None = Field(default=None, description="Why the engine failed; absent unless it did.")


class Version(BaseModel):
    """The version of this package."""

    version: str


@dataclass(frozen=True, kw_only=True)
class _Routes:
    engine: ChatEngine
    settings: Settings
    drain_state: DrainState
    metrics: Metrics
    started: int = field(default_factory=lambda: int(time.time()))
    parse_slot: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, 1))

    def add_to(self, app: FastAPI) -> None:
        """Add all routes, with their OpenAPI descriptions."""

        def add(path: str, endpoint: Callable[..., Any], model: Any, statuses: tuple[int, ...], **options: Any) -> None:
            responses = {200: {"model": model}, **openapi.error_responses(statuses)}
            app.add_api_route(path, endpoint, response_model=None, responses=responses, **options)

        chat, tokens, plain = openapi.CHAT_STATUSES, openapi.TOKEN_STATUSES, openapi.PLAIN_STATUSES
        post: dict[str, Any] = {"methods": ["POST"]}
        body = openapi.request_body
        add(
            "/v1/chat/completions", self.chat_completions, ChatCompletion, chat, openapi_extra=body(ChatRequest), **post
        )
        add("/v1/models", self.models, ModelList, plain)
        add("/v1/models/{name:path}", self.model, ServedModel, plain)
        add(
            "/tokenize",
            self.tokenize,
            TokenizeResponse,
            tokens,
            openapi_extra=body(TokenizePrompt, TokenizeChat),
            **post,
        )
        add("/detokenize", self.detokenize, DetokenizeResponse, tokens, openapi_extra=body(DetokenizeRequest), **post)
        add("/health", self.health, Health, ())
        ready: dict[int | str, dict[str, Any]] = {
            200: {"model": Health},
            503: {"model": Health, "description": "Requests cannot be served now"},
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
            chunks = stream_with_timeout(self.stream_chat(chat), seconds=seconds, first=None)
            return EventStream(chunks, encode=chat_event, encode_error=chat_error_event)
        completion = await self.run_with_limits(request, self.engine.achat(chat))
        if not isinstance(self.engine, ObservableEngine):
            charge(completion.usage)
        return _json(completion)

    def stream_chat(self, chat: ChatRequest) -> AsyncGenerator[ChatCompletionChunk, None]:
        chunks = self.engine.astream(chat)
        return chunks if isinstance(self.engine, ObservableEngine) else count_usage(chunks)

    async def read_chat(self, request: Request) -> ChatRequest:
        return await self.read(request, ChatRequest.parse)

    async def tokenize(self, request: Request) -> Response:
        return _json(
            await self.run_with_limits(request, tokenize(self.engine, await self.read(request, parse_tokenize)))
        )

    async def detokenize(self, request: Request) -> Response:
        tokens = await self.read(request, DetokenizeRequest.parse)
        return _json(await self.run_with_limits(request, detokenize(self.engine, tokens)))

    async def models(self) -> Response:
        return _json(ModelList(object="list", data=self._models()))

    async def model(self, name: str) -> Response:
        models = self._models()
        for model in models:
            if model.id == name:
                return _json(model)
        raise ModelNotFound(f"The model {name!r} is not served here. Use {models[0].id!r}.", param="model")

    async def health(self) -> Response:
        """Report the status. Returns 200 while the process serves, even if its engine failed."""
        return _json(self._health())

    async def ready(self) -> Response:
        """Report whether requests are served: 200 if they are, otherwise 503."""
        health = self._health()
        if health.status == "ready":
            return _json(health)
        return _json(health, status=503, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})

    async def version(self) -> Response:
        return _json(Version(version=__version__))

    async def show_metrics(self, request: Request) -> Response:
        text, content_type = self.metrics.text(request.headers.get("accept", ""))
        return Response(text, media_type=content_type)

    async def read(self, request: Request, parse: Callable[[object], T]) -> T:
        if self.drain_state.draining:
            raise EngineClosed("The server is shutting down. Try again later, or use another server.", code=DRAINING)
        settings = self.settings
        return await read_request(
            request,
            parse,
            max_bytes=settings.max_body_bytes,
            max_pause=settings.max_body_pause,
            memory=get_request_context(request.scope).body_memory,
            parse_slot=self.parse_slot,
        )

    async def run_with_limits(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        return await cancel_on_disconnect(request.receive, with_timeout(work, self.settings.request_timeout))

    def _health(self) -> Health:
        status = self.engine.status()
        health = Health(
            status="draining" if self.drain_state.draining else status.state,
            model=status.model,
            decoder=status.decoder,
            decoder_reason=status.decoder_reason,
            max_model_len=status.max_model_len,
        )
        if status.supports_reasoning is not None:
            health = health.model_copy(update={"supports_reasoning": status.supports_reasoning})
        if not status.fatal_error:
            return health
        return health.model_copy(update={"fatal_error": status.fatal_error})

    def _models(self) -> list[ServedModel]:
        """Return the model, then its LoRA adapters."""
        status = self.engine.status()
        shared: dict[str, Any] = {"object": "model", "created": self.started, "owned_by": "dashinfer-vlm"}
        return [
            ServedModel(id=status.model, root=status.model, parent=None, **shared),
            *(ServedModel(id=lora.name, root=lora.source, parent=status.model, **shared) for lora in status.loras),
        ]


def _json(body: BaseModel, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Serialize as OpenAI does: fields that were set to None are null, fields that were not set are omitted."""
    text = body.model_dump_json(exclude_unset=True)
    return Response(text, status_code=status, headers=headers, media_type="application/json")
