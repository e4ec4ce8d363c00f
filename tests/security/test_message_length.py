"""Rule 30: a request whose length a proxy may read differently is rejected, and its connection is closed."""

from __future__ import annotations

import json
import socket

import pytest

from dashinfer_vlm_core.testing import scripted_engine
from tests.server.conftest import serving
from tests.waiting import HANG, until

BODY = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = b"Content-Length: %d" % len(BODY)
TRANSFER = b"Transfer-Encoding: chunked"
SECOND = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def server():
    with scripted_engine("Fine.") as engine, serving(engine) as server:
        yield server


def responses(server, *headers, body, version=b"1.1"):
    """Send a request and a second one on the connection. Return the received bytes, until the server closes it."""
    start = b"POST /v1/chat/completions HTTP/" + version
    head = [start, b"Host: localhost", b"Content-Type: application/json", *headers, b"", b""]
    sent = b"\r\n".join(head) + body + SECOND
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG) as connection:
        connection.sendall(sent)
        received = b""
        while data := connection.recv(65536):
            received += data
    return received


AMBIGUOUS = {
    "length and chunks": ((LENGTH, TRANSFER), CHUNKED),
    "chunks and length": ((TRANSFER, LENGTH), CHUNKED),
    "zero length and chunks": ((b"content-length: 0", b"TRANSFER-ENCODING: CHUNKED"), CHUNKED),
    "equal lengths": ((LENGTH, LENGTH), BODY),
    "equal lengths in one line": ((LENGTH + b", %d" % len(BODY),), BODY),
    "different lengths": ((LENGTH, b"Content-Length: 0"), BODY),
    "different lengths in one line": ((LENGTH + b", 0",), BODY),
    "a length that is continued": ((LENGTH + b"\r\n , %d" % len(BODY),), BODY),
    "chunks that are continued": ((TRANSFER + b"\n\t",), CHUNKED),
    "another header that is continued": ((LENGTH, b"X-Name: a\r\n b"), BODY),
    "a chunk that ends with other bytes": ((TRANSFER,), b"%x\r\n%sXX0\r\n\r\n" % (len(BODY), BODY)),
}


@pytest.mark.parametrize(("headers", "body"), AMBIGUOUS.values(), ids=AMBIGUOUS)
@pytest.mark.parametrize("padding", [0, 20_000], ids=["short head", "long head"])
def test_security_30_ambiguous_length_is_rejected_and_closed(server, headers, body, padding):
    received = responses(server, b"X-Padding: " + b"a" * padding, *headers, body=body)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"\r\nconnection: close\r\n" in received
    assert received.count(b"HTTP/1.1 ") == 1  # the rest of the connection is not read as a request
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    until(lambda: server.connections == 0)


def test_security_30_chunks_in_http_1_0_are_rejected(server):
    assert responses(server, TRANSFER, body=CHUNKED, version=b"1.0").startswith(b"HTTP/1.1 400 ")


def test_security_30_ambiguous_second_request_is_rejected(server):
    first = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = b"\r\n".join([b"POST /tokenize HTTP/1.1", b"Host: localhost", LENGTH, TRANSFER, b"", b""])
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG) as connection:
        connection.sendall(first + head + CHUNKED)
        received = b""
        while data := connection.recv(65536):
            received += data
    assert received.count(b"HTTP/1.1 200 ") == received.count(b"HTTP/1.1 400 ") == 1


VALID = {
    "length": ((LENGTH,), BODY),
    "chunks": ((TRANSFER,), CHUNKED),
    "a length in the body": ((LENGTH,), BODY[:-30] + b"\r\nContent-Length: 5".ljust(30)),
}


@pytest.mark.parametrize(("headers", "body"), VALID.values(), ids=VALID)
def test_security_30_unambiguous_length_is_accepted(server, headers, body):
    received = responses(server, *headers, body=body)
    assert received.count(b"HTTP/1.1 ") == 2
    assert b"invalid_http" not in received
