"""Rule 40: the rest of a body that nobody reads is discarded within limits, and the client can read the response."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest

from dashinfer_vlm_core.config import MIB
from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_server.api_keys import ApiKeys
from dashinfer_vlm_server.http_protocol import TimeoutH11Protocol
from dashinfer_vlm_server.serving import KEEP_ALIVE_SECONDS
from tests.server.conftest import serving
from tests.waiting import HANG, until

KEY = b"Authorization: Bearer right"
CHAT = b"POST /v1/chat/completions"
LIMIT = 8_000_000
CLOSE = b"Connection: close"


class SkippableProtocol(TimeoutH11Protocol):
    """A long timeout, which tests skip by moving the clock."""

    discard_seconds = 10 * HANG
    discard_bytes = 4 * LIMIT


@pytest.fixture(scope="module")
def server():
    options = {"keys": ApiKeys(["right"]), "max_body_mib": LIMIT / MIB}
    with scripted_engine("Fine.") as engine, serving(engine, protocol=SkippableProtocol, **options) as server:
        yield server


@contextlib.contextmanager
def connected(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG) as connection:
        yield connection
    until(lambda: server.connections == 0)


def head(request, *headers, length=2 * LIMIT):
    lines = [request + b" HTTP/1.1", b"Host: localhost", b"Content-Length: %d" % length, *headers, b"", b""]
    return b"\r\n".join(lines)


def read_response(connection):
    """Read a response; return its status."""
    received = b""
    while not received.endswith(b"}"):
        chunk = connection.recv(65536)
        assert chunk, received
        received += chunk
    return int(received.split(b" ", 2)[1])


UNREAD = {
    "no key": (head(CHAT), 401),
    "no key, not kept alive": (head(CHAT, CLOSE), 401),
    "unknown path": (head(b"POST /unknown", KEY), 404),
    "too large": (head(CHAT, KEY), 413),
    "too large, not kept alive": (head(CHAT, KEY, CLOSE), 413),
    "a body of a GET": (head(b"GET /health"), 200),
}


@pytest.mark.parametrize(("request_head", "status"), UNREAD.values(), ids=UNREAD)
def test_security_40_stalled_body_ends_after_the_response(server, request_head, status):
    with connected(server) as connection:
        connection.sendall(request_head + b"a")
        assert read_response(connection) == status
        connection.sendall(b"a")  # ends uvicorn's timeout
        server.loop.skip(SkippableProtocol.discard_seconds + 1)
        until(lambda: server.connections == 0)


@pytest.mark.parametrize(("request_head", "status"), UNREAD.values(), ids=UNREAD)
def test_security_40_response_is_readable_after_the_body(server, request_head, status):
    with connected(server) as connection:
        connection.sendall(request_head + b"a" * 2 * LIMIT)
        assert read_response(connection) == status


def test_security_40_invalid_chunk_does_not_reset_the_connection(server):
    with connected(server) as connection:
        lines = [CHAT + b" HTTP/1.1", b"Host: localhost", KEY, b"Transfer-Encoding: chunked", b"", b"zz\r\n"]
        connection.sendall(b"\r\n".join(lines) + b"a" * 2 * LIMIT)
        assert read_response(connection) == 400


def test_security_40_endless_body_is_aborted(server):
    with connected(server) as connection:
        connection.sendall(head(CHAT, length=10**12))
        with pytest.raises(ConnectionError):
            connection.sendall(bytes(50 * LIMIT))


def test_security_40_connection_is_usable_after_a_discarded_body(server):
    with connected(server) as connection:
        connection.sendall(head(CHAT) + b"a" * LIMIT)
        assert read_response(connection) == 401
        connection.sendall(b"a" * LIMIT)
        connection.sendall(head(b"GET /health", length=2) + b"aa")
        assert read_response(connection) == 200


@pytest.mark.parametrize("body", [b"", head(b"GET /health", length=2) + b"aa"], ids=["no body", "next request"])
def test_security_40_connection_ends_if_the_client_may_omit_its_body(server, body):
    with connected(server) as connection:
        connection.sendall(head(CHAT, b"Expect: 100-continue"))
        received = connection.recv(65536)
        connection.sendall(body)
        received += b"".join(iter(lambda: connection.recv(65536), b""))
        assert received.startswith(b"HTTP/1.1 401 ")
        assert b"\r\nconnection: close\r\n" in received.lower()
        assert received.count(b"HTTP/1.1") == 1


def test_security_40_permitted_body_keeps_the_connection(server):
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()
    with connected(server) as connection:
        for _ in range(2):
            headers = (KEY, b"Expect: 100-continue", b"Content-Type: application/json")
            connection.sendall(head(CHAT, *headers, length=len(body)))
            assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")
            connection.sendall(body)
            assert read_response(connection) == 200


def test_security_40_idle_connection_is_closed_after_a_discarded_body(server):
    with connected(server) as connection:
        connection.sendall(head(CHAT, length=10))
        assert read_response(connection) == 401
        connection.sendall(b"a" * 10)
        server.loop.skip(KEEP_ALIVE_SECONDS + 1)
        assert connection.recv(100) == b""
