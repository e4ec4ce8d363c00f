"""Clients that are broken or mean, over bare sockets: the server answers or cuts them, and afterwards holds nothing."""

from __future__ import annotations

import contextlib
import json
import socket
import struct

import pytest

from dashinfer_vlm_server.protocol import Protocol, detect_lost_peers
from dashinfer_vlm_server.request_body import MAX_DEPTH, MAX_VALUES
from tests.waiting import HANG, until

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
BODY = json.dumps(HELLO).encode()
STREAM = json.dumps(HELLO | {"stream": True}).encode()
PATH = b"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\n"


def request(body, *headers, length=None):
    head = [b"Content-Length: %d" % (len(body) if length is None else length), *headers]
    return PATH + b"\r\n".join([*head, b"", b""]) + body


def chunked(*pieces):
    return PATH + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(pieces)


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


HEAD = BODY_PAUSE = 10 * HANG


class Patient(Protocol):
    """Timeouts that no machine is too slow for; tests skip them."""

    head_seconds = HEAD
    write_seconds = 10 * HANG


@pytest.fixture
def served(scripted):
    """A server whose answers are short, and that holds nothing in the end."""
    served = scripted("Fine.", settings={"max_body_pause": BODY_PAUSE}, protocol=Patient)
    yield served
    assert_well(served)


def assert_well(served):
    """It answers, no request is left, and no connection but those of tests that keep theirs."""
    with served.server.http() as client:
        until(lambda: served.engine.stats().active_requests == 0)
        assert served.script.running == 0
        answer = client.post("/v1/chat/completions", json=HELLO)
        assert answer.json()["choices"][0]["message"]["content"]
    until(lambda: served.server.connections == 0)


@contextlib.contextmanager
def connected(served):
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=HANG) as connection:
        yield connection


