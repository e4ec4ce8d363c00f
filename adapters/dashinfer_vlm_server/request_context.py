"""The context of every request: its ID, log line, metrics and memory, and a 500 response to unexpected errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect

from dashinfer_vlm_core.concurrency.memory import trim_memory

from .body_memory import BodyMemory, BodyMemoryBudget
from .endpoint import Endpoint, find_endpoint
from .errors import CLIENT_CLOSED_REQUEST, error_response, status_for
from .logs import REQUEST_ID

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .metrics import Metrics

logger: logging.Logger = logging.getLogger(__name__)

HEADER = "X-Request-Id"
ANTHROPIC_HEADER = "Request-Id"
"""Another name of the header in responses, which Anthropic's clients read."""

SLICE_BYTES = 64 * 1024
"""Size of a slice of a response, and of the write buffer from which on asyncio waits for the client."""

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})
"""Methods that are logged by name; a client without a key can send any other text of 64 KiB."""

WEBSOCKET = "WEBSOCKET"
"""The method of handshakes and messages of WebSockets in logs."""

STARTS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
"""The ASGI messages that begin a response. That of an accepted handshake has no status, which is 101."""

TRIM_BODY_BYTES = 8 * 1024 * 1024
"""After a request with a larger body, freed memory is returned to the system."""

_SCOPE_KEY = "dashinfer_vlm.request_context"
_VALID_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

OUTCOMES = {
    401: "unauthorized",
    403: "unauthorized",
    408: "timeout",
    429: "rejected",
    CLIENT_CLOSED_REQUEST: "cancelled",
    503: "unavailable",
    504: "timeout",
}
"""The outcome of a request by status; others are `success` (below 400), `invalid` (4xx) and `error` (5xx)."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestContext:
    """The state of one HTTP request, or of one message of a WebSocket.

    Attributes:
        id: the request ID in responses and logs.
        method: its method; `other` if it is not one of HTTP's.
        body_memory: the memory of its body; of a WebSocket, that of the message that is being received.
        status: the status of the response; 499 (the client disconnected) until there is one.
        endpoint: the endpoint for its path, if there is one.
        client_name: the name of the API key; empty if it has none.
        is_admin: whether the API key may load and unload models.
        admit_message: returns a context in which a message of a WebSocket is served under the limits of its API key.
    """

    id: str
    method: str
    body_memory: BodyMemory
    status: int = CLIENT_CLOSED_REQUEST
    endpoint: Endpoint | None = None
    client_name: str = ""
    is_admin: bool = False
    admit_message: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext
    start: float = field(default_factory=time.monotonic)

    @property
    def route(self) -> str:
        """The pattern of the path; `other` if there is no endpoint."""
        return self.endpoint.path if self.endpoint else "other"

    @property
    def outcome(self) -> str:
        default = "success" if self.status < 400 else "invalid" if self.status < 500 else "error"
        return OUTCOMES.get(self.status, default)

    def begin_message(self) -> RequestContext:
        """Return the context of a received message, if this is that of its WebSocket. It has the memory that was
        reserved so far, and this one gets another."""
        message = replace(self, id=_new_id(), status=101, start=time.monotonic())
        self.body_memory = self.body_memory.for_next_message()
        return message

    def fail(self, error: Exception) -> None:
        """Record an error that occurred after the response headers were sent."""
        self.status = CLIENT_CLOSED_REQUEST if isinstance(error, ClientDisconnect) else status_for(error)


def get_request_context(scope: Scope) -> RequestContext:
    context: RequestContext = scope[_SCOPE_KEY]
    return context


class RequestContextMiddleware:
    """The outermost ASGI middleware: creates the `RequestContext`.

    Args:
        app: the wrapped application.
        routes, metrics, budget: the application's.
        request_span: returns a context for a request; it ends with the response.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Sequence[BaseRoute],
        metrics: Metrics,
        budget: BodyMemoryBudget,
        request_span: Callable[[Scope, RequestContext], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._app = app
        self._routes = routes
        self._budget = budget
        self._metrics = metrics
        self._request_span = request_span

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        context = scope[_SCOPE_KEY] = RequestContext(
            id=_request_id(scope),
            method=_method(scope),
            body_memory=BodyMemory(self._budget),
            endpoint=find_endpoint(self._routes, scope),
        )
        with track_request(context, self._metrics):
            span = self._request_span(scope, context) if self._request_span else contextlib.nullcontext()
            with span:
                await self._serve(context, scope, receive, send)

    async def _serve(self, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] in STARTS:
                started = True
                context.status = message.get("status", 101)
                MutableHeaders(scope=message).update({HEADER: context.id, ANTHROPIC_HEADER: context.id})
            for part in _slices(message):  # the server copies what it cannot send yet
                await send(part)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            context.status = 500
            if started:
                raise  # closes the connection, the only way to signal that the response is incomplete
            logger.exception("Request failed.")
            await error_response(error, context.endpoint)(scope, receive, send_with_id)


@contextlib.contextmanager
def track_request(context: RequestContext, metrics: Metrics) -> Iterator[None]:
    """Count and log a request that the block serves, and release the memory of its body."""
    token = REQUEST_ID.set(context.id)
    try:
        with metrics.in_flight.track_inprogress():
            yield
    finally:
        is_large = context.body_memory.size > TRIM_BODY_BYTES
        context.body_memory.release()
        if is_large:
            asyncio.get_running_loop().run_in_executor(None, trim_memory)
        _record(context, metrics)
        REQUEST_ID.reset(token)


def _record(context: RequestContext, metrics: Metrics) -> None:
    metrics.count_request(context.route, context.outcome)
    fields: dict[str, Any] = {
        "method": context.method,
        "route": context.route,
        "status": context.status,
        "outcome": context.outcome,
        "seconds": round(time.monotonic() - context.start, 4),
    }
    if context.client_name:
        fields["client"] = context.client_name
    is_quiet = context.endpoint is not None and context.endpoint.quiet and context.status != 401
    level = logging.DEBUG if is_quiet else logging.INFO
    logger.log(level, "%s", " ".join(map(str, fields.values())), extra={"fields": fields})


def _slices(message: Message) -> Iterator[Message]:
    body = message.get("body", b"")
    if len(body) <= SLICE_BYTES:
        yield message
        return
    for start in range(0, len(body), SLICE_BYTES):
        end = start + SLICE_BYTES
        yield {**message, "body": body[start:end], "more_body": message.get("more_body", False) or end < len(body)}


def _request_id(scope: Scope) -> str:
    value = next((value for name, value in scope["headers"] if name == HEADER.lower().encode()), b"")
    return value.decode() if _VALID_ID.fullmatch(value) else _new_id()


def _new_id() -> str:
    return f"req-{uuid.uuid4().hex}"


def _method(scope: Scope) -> str:
    if scope["type"] == "websocket":
        return WEBSOCKET
    method: str = scope["method"]
    return method if method in METHODS else "other"
