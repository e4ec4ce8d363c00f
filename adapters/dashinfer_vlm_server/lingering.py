"""Close a connection without losing the response: the lingering close of nginx."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class LingeringTransport(asyncio.Transport):
    """A transport whose `close` only ends the response while the client is still sending.

    Closing a socket that has unread data resets the connection, and the client can lose the response (RFC 9112, section
    9.6). The protocol has to discard what arrives after that, and to call `abort`.

    Args:
        transport: the connection.
        is_receiving: returns whether the client may still be sending.
        on_linger: called when `close` left the connection open.
    """

    def __init__(
        self, transport: asyncio.Transport, *, is_receiving: Callable[[], bool], on_linger: Callable[[], None]
    ) -> None:
        super().__init__()
        self._transport = transport
        self._is_receiving = is_receiving
        self._on_linger = on_linger
        self._lingering = False

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._is_receiving():
            self._transport.close()
            return
        self._lingering = True
        if self._transport.can_write_eof():  # not with TLS
            self._transport.write_eof()
        self._transport.resume_reading()
        self._on_linger()

    def is_closing(self) -> bool:
        return self._lingering or self._transport.is_closing()

    def abort(self) -> None:
        self._transport.abort()

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self._transport.write(data)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
