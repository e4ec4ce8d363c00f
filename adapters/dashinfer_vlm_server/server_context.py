"""What the endpoints of one application share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dashinfer_vlm_core.concurrency.deadline import stream_with_timeout, with_timeout
from dashinfer_vlm_core.errors import EngineClosed

from .errors import DRAINING, ApiError, error_body
from .progress import follow_progress
from .request_body import cancel_on_disconnect, read_request
from .request_context import get_request_context
from .settings import DrainState, Settings
from .sse import DONE, EventStream, LineStream, format_event

if TYPE_CHECKING:
    from fastapi import Request

    from dashinfer_vlm_core.engine import ChatEngine

    from .metrics import Metrics

T = TypeVar("T")


def _error_event(error: Exception) -> str:
    return format_event(json.dumps(error_body(error)))


@dataclass(frozen=True, kw_only=True, eq=False)
class ServerContext:
    """What the endpoints of one application share.

    Attributes:
        engine: the engine.
        settings: the limits.
        drain_state: whether new requests are rejected.
        metrics: the metrics.
        on_keys_changed: functions that are called with the ids of the valid API keys when a key was added or removed.
        parse_slot: limits how many large bodies are parsed at the same time.
    """

    engine: ChatEngine
    settings: Settings
    drain_state: DrainState
    metrics: Metrics
    on_keys_changed: list[Callable[[Collection[str]], None]] = field(default_factory=list)
    parse_slot: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, 1))

    async def read(self, request: Request, parse: Callable[[object], T]) -> T:
        """Read the body of a request under the limits, and convert the JSON object with `parse`.

        Raises:
            EngineClosed: the server is shutting down.
            HTTPException, QueueFull, RequestError, ClientDisconnect: see `read_request`.
        """
        self.check_accepts_requests()
        return await read_request(
            request,
            parse,
            settings=self.settings,
            memory=get_request_context(request.scope).body_memory,
            parse_slot=self.parse_slot,
        )

    def check_accepts_requests(self) -> None:
        """Raise EngineClosed if the server is shutting down."""
        if self.drain_state.draining:
            raise EngineClosed("The server is shutting down. Try again later, or use another server.", code=DRAINING)

    async def run(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` under the timeout, and cancel it when the client disconnects."""
        return await cancel_on_disconnect(request.receive, with_timeout(work, self.settings.request_timeout))

    def stream(
        self,
        items: AsyncGenerator[T, None],
        *,
        encode: Callable[[T], str],
        encode_error: Callable[[Exception], str] = _error_event,
        model: str,
        done: str = DONE,
    ) -> EventStream[T]:
        """Return a response that streams items of a model as events, under the timeout; errors in OpenAI's form."""
        timed = stream_with_timeout(items, seconds=self.settings.request_timeout, first=None)
        loading = partial(_loading, self.engine.for_model(model)) if self.engine.manages_models else str
        progress = follow_progress()
        return EventStream(
            timed,
            encode=encode,
            encode_error=encode_error,
            done=done,
            comment=lambda: loading() or progress.comment,
        )

    def stream_lines(
        self, items: AsyncGenerator[T, None], *, encode: Callable[[T], str], encode_error: Callable[[Exception], str]
    ) -> LineStream[T]:
        """Return a response that streams items as lines, under the timeout."""
        timed = stream_with_timeout(items, seconds=self.settings.request_timeout, first=None)
        return LineStream(timed, encode=encode, encode_error=encode_error, done="")

    def check_admin(self, request: Request) -> None:
        """Check that a request may load and unload models.

        Raises:
            ApiError: 403, its API key is not an administrator's, or the server without keys does not allow it.
        """
        if len(self.settings.keys):
            allowed = get_request_context(request.scope).is_admin
            step = "Use an API key with `admin=true` in the key file."
        else:
            allowed = self.settings.allow_model_management
            step = "Start the server with API keys, or with --allow-model-management."
        if not allowed:
            raise ApiError(403, f"Models cannot be loaded and unloaded with this request. {step}", code="access_denied")


def _loading(engine: ChatEngine) -> str:
    status = engine.status()
    return "" if status.state in {"ready", "restarting"} else f"loading {status.model}"
