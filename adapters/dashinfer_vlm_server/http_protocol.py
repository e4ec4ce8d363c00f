"""uvicorn's HTTP/1.1 protocol, with timeouts for slow clients and strict message lengths."""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import re
import socket
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEAD_BYTES = 64 * 1024
"""Maximum size of the head of a request, accurate to one slice."""

_SLICE = 8 * 1024
"""Bytes of a head that are passed to h11 at once: it checks the size only while the head is incomplete."""

_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""Socket options of Linux that detect an unreachable peer within a minute."""


_HEAD_END = re.compile(rb"\n\r?\n")
_FOLDED_LINE = re.compile(rb"\n[ \t]")
_LENGTHS = re.compile(rb"(?im)^content-length[ \t]*:(.*)$")


class StrictConnection(h11.Connection):
    """An h11 connection of a server that rejects requests whose length another parser may read differently, and ends
    after a final response to a client that waits for permission to send its body.

    If a proxy in front of the server chooses the other length, the rest of the body becomes a request that the proxy
    did not check (request smuggling).
    """

    def next_event(self) -> h11.Event | type[h11.NEED_DATA | h11.PAUSED]:
        """Return the next event, as h11 does.

        Raises:
            h11.RemoteProtocolError: also for a request with both `Content-Length` and `Transfer-Encoding`, with several
                lengths (h11 accepts equal ones), with chunks in HTTP/1.0, or with a header line that continues the one
                before it, which RFC 9112 deprecates (section 5.2).
        """
        head = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        event = super().next_event()
        if isinstance(event, h11.Request) and _is_ambiguous(event, head):
            raise h11.RemoteProtocolError("ambiguous message length", error_status_hint=400)
        return event

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """Serialize an event, as h11 does, which calls this for each event.

        A client with `Expect: 100-continue` may omit its body after a final response: whether a body or the next
        request follows is unknown (RFC 9110, section 10.1.1), so the connection is closed.
        """
        if isinstance(event, h11.Response) and self.they_are_waiting_for_100_continue:
            headers = [*event.headers.raw_items(), (b"connection", b"close")]
            event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        return super().send_with_data_passthrough(event)


def _is_ambiguous(request: h11.Request, received: bytes) -> bool:
    found = _HEAD_END.search(received)
    end = found.start() if found else len(received)
    if _FOLDED_LINE.search(received, 0, end):
        return True
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" in names:
        return b"content-length" in names or request.http_version < b"1.1"
    if b"content-length" not in names:
        return False
    lengths = _LENGTHS.findall(received, 0, end)
    return len(lengths) > 1 or any(b"," in length for length in lengths)


class LingeringTransport(asyncio.Transport):
    """A transport whose `close` only ends the response while the client is still sending: nginx's lingering close.

    Closing a socket that has unread data resets the connection, and the client can lose the response (RFC 9112, section
    9.6). The protocol has to discard what arrives after that, and to call `abort`.

    Args:
        transport: the connection, which is the attribute `wrapped`.
        is_receiving: returns whether the client may still be sending.
        on_linger: called when `close` left the connection open.
    """

    def __init__(
        self, transport: asyncio.Transport, *, is_receiving: Callable[[], bool], on_linger: Callable[[], None]
    ) -> None:
        super().__init__()
        self.wrapped: asyncio.Transport = transport
        self._is_receiving = is_receiving
        self._on_linger = on_linger
        self._lingering = False

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._is_receiving():
            self.wrapped.close()
            return
        self._lingering = True
        if self.wrapped.can_write_eof():  # not with TLS
            self.wrapped.write_eof()
        self.wrapped.resume_reading()
        self._on_linger()

    def is_closing(self) -> bool:
        return self._lingering or self.wrapped.is_closing()

    def abort(self) -> None:
        self.wrapped.abort()

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.wrapped.write(data)

    def pause_reading(self) -> None:
        self.wrapped.pause_reading()

    def resume_reading(self) -> None:
        self.wrapped.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.wrapped.get_extra_info(name, default)


class TimeoutH11Protocol(H11Protocol):
    """uvicorn's h11 protocol with timeouts. It limits the size of request heads, unlike uvicorn's httptools protocol,
    and rejects requests of ambiguous length.

    A client that sends the head of its request too slowly gets a 408, and its connection is closed. If a client stops
    reading its response, its connection is aborted, which cancels its request like any disconnect. After a response
    to a request whose body was not read, the rest of the body is discarded within limits.
    """

    head_seconds = 20.0
    """Maximum time to receive the head of a request (request line and headers), from the connection or its first
    byte."""

    write_seconds = 30.0
    """How long a client may stop reading while a response waits to be sent."""

    discard_seconds = 30.0
    """How long the rest of a body is received after the response, so that the client can read it (as in nginx)."""

    discard_bytes = 512 * 1024 * 1024
    """How much of it is received: more than the largest body of the default settings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = StrictConnection(h11.SERVER, self.config.h11_max_incomplete_event_size or MAX_HEAD_BYTES)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._discard_timer: asyncio.TimerHandle | None = None
        self._discardable = 0
        self._upgraded = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's signature
        super().connection_made(
            LingeringTransport(transport, is_receiving=self._is_receiving, on_linger=self._start_discarding)
        )
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_discarding()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._upgraded:  # the rest of what was received with a handshake, whose response has to come first
            return
        if self._discard_timer is not None:
            self._discardable -= len(data)
            if self._discardable < 0:
                self.transport.abort()
        while (
            not self._upgraded
            and self.conn.their_state is h11.IDLE
            and len(data) > _SLICE
            and not self.transport.is_closing()
        ):
            super().data_received(data[:_SLICE])
            data = data[_SLICE:]
        if self._upgraded or self.transport.is_closing():
            return
        super().data_received(data)
        if self._discard_timer is not None and not self._is_receiving():
            self._stop_discarding()
            self._wait_for_request()
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()  # the timeout of the body is in `read_request`
        elif self.conn.trailing_data[0]:
            self._wait_for_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:  # part of the next request was received
            self._wait_for_head()
        if self._is_receiving() and not self.transport.is_closing():
            self._start_discarding()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._upgraded = True
        self._stop_waiting()
        if isinstance(self.transport, LingeringTransport):  # the other protocol reads until the end
            self.transport = self.transport.wrapped
        super().handle_websocket_upgrade(event)

    def _should_upgrade_to_ws(self) -> bool:
        return bool(super()._should_upgrade_to_ws() and self.scope["method"] == "GET")

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: the response states it, and uvicorn's message advises to install a library."""

    def send_400_response(self, msg: str) -> None:
        self._reject(400, "The request is not valid HTTP/1.1, or its headers are too large.", "invalid_http")

    def _is_receiving(self) -> bool:
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR) and self.conn.our_state is not h11.ERROR

    def _start_discarding(self) -> None:
        if self._discard_timer is None:
            self._discardable = self.discard_bytes
            self._discard_timer = self.loop.call_later(self.discard_seconds, self.transport.abort)

    def _stop_discarding(self) -> None:
        if self._discard_timer is not None:
            self._discard_timer.cancel()
            self._discard_timer = None

    def _wait_for_request(self) -> None:
        """Set the timeout for the next request after a discarded body, whose data ended uvicorn's."""
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._head_timed_out)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_timed_out(self) -> None:
        self._head_timer = None
        if self.conn.trailing_data[0]:
            self._reject(408, "The headers of the request took too long. Send them again.", "request_timeout")
        self.transport.close()  # without a response if no request was started
        self.loop.call_later(self.head_seconds, self.transport.abort)  # if the client does not read the response

    def _reject(self, status: int, message: str, code: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        with contextlib.suppress(h11.LocalProtocolError):  # a response was started: only closing is left
            for event in (
                h11.Response(status_code=status, headers=headers, reason=http.HTTPStatus(status).phrase),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def detect_lost_peers(listener: socket.socket) -> None:
    """Enable TCP keepalive for the connections of a listening socket, which inherit its options."""
    if listener.family == socket.AF_UNIX:
        return  # the system detects a lost peer at once
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
