"""Authentication with API keys: middleware, and the keys that are valid now."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException

from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.protocol.client import Client, current_client

from .api_keys import ApiKey, ApiKeys, file_signature
from .errors import error_response
from .request_context import get_request_context

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .endpoint import Endpoint
    from .rate_limits import KeyLimiter, KeyUsage
    from .settings import Settings

logger: logging.Logger = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""Minimum time between two checks whether the key file has changed."""


class ApiKeyReloader:
    """The present keys of a server: reads their file again when it changes.

    A file that cannot be used is logged once, and the previous keys stay valid.

    Args:
        keys: the keys at the start.
        clock: limits how often the file is checked.

    Attributes:
        keys: the present keys.
    """

    def __init__(self, keys: ApiKeys, *, clock: Callable[[], float]) -> None:
        self.keys = keys
        self._signature = keys.signature
        self._clock = clock
        self._next_check = clock() + CHECK_SECONDS
        self._check: asyncio.Task[None] | None = None
        self._lock = threading.Lock()

    async def refresh(self) -> ApiKeys:
        """Return the present keys, after a check of the file in a thread, at most once in `CHECK_SECONDS`."""
        if self.keys.file is None:
            return self.keys
        if self._check is None or self._check.done():
            if self._clock() < self._next_check:
                return self.keys
            self._next_check = self._clock() + CHECK_SECONDS
            self._check = asyncio.create_task(asyncio.to_thread(self.reload), name="api-keys")
        await asyncio.shield(self._check)  # other requests wait for the same check
        return self.keys

    def reload(self, *, force: bool = False) -> None:
        """Read the file if it has changed, or in any case; safe to call from any thread."""
        if self.keys.file is None:
            return
        with self._lock:
            signature = file_signature(self.keys.file)
            if signature == self._signature and not force:
                return
            self._signature = signature
            if signature:
                self._reread()
            else:  # opening a pipe could block
                logger.error("--api-key-file: it is not a regular file anymore. The previous API keys stay valid.")

    def _reread(self) -> None:
        previous = self.keys
        try:
            keys = previous.reread()
        except ConfigError as error:
            logger.error("%s The previous API keys stay valid.", error.message)  # noqa: TRY400 - for the operator
            return
        self.keys = keys
        self._signature = keys.signature
        added = len(keys.ids - previous.ids)
        removed = len(previous.ids - keys.ids)
        logger.info("The API keys were read again: %d keys, %d added, %d removed.", len(keys), added, removed)


class ApiKeyMiddleware:
    """ASGI middleware that responds with 401 to requests without a valid key, except on public routes, and with 429 to
    requests that exceed the limits of their key.

    It compares the path that the router uses, which headers cannot change. The client of a request is set in
    `current_client`. The handshake of a WebSocket requires a key, and each message is a request under its limits.

    Args:
        app: the wrapped application.
        reloader: the present keys.
        limiter: applies the limits of keys.
        settings: whether and how keys are isolated.
        on_keys_changed: called with the ids of the valid keys when a key was added or removed.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        reloader: ApiKeyReloader,
        limiter: KeyLimiter,
        settings: Settings,
        on_keys_changed: Sequence[Callable[[Collection[str]], None]],
    ) -> None:
        self._app = app
        self._reloader = reloader
        self._limiter = limiter
        self._settings = settings
        self._on_keys_changed = on_keys_changed
        self._keys = reloader.keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        context = get_request_context(scope)
        if context.endpoint and context.endpoint.public:
            await self._app(scope, receive, send)
            return
        context.admit_message = partial(self._admit_message, scope)
        if key := await self._find_key(scope):
            context.client_name = key.name
            context.is_admin = key.admin
            await self._serve(key, scope, receive, send)
        else:
            await error_response(_unauthorized(), context.endpoint)(scope, receive, send)

    async def _find_key(self, scope: Scope) -> ApiKey | None:
        keys = await self._reloader.refresh()
        if keys is not self._keys:
            self._keys = keys
            for notify in self._on_keys_changed:
                notify(keys.ids)
        return _find_key(keys, scope, get_request_context(scope).endpoint)

    @contextlib.asynccontextmanager
    async def _admit_message(self, scope: Scope) -> AsyncIterator[None]:
        """Serve a message of a WebSocket under the limits of its key.

        Raises:
            HTTPException: 401, the key is not valid anymore; 429, it exceeds a limit.
        """
        key = await self._find_key(scope)
        if key is None:
            raise _unauthorized()
        with self._limiter.admit(key, generates=True):
            yield

    async def _serve(self, key: ApiKey, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request of a key under its limits. Only POST requests use the engine, so only they are limited."""
        settings = self._settings
        endpoint = get_request_context(scope).endpoint
        namespace = key.cache_namespace(settings.namespace_secret) if settings.isolates_keys else ""
        client = Client(id=key.id, cache_namespace=namespace, media_workers=key.limits.media_workers)
        token = current_client.set(client)
        try:
            if scope.get("method") != "POST" or (endpoint and not endpoint.limited):
                await self._app(scope, receive, send)
                return
            with self._limiter.admit(key, generates=endpoint is not None and endpoint.generates) as usage:
                await self._app(scope, receive, _with_rate_limit_headers(send, usage) if usage else send)
        except HTTPException as error:  # of `admit`: the application handles those of endpoints
            await error_response(error, endpoint)(scope, receive, send)
        finally:
            current_client.reset(token)


def _unauthorized() -> HTTPException:
    return HTTPException(
        401,  # the message does not reveal whether a key was sent
        "A valid API key is required. Send the header `Authorization: Bearer KEY`.",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _find_key(keys: ApiKeys, scope: Scope, endpoint: Endpoint | None) -> ApiKey | None:
    """Return the valid key of the headers; None if there is no valid key, or more than one."""
    prefixes = {b"authorization": b""}
    if endpoint is None or endpoint.x_api_key:  # also at an unknown URL, which may be Anthropic's
        prefixes[b"x-api-key"] = b"Bearer "
    found = set()
    for header, prefix in prefixes.items():
        values = [value for name, value in scope["headers"] if name == header]
        if len(values) > 1:
            return None
        found |= {key for value in values if (key := keys.find(prefix + value))}
    return found.pop() if len(found) == 1 else None


def _with_rate_limit_headers(send: Send, usage: KeyUsage) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(usage.headers())
        await send(message)

    return send_with_headers
