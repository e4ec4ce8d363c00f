"""A fake HTTP server that can misbehave: raw sockets on loopback, a thread per connection, a function per path."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from dashinfer_vlm_core.media.fetch import direct_transport

CERTIFICATES = ssl.create_default_context()
"""For clients: reading the default certificates takes longer than most requests."""

ResponseWriter = Callable[[socket.socket], None]


def free_port() -> int:
    """Return a port for a program that cannot choose one itself."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class FakeServer:
    """A server of `responses` by path on a port of 127.0.0.1; see `serve`.

    Attributes:
        requests: the head of each received request, as text.
        server_names: the TLS server names requested by clients.
        max_connections: the largest number of simultaneously open connections.
    """

    def __init__(self, responses: dict[str, ResponseWriter], tls: ssl.SSLContext | None = None) -> None:
        self.responses = responses
        self.requests: list[str] = []
        self.server_names: list[str | None] = []
        self.max_connections = self._open = 0
        self._lock = threading.Lock()
        self._tls = tls
        if tls:
            tls.sni_callback = lambda _, name, __: self.server_names.append(name)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]

    def url(self, path: str, host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            self._open += 1
            self.max_connections = max(self.max_connections, self._open)
        with contextlib.suppress(OSError, ssl.SSLError), contextlib.ExitStack() as stack:
            stack.callback(self._disconnected)
            stack.enter_context(connection)
            stream = self._tls.wrap_socket(connection, server_side=True) if self._tls else connection
            stack.enter_context(stream)
            head = _head(stream)
            self.requests.append(head)
            self.responses.get(head.split(" ")[1], NOT_FOUND)(stream)

    def _disconnected(self) -> None:
        with self._lock:
            self._open -= 1


@contextlib.contextmanager
def serve(responses: dict[str, ResponseWriter], tls: ssl.SSLContext | None = None) -> Iterator[FakeServer]:
    web = FakeServer(responses, tls)
    threading.Thread(target=web.accept, daemon=True).start()
    try:
        yield web
    finally:
        web.socket.shutdown(socket.SHUT_RDWR)
        web.socket.close()


def body(data: bytes, *headers: str, status: str = "200 OK") -> ResponseWriter:
    """Return a writer of a well-formed response."""
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(data)}", "Connection: close", *headers]
    return lambda stream: stream.sendall("\r\n".join([*head, "", ""]).encode() + data)


NOT_FOUND = body(b"", status="404 Not Found")


def raw(*pieces: bytes, pause: float = 0.0, then: Callable[[], object] = lambda: None) -> ResponseWriter:
    """Return a writer of exactly these bytes, with a pause in seconds after each piece."""

    def write(stream: socket.socket) -> None:
        for piece in pieces:
            stream.sendall(piece)
            threading.Event().wait(pause)
        then()

    return write


def redirect(location: str) -> ResponseWriter:
    return body(b"", f"Location: {location}", status="302 Found")


class LoopbackTransport(httpx.AsyncBaseTransport):
    """A transport that connects to 127.0.0.1 for every address, so that public addresses can be tested."""

    def __init__(self) -> None:
        self.inner = direct_transport()
        self.addresses: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.addresses.append(request.url.host)
        request.url = request.url.copy_with(host="127.0.0.1")
        return await self.inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self.inner.aclose()


def fake_resolver(table: dict[str, list[Any]]) -> Callable[[str, int], Any]:
    """Return a resolver for `table`: each value is a list of addresses, or one such list per lookup."""

    async def resolve(host: str, port: int) -> list[str]:
        if host not in table:
            raise OSError("no such host")
        addresses = table[host]
        return addresses if isinstance(addresses[0], str) else addresses.pop(0)

    return resolve


def _head(stream: socket.socket) -> str:
    """Return the head of a request and read its body: closing a connection with unread data resets it."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += stream.recv(4096) or b"\r\n\r\n"
    head, _, content = received.partition(b"\r\n\r\n")
    stated = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    missing = int(stated[1]) - len(content) if stated else 0
    while missing > 0 and (more := stream.recv(missing)):
        missing -= len(more)
    return head.decode("latin-1")
