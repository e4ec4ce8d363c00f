"""The Responses API over WebSockets: each message of a client creates a response, whose events are sent back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.status import WS_1001_GOING_AWAY
from starlette.websockets import WebSocketDisconnect

from dashinfer_vlm_core.concurrency.deadline import stream_with_timeout
from dashinfer_vlm_core.errors import DashInferVLMError, EngineClosed
from dashinfer_vlm_core.protocol.client import current_client
from dashinfer_vlm_core.protocol.fields import RejectedFields, reject_fields
from dashinfer_vlm_core.protocol.responses import ResponsesRequest
from dashinfer_vlm_core.protocol.validation_errors import invalid, show
from dashinfer_vlm_core.response.response_events import event_to_json

from ...errors import ApiError, error_body, error_response, status_for
from ...request_body import parse_body
from ...request_context import RequestContext, get_request_context, track_request
from .creation import Conversations, Creation

if TYPE_CHECKING:
    from starlette.types import Message
    from starlette.websockets import WebSocket

    from ...server_context import ServerContext

logger: logging.Logger = logging.getLogger(__name__)

CONNECTION_SECONDS = 60 * 60.0
"""How long a connection can be used, as in the Open Responses specification."""

MAX_CONNECTIONS = 64
"""Maximum number of connections: each can hold a message of 16 MiB."""

MAX_CONNECTIONS_PER_CLIENT = 32

RETRY_SECONDS = 5
"""`Retry-After` of a handshake that exceeds these limits."""

MESSAGE_TYPE = "response.create"

_FORM = f'{{"type": "{MESSAGE_TYPE}", "input": "..."}}'

_REJECTED: RejectedFields = {
    "stream": ((True,), "Events are always sent. Remove it."),
    "stream_options": (({},), "It is not used with WebSockets. Remove it."),
    "background": ((False,), "Send a request to create a response in the background."),
    "generate": ((True,), "Nothing is prepared in advance. Send the message when its input is complete."),
    "response": ((), f"It is the Realtime API's. Send the fields of a request next to `type`: {_FORM}"),
    "stream_id": ((), "A connection creates one response after the other. Use several connections."),
}
"""Fields of a message that requests do not have, or whose other values have no meaning in one."""


class ResponseSockets:
    """Serves the connections of all clients.

    Args:
        server: has the engine and the limits.
        conversations: the stored responses.
    """

    def __init__(self, server: ServerContext, conversations: Conversations) -> None:
        self._server = server
        self._conversations = conversations
        self._open: Counter[str] = Counter()

    async def serve(self, websocket: WebSocket) -> None:
        """Serve a connection, or reject its handshake."""
        client = current_client.get().id
        try:
            self._check(client)
        except (HTTPException, EngineClosed) as error:
            await error_response(error)(websocket.scope, websocket.receive, websocket.send)
            return
        self._open[client] += 1
        try:
            await websocket.accept()
            await _Connection(self._server, self._conversations, websocket).serve()
        finally:
            self._open -= Counter([client])

    def _check(self, client: str) -> None:
        self._server.check_accepts_requests()
        if self._open[client] >= MAX_CONNECTIONS_PER_CLIENT or sum(self._open.values()) >= MAX_CONNECTIONS:
            raise HTTPException(
                429,
                f"Too many WebSockets: an API key can have {MAX_CONNECTIONS_PER_CLIENT}, and the server"
                f" {MAX_CONNECTIONS}. Close one, or send requests.",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )


class _Connection:
    """One connection, which creates one response at a time.

    While its next message waits, nothing else is received: that the client has disconnected is noticed only when an
    event cannot be sent. The alternative, to reject clients that send several messages at once, is worse.

    The last response is stored until the next one or the end of the connection, even if its `store` is false, so that
    the next message can continue it. It counts for the limits of stored responses.
    """

    def __init__(self, server: ServerContext, conversations: Conversations, websocket: WebSocket) -> None:
        self._server = server
        self._websocket = websocket
        self._context = get_request_context(websocket.scope)
        self._client = current_client.get().id
        self._context.body_memory.client = self._client
        self._conversations = replace(conversations, connection=uuid.uuid4().hex)
        self._latest = ""  # the id of the last response, if its `store` is false
        self._continued: object = None  # the `previous_response_id` of the present message
        self._drained = asyncio.Event()

    async def serve(self) -> None:
        """Serve messages until the client or the server closes the connection."""
        on_drain = self._server.drain_state.on_drain
        on_drain.add(self._drained.set)
        draining = asyncio.ensure_future(self._drained.wait())
        try:
            await self._run(draining)
        finally:
            on_drain.discard(self._drained.set)
            draining.cancel()
            self._forget()

    async def _run(self, draining: asyncio.Future[Any]) -> None:
        clock = asyncio.get_running_loop().time
        end = clock() + CONNECTION_SECONDS
        receiving = asyncio.ensure_future(self._websocket.receive())
        try:
            while True:
                await asyncio.wait(
                    {receiving, draining}, timeout=max(0.0, end - clock()), return_when=asyncio.FIRST_COMPLETED
                )
                if draining.done() or clock() >= end:
                    await self._close()
                    return
                message = receiving.result()
                if message["type"] == "websocket.disconnect":
                    return
                context = self._context.begin_message()
                receiving = asyncio.ensure_future(self._websocket.receive())
                if not await self._serve_message(message, context, receiving):
                    return
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    async def _close(self) -> None:
        error: Exception = _too_old()
        try:
            self._server.check_accepts_requests()
        except EngineClosed as closed:
            error = closed
        with contextlib.suppress(WebSocketDisconnect):
            await self._send_error(error)
            await self._websocket.close(WS_1001_GOING_AWAY)

    async def _serve_message(
        self, message: Message, context: RequestContext, receiving: asyncio.Future[Message]
    ) -> bool:
        """Serve a message, until the client disconnects; return whether the connection can be used for others."""
        turn = asyncio.create_task(self._turn(message, context))
        try:
            futures: set[asyncio.Future[Any]] = {turn, receiving}
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not turn.done() and receiving.result()["type"] == "websocket.disconnect":
                return False
            return await turn
        except WebSocketDisconnect:
            return False
        finally:
            turn.cancel()
            await asyncio.gather(turn, return_exceptions=True)
            context.body_memory.release()

    async def _turn(self, message: Message, context: RequestContext) -> bool:
        creation: Creation | None = None
        with track_request(context, self._server.metrics):
            try:
                async with context.admit_message():
                    creation = Creation(self._conversations, await self._read(message, context))
                    await self._send_events(creation)
            except (asyncio.CancelledError, WebSocketDisconnect):
                context.fail(ClientDisconnect())
                raise
            except Exception as error:
                if not isinstance(error, (DashInferVLMError, HTTPException)):
                    logger.exception("A response over a WebSocket failed.")
                context.fail(error)
                await self._fail(error, creation)
                return status_for(error) != 401
            return True

    async def _read(self, message: Message, context: RequestContext) -> ResponsesRequest:
        self._server.check_accepts_requests()
        # The message is kept until the end of the turn: its data must not be.
        content = message.pop("bytes", None) or (message.pop("text", None) or "").encode("utf-8", "surrogatepass")
        data = bytearray(content)
        del content
        limit = self._server.settings.max_body_bytes
        if len(data) > limit:
            raise HTTPException(413, f"The message exceeds {limit} bytes. Send smaller images, or https URLs.")
        if (missing := len(data) - context.body_memory.size) > 0:
            with context.body_memory.receiving() as reserve:
                await reserve(missing)
        return await parse_body(data, self._parse, self._server.parse_slot)

    def _parse(self, data: object) -> ResponsesRequest:
        fields: dict[str, Any] = dict(data) if isinstance(data, Mapping) else {}
        self._continued = fields.get("previous_response_id")
        if (given := fields.pop("type", None)) != MESSAGE_TYPE:
            raise invalid(
                "type",
                f'must be "{MESSAGE_TYPE}", got {show(given)}. Unlike the Realtime API, this one has the fields of a'
                f" request in the same object: {_FORM}",
            )
        reject_fields(fields, _REJECTED)
        request = {name: value for name, value in fields.items() if name not in _REJECTED}
        return ResponsesRequest.parse({**request, "stream": True})

    async def _send_events(self, creation: Creation) -> None:
        timed = stream_with_timeout(creation.events(), seconds=self._server.settings.request_timeout, first=None)
        try:
            async with contextlib.aclosing(timed) as events:
                async for event in events:
                    await self._websocket.send_text(event_to_json(event))
        except BaseException:
            if not creation.stored:
                creation.discard()
            raise
        self._forget()
        self._latest = "" if creation.stored else creation.id

    async def _fail(self, error: Exception, creation: Creation | None) -> None:
        """Report an error; the response that the message continued cannot be continued anymore."""
        if self._latest and self._continued == self._latest:
            self._forget()
        event = creation.failed_event(error) if creation else None
        if event is None:
            await self._send_error(error)
        else:
            await self._websocket.send_text(event_to_json(event))

    async def _send_error(self, error: Exception) -> None:
        fields = {"type": "error", "status": status_for(error), **error_body(error)}
        await self._websocket.send_text(json.dumps(fields))

    def _forget(self) -> None:
        if self._latest:
            self._conversations.store.delete(self._client, self._latest)
            self._latest = ""


def _too_old() -> ApiError:
    return ApiError(
        400,
        f"A connection can be used for {CONNECTION_SECONDS / 60:g} minutes. Open another one.",
        code="websocket_connection_limit_reached",
    )
