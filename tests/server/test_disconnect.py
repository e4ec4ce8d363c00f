"""A disconnect frees the resources of a request whose response would never end, and the server continues."""

from __future__ import annotations

import json
import socket

from tests.waiting import HANG, NEVER, until

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
LONG = "A long answer that goes on and on and on. " * 20


def connect(server, body, *, declared=None):
    """Send a request on a raw connection, and return the connection."""
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {declared or len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=HANG)
    connection.sendall(head.encode() + data)
    return connection


def assert_responds(served):
    served.script.delay = 0.0
    with served.server.http() as client:
        assert client.post("/v1/chat/completions", json=HELLO).json()["choices"][0]["message"]["content"] == "Fine."


def test_disconnect_before_a_completion(scripted):
    served = scripted(LONG, "Fine.", delay=NEVER)
    connection = connect(served.server, HELLO)
    until(lambda: served.script.running == 1)
    connection.close()
    until(lambda: served.script.running == 0)
    assert_responds(served)


def test_disconnect_during_a_stream(scripted):
    served = scripted(LONG, "Fine.", delay=0.1)
    connection = connect(served.server, HELLO | {"stream": True})
    assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    served.script.delay = NEVER
    assert served.script.running == 1
    connection.close()
    until(lambda: served.script.running == 0)
    assert_responds(served)


def test_disconnect_before_the_first_chunk(scripted):
    served = scripted(LONG, "Fine.", delay=NEVER)
    connection = connect(served.server, HELLO | {"stream": True})
    until(lambda: served.script.running == 1)
    connection.close()
    until(lambda: served.script.running == 0)
    assert_responds(served)


def test_disconnect_before_the_request_is_complete(scripted):
    served = scripted("Fine.")
    connect(served.server, HELLO, declared=100_000).close()
    assert_responds(served)
    assert len(served.script.requests) == 1
