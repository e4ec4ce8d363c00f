"""HTTP on one connection: uvicorn's, with an end to what would last for ever."""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0
"""How long the head of a request may take, from the connection or its first byte on."""

WRITE_SECONDS = 30.0
"""How long a client may not read while an answer waits for it."""

MAX_HEAD_BYTES = 64 * 1024
"""Most bytes of the head of a request, up to a slice."""

_SLICE = 8 * 1024
"""Bytes of a head that are looked at in one go: h11 minds its size only while it is not whole."""

_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 60_000}
"""Socket options of Linux: a peer that is gone without a word is noticed within a minute."""


class Protocol(H11Protocol):
    """Uvicorn's protocol on h11, which unlike its other one bounds the head of a request.

    A client that is slow with the head of its request is told so (408) and cut; one that reads no more of its answer is
    cut, which frees its request as any client's leaving does.
    """

    head_seconds = HEAD_SECONDS
    write_seconds = WRITE_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's signature
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while self.conn.their_state is h11.IDLE and len(data) > _SLICE and not self.transport.is_closing():
            super().data_received(data[:_SLICE])
            data = data[_SLICE:]
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()  # for the head: the rest of the request is waited for where it is read
        elif self.conn.trailing_data[0]:
            self._wait_for_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:  # a part of the next request is there
            self._wait_for_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "The request is not valid HTTP/1.1, or its head is too large.", "invalid_http")

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_seconds, self._give_up)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.conn.trailing_data[0]:
            self._refuse(408, "The head of the request took too long.", "request_timeout")
        self.transport.close()  # nothing was asked, so there is nothing to answer
        self.loop.call_later(self.head_seconds, self.transport.abort)  # should the client not read that either

    def _refuse(self, status: int, message: str, code: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        with contextlib.suppress(h11.LocalProtocolError):  # an answer has begun: to cut it is all that is left
            for event in (
                h11.Response(status_code=status, headers=headers, reason=http.HTTPStatus(status).phrase),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def detect_lost_peers(listener: socket.socket) -> None:
    """Have the system probe the connections of a listening socket, whose options they inherit."""
    if listener.family == socket.AF_UNIX:
        return  # the system knows at once
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