def rest(connection):
    """What comes until the server closes; a reset is an end too."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            received += piece
    return received


def status(reply):
    return int(reply.split(b" ", 2)[1]) if reply else None


# Heads

BROKEN_HEADS = {
    "no HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
    "null bytes": b"\x00" * 200 + b"\r\n\r\n",
    "a header without a colon": b"GET / HTTP/1.1\r\nHost\r\n\r\n",
    "a folded line at the start": b"GET / HTTP/1.1\r\n Host: a\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "a line that is no HTTP": b"GET /health FTP/1.0\r\nHost: a\r\n\r\n",
    "a length that is none": PATH + b"Content-Length: many\r\n\r\n",
    "a negative length": PATH + b"Content-Length: -1\r\n\r\n",
    "two lengths": PATH + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "a length of a thousand digits": PATH + b"Content-Length: " + b"9" * 1000 + b"\r\n\r\n",
    "an encoding that is not known": PATH + b"Transfer-Encoding: gzip\r\n\r\n",
    "one header of 100 KB": PATH + b"X-Long: " + b"a" * 100_000 + b"\r\n\r\n",
    "ten thousand headers": PATH + b"".join(b"X-%d: 1\r\n" % i for i in range(10_000)) + b"\r\n",
    "a path of 100 KB": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("head", BROKEN_HEADS.values(), ids=BROKEN_HEADS)
def test_a_broken_head_is_refused(served, head):
    with connected(served) as connection:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(head)
        reply = rest(connection)
    if reply:  # a reset may overtake it, if not all of the head was read
        assert status(reply) in {400, 501}
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_a_head_that_comes_drop_by_drop_is_cut(served):
    """A slow loris: each byte alone is well in time."""
    with connected(served) as connection:
        for byte in PATH[:3]:
            connection.sendall(bytes([byte]))
            served.server.loop.skip(0.4 * HEAD)
        reply = rest(connection)
    assert status(reply) == 408
    assert b"request_timeout" in reply


def test_a_connection_on_which_nothing_is_asked_is_closed(served):
    with connected(served) as connection:
        until(lambda: served.server.connections == 1)
        served.server.loop.skip(HEAD + 1)
        assert rest(connection) == b""


def test_the_second_request_of_a_connection_may_not_drip_either(served):
    with connected(served) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        first = connection.recv(65536)
        while not first.endswith(b"}"):
            first += connection.recv(65536)
        assert status(first) == 200
        connection.sendall(b"GET /hea")
        served.server.loop.skip(HEAD + 1)
        assert status(rest(connection)) == 408


def test_a_hundred_slow_connections_shut_nobody_out(served):
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connected(served)).sendall(PATH)
        with served.server.http() as client:
            assert client.post("/v1/chat/completions", json=HELLO).status_code == 200
        until(lambda: served.server.connections == 100)
        served.server.loop.skip(HEAD + 1)
        until(lambda: served.server.connections == 0)


# Bodies

BROKEN_BODIES = {
    "shorter than declared": (request(BODY, length=len(BODY) + 10), 408),
    "longer than declared": (request(BODY, length=len(BODY) - 10), 400),
    "no length at all": (PATH + b"\r\n" + BODY, 400),
    "a chunk whose size is none": (chunked(b"zz\r\nhello\r\n"), 400),
    "a chunk longer than it says": (chunked(b"3\r\nhello\r\n"), 400),
    "a chunk without an end": (chunked(b"ffff\r\nhello"), 408),
    "chunks without an end": (chunked(chunk(BODY)), 408),
    "a negative chunk": (chunked(b"-5\r\nhello\r\n"), 400),
    "a huge chunk": (chunked(b"f" * 30 + b"\r\n"), 400),
    "a length and chunks": (request(chunk(BODY) + b"0\r\n\r\n", b"Transfer-Encoding: chunked"), 200),
}


@pytest.mark.parametrize(("sent", "expected"), BROKEN_BODIES.values(), ids=BROKEN_BODIES)
def test_a_broken_body_is_refused(served, sent, expected):
    with connected(served) as connection:
        connection.sendall(sent)
        if expected == 408:
            until(lambda: served.server.tasks)  # its head was read
            served.server.loop.skip(BODY_PAUSE + 1)
        reply = connection.recv(65536)
    assert status(reply) == expected, reply


def nested(depth):
    return b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"


BOMBS = {
    "tiny arrays": b'{"messages": [' + b"[]," * MAX_VALUES + b"[]]}",
    "tiny objects": b'{"messages": [' + b"{}," * MAX_VALUES + b"{}]}",
    "numbers": b'{"messages": [' + b"0," * MAX_VALUES + b"0]}",
    "strings": b'{"messages": [' + b'"",' * MAX_VALUES + b'""]}',
    "keys": b"{" + b",".join(b'"%d":0' % i for i in range(MAX_VALUES)) + b"}",
    "escaped quotes around commas": b'{"messages": ["\\\\",' + b'"\\"",' * MAX_VALUES + b"0]}",
    "depth": nested(MAX_DEPTH),
    "great depth": nested(100_000),
}


@pytest.mark.parametrize("body", BOMBS.values(), ids=BOMBS)
def test_json_that_would_become_much_more_is_refused(served, body):
    with served.server.http() as client:
        reply = client.post("/v1/chat/completions", content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "invalid_json"
    assert reply.json()["error"]["message"].startswith(("The body has more than", "The body is nested too deep"))


def test_long_text_full_of_punctuation_is_no_bomb(served):
    text = 'a, b: [c] {d} "e" \\ ' * (MAX_VALUES // 4)
    with served.server.http() as client:
        reply = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}]})
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_as_deep_as_is_read(served):
    body = json.dumps(HELLO | {"metadata": {"note": json.loads("[" * (MAX_DEPTH - 2) + "]" * (MAX_DEPTH - 2))}})
    with served.server.http() as client:
        assert client.post("/v1/chat/completions", content=body).status_code == 200


# Many at once


def test_requests_in_one_go_are_answered_one_after_the_other(served):
    with connected(served) as connection:
        connection.sendall(request(BODY) * 5 + request(BODY, b"Connection: close"))
        assert rest(connection).count(b"HTTP/1.1 200 OK") == 6


@pytest.mark.slow
def test_an_answer_that_nobody_reads_is_cut_and_its_request_is_freed(scripted):
    served = scripted("word " * 400, delay=0.005, protocol=Patient, max_model_len=2048)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", served.server.port))
        wanted = HELLO | {"stream": True, "max_tokens": 1900, "n": 8, "logprobs": True, "top_logprobs": 20}
        connection.sendall(request(json.dumps(wanted).encode()))
        until(lambda: served.script.running == 8)
        until(lambda: served.server.writers_paused)
        served.server.loop.skip(10 * HANG + 1)
        until(lambda: served.server.connections == 0)
        until(lambda: served.script.running == 0)
    served.script.delay = 0
    assert_well(served)


# Leaving

STAGES = {
    "at once": b"",
    "in the head": PATH,
    "before the body": request(b"", length=100),
    "in the body": request(BODY[:10], length=len(BODY)),
    "after the request": request(BODY),
    "in a stream": request(STREAM),
}


@pytest.mark.slow
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("sent", STAGES.values(), ids=STAGES)
def test_who_leaves_at_any_stage_leaves_nothing_behind(scripted, sent, reset):
    served = scripted("A long answer. " * 50, delay=0.2)
    for _ in range(5):
        with connected(served) as connection:
            connection.sendall(sent)
            if sent == request(STREAM):
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: served.engine.stats().active_requests == 0)
    served.script.delay = 0.0
    assert_well(served)


def test_connections_of_a_listener_are_probed_by_the_system():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        detect_lost_peers(listener)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30


def test_half_closed_is_not_left(served):
    """TCP does not tell who will send no more from who has left: the latter is assumed unless the answer was faster.
    What counts is that nothing is held for it, which `served` checks."""
    with connected(served) as connection:
        connection.sendall(request(BODY, b"Connection: close"))
        connection.shutdown(socket.SHUT_WR)
        assert status(rest(connection)) in {200, None}
