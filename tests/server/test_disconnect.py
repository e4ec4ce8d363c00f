"""A client that leaves frees what its request held, long before the answer would have ended; the server goes on.

The answers take minutes; `eventually` waits for seconds.
"""

from __future__ import annotations

import json
import socket

from tests.waiting import HANG, until

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
LONG = "A long answer that goes on and on and on. " * 20


def connect(server, body, *, declared=None):
    """A bare connection over which a request was sent."""
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {declared or len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=HANG)
    connection.sendall(head.encode() + data)
    return connection


def assert_answers(served):
    served.script.delay = 0.0
    with served.server.http() as client:
        assert client.post("/v1/chat/completions", json=HELLO).json()["choices"][0]["message"]["content"] == "Fine."


def test_leaving_before_a_whole_answer(scripted):
    served = scripted(LONG, "Fine.", delay=0.5)
    connection = connect(served.server, HELLO)
    until(lambda: served.script.running == 1)
    connection.close()
    until(lambda: served.script.running == 0)
    assert_answers(served)


def test_leaving_in_the_middle_of_a_stream(scripted):
    served = scripted(LONG, "Fine.", delay=0.5)
    connection = connect(served.server, HELLO | {"stream": True})
    assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    assert served.script.running == 1
    connection.close()
    until(lambda: served.script.running == 0)
    assert_answers(served)


def test_leaving_before_the_first_piece_of_a_stream(scripted):
    served = scripted(LONG, "Fine.", delay=60)
    connection = connect(served.server, HELLO | {"stream": True})
    until(lambda: served.script.running == 1)
    connection.close()
    until(lambda: served.script.running == 0)
    assert_answers(served)


def test_leaving_before_the_request_is_whole(scripted):
    served = scripted("Fine.")
    connect(served.server, HELLO, declared=100_000).close()
    assert_answers(served)
    assert len(served.script.requests) == 1
