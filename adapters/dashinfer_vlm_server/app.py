"""The ASGI application: endpoints and middleware."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from .authentication import ApiKeyMiddleware, ApiKeyReloader
from .body_memory import BodyMemoryBudget
from .cross_origin import CrossOriginMiddleware
from .endpoints import create_endpoints
from .errors import HANDLERS, send_not_found
from .metrics import Metrics
from .progress import ProgressObserver
from .rate_limits import RATE_LIMIT_HEADERS, KeyLimiter
from .request_context import ANTHROPIC_HEADER, HEADER, RequestContextMiddleware
from .server_context import ServerContext
from .settings import BUFFERED_BODIES, DrainState, Settings
from .sockets import normalize_allowed_host

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from dashinfer_vlm_core.engine import ChatEngine

    from .tracing import Tracer


def create_app(
    engine: ChatEngine,
    settings: Settings | None = None,
    *,
    tracer: Tracer | None = None,
    drain_state: DrainState | None = None,
    replica_metrics: Callable[[], Mapping[str, Iterable[Metric]]] = dict,
) -> FastAPI:
    """Create an ASGI application that serves the protocols of OpenAI, Anthropic, Ollama and Mistral.

    The caller starts and closes the engine. Until it is ready, `/health/ready` and all requests to the model return
    503. Without API keys, requests of web pages of other origins, and with unknown host names, are rejected.

    Args:
        engine: the engine that serves the requests.
        settings: limits, keys, hosts and origins; `Settings()` if None.
        tracer: records traces of requests, in addition to the metrics.
        drain_state: set its `draining` before shutdown to reject new requests.
        replica_metrics: returns the metrics of other processes by name, if the engine consists of several.

    Raises:
        ConfigError: `settings.allowed_hosts` contains something that is not a host name, or `settings.protocols` an
            unknown name.
    """
    server = ServerContext(
        engine=engine,
        settings=settings or Settings(),
        drain_state=drain_state or DrainState(),
        metrics=Metrics(engine, replica_metrics),
    )
    app = FastAPI(
        title="dashinfer-vlm",
        description="OpenAI's, Anthropic's and Ollama's APIs with images and videos.",
        redirect_slashes=False,
        openapi_url=None,
    )
    engine.add_observer(ProgressObserver())
    app.router.routes.extend(create_endpoints(server))
    app.router.default = send_not_found
    for kind, handler in HANDLERS.items():
        app.add_exception_handler(kind, handler)
    _add_middleware(app, server, tracer)
    return app


def _add_middleware(app: FastAPI, server: ServerContext, tracer: Tracer | None) -> None:
    settings = server.settings
    if tracer:
        server.engine.add_observer(tracer)
    if len(settings.keys):
        limiter = KeyLimiter(clock=settings.clock, on_rejection=server.metrics.count_rate_limited)
        server.engine.add_observer(limiter)
        reloader = ApiKeyReloader(settings.keys, clock=settings.clock)
        app.state.reload_api_keys = reloader.reload
        app.add_middleware(
            ApiKeyMiddleware,
            reloader=reloader,
            limiter=limiter,
            settings=settings,
            on_keys_changed=(limiter.discard_except, *server.on_keys_changed),
        )
    else:
        app.add_middleware(
            CrossOriginMiddleware,
            allowed_hosts=tuple(map(normalize_allowed_host, settings.allowed_hosts)),
            allowed_origins=settings.allowed_origins,
        )
    if settings.allowed_origins:  # outside of the other checks, so that an allowed page can read their errors
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["DELETE", "GET", "POST"],
            allow_headers=["*"],  # clients send their own, and no cookie gives a page the rights of its user
            expose_headers=[HEADER, ANTHROPIC_HEADER, "Retry-After", *RATE_LIMIT_HEADERS],
        )
    app.add_middleware(
        RequestContextMiddleware,
        routes=app.routes,
        metrics=server.metrics,
        budget=BodyMemoryBudget(settings.max_buffered_bytes or BUFFERED_BODIES * settings.max_body_bytes),
        request_span=tracer.request_span if tracer else None,
    )
