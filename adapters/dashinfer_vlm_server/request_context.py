"""What the door does with every request: a name, a line in the log, a count, and an answer even to a bug."""

from __future__ import annotations

import contextlib
import logging
import re
import time
import uuid
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from dashinfer_vlm_core.errors import QueueFull

from .errors import CLIENT_GONE, error_response, status_for
from .logs import REQUEST_ID

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .metrics import Metrics
    from .tracing import Tracer

logger: logging.Logger = logging.getLogger(__name__)

HEADER = "X-Request-Id"
QUIET = frozenset({"/health", "/health/ready", "/metrics"})
"""Routes that are asked every few seconds: their lines are for debugging."""

_VISIT = "dashinfer_vlm.visit"
_ACCEPTED = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

OUTCOMES = {
    401: "unauthorized",
    403: "unauthorized",
    408: "timeout",
    429: "rejected",
    CLIENT_GONE: "cancelled",
    503: "unavailable",
    504: "timeout",
}
"""What became of a request, by status; others are `success` (below 400), `invalid` (4xx) and `error` (5xx)."""


class ByteBudget:
    """Memory for the bodies of all requests together: a body is held until its request is over.

    Args:
        limit: in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._left = limit

    def take(self, size: int) -> None:
        """Raises QueueFull if there is not as much left."""
        if size > self._left:
            raise QueueFull("The server holds as many large requests as it can: try again in a moment.")
        self._left -= size

    def give_back(self, size: int) -> None:
        self._left += size


@dataclass(slots=True, kw_only=True, eq=False)
class RequestContext:
    """One request at the door.

    Attributes:
        id: its name, in answers and logs.
        budget: for its body.
        held: bytes of the budget that it has taken.
        status: of the answer; that of a client that left, until there is one.
        route: pattern of its path; `other` for those that nothing answers.
    """

    id: str
    budget: ByteBudget
    held: int = 0
    status: int = CLIENT_GONE
    route: str = "other"
    start: float = field(default_factory=time.monotonic)

    @property
    def outcome(self) -> str:
        other = "success" if self.status < 400 else "invalid" if self.status < 500 else "error"
        return OUTCOMES.get(self.status, other)

    def hold(self, size: int) -> None:
        """So many bytes of its body have come. Raises QueueFull if there is no room for them."""
        self.budget.take(size)
        self.held += size

    def fail(self, error: Exception) -> None:
        """It went wrong after the head of the answer was sent."""
        self.status = CLIENT_GONE if isinstance(error, ClientDisconnect) else status_for(error)


def current_request(scope: Scope) -> RequestContext:
    context: RequestContext = scope[_VISIT]
    return context


class RequestContextMiddleware:
    """ASGI middleware around everything else.

    Args:
        app: what is inside.
        routes: of the application: what is refused on the way to its router is counted under the route that it asked
            for.
        metrics, budget, tracer: of the application.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: Sequence[BaseRoute],
        metrics: Metrics,
        budget: ByteBudget,
        tracer: Tracer | None = None,
    ) -> None:
        self._app = app
        self._routes = routes
        self._budget = budget
        self._metrics = metrics
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = scope[_VISIT] = RequestContext(id=_id(scope), budget=self._budget)
        token = REQUEST_ID.set(context.id)
        try:
            with self._metrics.in_flight.track_inprogress(), self._span(scope, context):
                await self._serve(context, scope, receive, send)
        finally:
            self._budget.give_back(context.held)
            self._leave(context, scope)
            REQUEST_ID.reset(token)

    def _span(self, scope: Scope, context: RequestContext) -> AbstractContextManager[None]:
        return self._tracer.request_span(scope, context) if self._tracer else contextlib.nullcontext()

    async def _serve(self, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def tell(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                context.status = message["status"]
                MutableHeaders(scope=message)[HEADER] = context.id
            await send(message)

        try:
            await self._app(scope, receive, tell)
        except Exception as error:
            context.status = 500
            if begun:
                raise  # which cuts the connection: there is no other way to say that the rest is missing
            logger.exception("a request failed")
            await error_response(error)(scope, receive, tell)
        finally:
            context.route = self._route(scope)

    def _route(self, scope: Scope) -> str:
        route = scope.get("route") or next(
            (route for route in self._routes if route.matches(scope)[0] is not Match.NONE), None
        )
        return getattr(route, "path", "other")

    def _leave(self, context: RequestContext, scope: Scope) -> None:
        self._metrics.request(context.route, context.outcome)
        fields: dict[str, Any] = {
            "method": scope["method"] if scope["method"].isalpha() else "other",
            "route": context.route,
            "status": context.status,
            "outcome": context.outcome,
            "seconds": round(time.monotonic() - context.start, 4),
        }
        level = logging.DEBUG if context.route in QUIET and context.status != 401 else logging.INFO
        logger.log(level, "%s", " ".join(map(str, fields.values())), extra={"fields": fields})


def _id(scope: Scope) -> str:
    """The caller's name for its request, if that is one that can stand in any log; else a new one."""
    given = next((value for name, value in scope["headers"] if name == HEADER.lower().encode()), b"")
    return given.decode() if _ACCEPTED.fullmatch(given) else f"req-{uuid.uuid4().hex}"
