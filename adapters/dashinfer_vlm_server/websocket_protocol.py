"""uvicorn's WebSocket protocol, with limits for slow and malicious clients."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Maximum size of a message. A frame that exceeds it is rejected by its header, before its data is received."""

MAX_FRAMES = 8192
"""Maximum number of frames of a message: those of 2 KiB reach its size. Empty ones would never do so."""

MAX_QUEUED = 8
"""Maximum number of messages that wait for an earlier one. More can arrive only in the same read."""


class LimitedWebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's protocol for WebSockets, with timeouts and bounded queues. Text is passed on as bytes.

    After a message, nothing is read until the application receives the next one: at most one message waits.
    uvicorn limits the size of messages, and pings the client.
    """

    message_seconds = 120.0
    """Maximum time to receive a message, from its first byte."""

    write_seconds = 30.0
    """How long a client may stop reading while an event waits to be sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._message_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    async def receive(self) -> ASGIReceiveEvent:
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            if self.writable.is_set():  # otherwise, `resume_writing` does it
                self.transport.resume_reading()
        return await self.queue.get()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_message_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self._reject()
        is_partial = bool(self.frames) or len(self.conn.reader.buffer) > 0
        if not is_partial or self.transport.is_closing():
            self._stop_message_timer()
        elif self._message_timer is None:
            self._message_timer = self.loop.call_later(self.message_seconds, self._message_timed_out)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_seconds, self.transport.abort)
        self.transport.pause_reading()  # otherwise, the responses to pings would fill the memory

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()
        if not self.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

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
            super().send_receive_event_to_app()

    def keepalive_timeout(self) -> None:
        if self.read_paused:  # the application is busy: the response to the ping was not read
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

    def _stop_message_timer(self) -> None:
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
