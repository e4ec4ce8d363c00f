"""uvicorn's WebSocket protocol, with limits for slow and malicious clients."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from dashinfer_vlm_core.errors import QueueFull

from .request_context import get_request_context

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
    from websockets.http11 import Request

    from .body_memory import BodyMemory

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Maximum size of a message. A frame that exceeds it is rejected by its header, before its data is received."""

MAX_FRAMES = 8192
"""Maximum number of frames of a message: those of 2 KiB reach its size. Empty ones would never do so."""

UNCOUNTED_BYTES = 64 * 1024
"""How much of a message is received without memory of the server's budget for request bodies."""

MAX_QUEUED = 8
"""Maximum number of messages that wait for an earlier one. More can arrive only in the same read."""


class LimitedWebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's protocol for WebSockets, with timeouts and bounded queues. Text is passed on as bytes.

    After a message, and before the handshake is accepted, nothing is read until the application receives the next
    message: at most one waits. A large message is read when there is memory for what was received of it; if there is
    none, the connection is closed with 1013. uvicorn limits the size of messages, and pings the client.
    """

    message_seconds = 120.0
    """Maximum time to receive a message, from its first byte."""

    write_seconds = 30.0
    """How long a client may stop reading while an event waits to be sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._message_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._reservation: asyncio.Task[None] | None = None
        self._waits_for_memory = False
        self._received = asyncio.Event()

    async def receive(self) -> ASGIReceiveEvent:
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._resume_reading()
        return await self.queue.get()

    async def send(self, message: ASGISendEvent) -> None:
        await self.writable.wait()
        if self.close_sent and message["type"] in {"websocket.send", "websocket.close"}:
            raise ClientDisconnected  # uvicorn would raise RuntimeError: it expects that the application has closed it
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True  # uvicorn would log an error: clients could fill the log

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_message_timer()
        self._stop_write_timer()
        self._stop_reservation()
        super().connection_lost(exc)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.handshake_complete:
            self._pause_reading()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self._reject()
        size = self._partial_size()
        if not size or self.transport.is_closing():
            self._stop_message_timer()
        elif self._message_timer is None:
            self._message_timer = self.loop.call_later(self.message_seconds, self._message_timed_out)
        if size > UNCOUNTED_BYTES and not self.read_paused and not self.transport.is_closing():
            self._wait_for_memory()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_seconds, self.transport.abort)
        self.transport.pause_reading()  # otherwise, the responses to pings would fill the memory

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()
        self._resume_reading()

    def handle_text(self, event: Frame) -> None:
        self.handle_bytes(event)  # uvicorn logs a traceback if it is not UTF-8

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MAX_FRAMES:
            self._fail(CloseCode.MESSAGE_TOO_BIG, f"a message has more than {MAX_FRAMES} frames")
        elif not self.close_sent:
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        if self.queue.qsize() >= MAX_QUEUED:
            self._fail(CloseCode.POLICY_VIOLATION, "too many messages at a time")
        else:
            self._stop_reservation()
            super().send_receive_event_to_app()

    def keepalive_timeout(self) -> None:
        if self.read_paused or self._waits_for_memory:  # the response to the ping was not read
            self.pong_timer = None
            self.schedule_ping()
        else:
            super().keepalive_timeout()

    def _message_timed_out(self) -> None:
        self._message_timer = None
        if self.read_paused:  # the application is busy: the client is not slow
            self._message_timer = self.loop.call_later(self.message_seconds, self._message_timed_out)
        else:
            self._fail(CloseCode.POLICY_VIOLATION, "a message took too long")

    def _reject(self) -> None:
        """Respond to a handshake that cannot be parsed, such as one with too many headers, which uvicorn ignores."""
        if not self.close_sent:
            self.close_sent = True
            self.transport.write(self.conn.reject(400, "The handshake of the WebSocket is not valid.\n").serialize())
            self.transport.close()

    def _fail(self, code: CloseCode, reason: str) -> None:
        if not self.close_sent:
            self.frames = []
            self.conn.fail(code, reason)
            self.handle_parser_exception()

    def _pause_reading(self) -> None:
        self.read_paused = True
        self.transport.pause_reading()

    def _resume_reading(self) -> None:
        is_ready = not self.read_paused and not self._waits_for_memory and self.writable.is_set()
        if is_ready and not self.transport.is_closing():
            self.transport.resume_reading()

    def _partial_size(self) -> int:
        return sum(map(len, self.frames)) + len(self.conn.reader.buffer)

    def _wait_for_memory(self) -> None:
        self._waits_for_memory = True
        self.transport.pause_reading()
        self._received.set()
        if self._reservation is None:
            memory = get_request_context({**self.scope}).body_memory
            self._reservation = self.loop.create_task(self._reserve(memory))

    async def _reserve(self, memory: BodyMemory) -> None:
        """Reserve memory for what is received of a message, until it is complete and this is canceled."""
        try:
            with memory.receiving() as reserve:
                while await self._received.wait():
                    self._received.clear()
                    await reserve(max(0, self._partial_size() - memory.size))
                    self._waits_for_memory = False
                    self._resume_reading()
        except QueueFull as error:
            self._fail(CloseCode.TRY_AGAIN_LATER, error.message)

    def _stop_reservation(self) -> None:
        self._waits_for_memory = False
        if self._reservation is not None:
            self._reservation.cancel()
            self._reservation = None

    def _stop_message_timer(self) -> None:
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
