"""Broken or malicious clients on raw sockets: the server responds or disconnects them, and leaks no resources."""

from __future__ import annotations

import contextlib
import json
import socket
import struct

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.protocol.json_limits import MAX_DEPTH, MAX_VALUES
from dashinfer_vlm_core.testing import Script, scripted_registry
from dashinfer_vlm_server.http_protocol import TimeoutH11Protocol, detect_lost_peers
from tests.server.conftest import Scripted, serving
from tests.waiting import HANG, NEVER, until

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
BODY = json.dumps(HELLO).encode()
STREAM = json.dumps(HELLO | {"stream": True}).encode()
PATH = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def request(body, *headers, length=None):
    head = [b"Content-Length: %d" % (len(body) if length is None else length), *headers]
    return PATH + b"\r\n".join([*head, b"", b""]) + body


def chunked(*chunks):
    return PATH + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(chunks)


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


HEAD = BODY_PAUSE = 10 * HANG


class SkippableProtocol(TimeoutH11Protocol):
    """Long timeouts, which tests skip by moving the clock."""

    head_seconds = HEAD
    write_seconds = 10 * HANG


@pytest.fixture(scope="module")
def running(tiny_checkpoint):
    """A server with short responses."""
    script = Script("Fine.")
    config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")
    options = {"max_body_pause": BODY_PAUSE, "max_body_mib": 10}
    with (
        Engine(config, registry=scripted_registry(script)) as engine,
        serving(engine, protocol=SkippableProtocol, **options) as server,
    ):
        yield Scripted(server, engine, script)


@pytest.fixture
def served(running):
    """The server, which must have no open requests at the end."""
    yield running
    assert_healthy(running)


def assert_healthy(served):
    """Assert that the server responds and has no open requests or connections."""
    with served.server.http() as client:
        until(lambda: served.engine.stats().active_requests == 0)
        assert served.script.running == 0
        response = client.post("/v1/chat/completions", json=HELLO)
        assert response.json()["choices"][0]["message"]["content"]
    until(lambda: served.server.connections == 0)


@contextlib.contextmanager
def connected(served):
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=HANG) as connection:
        yield connection


def read_until_closed(connection):
    """Read until the server closes or resets the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            received += chunk
    return received


def status(response):
    return int(response.split(b" ", 2)[1]) if response else None


# Heads

BROKEN_HEADS = {
    "not HTTP": b"hello\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
    "null bytes": b"\x00" * 200 + b"\r\n\r\n",
    "a header without a colon": b"GET / HTTP/1.1\r\nHost\r\n\r\n",
    "a folded line at the start": b"GET / HTTP/1.1\r\n Host: a\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "a request line that is not HTTP": b"GET /health FTP/1.0\r\nHost: a\r\n\r\n",
    "a length that is not a number": PATH + b"Content-Length: many\r\n\r\n",
    "a negative length": PATH + b"Content-Length: -1\r\n\r\n",
    "two lengths": PATH + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "a length of a thousand digits": PATH + b"Content-Length: " + b"9" * 1000 + b"\r\n\r\n",
    "an unknown encoding": PATH + b"Transfer-Encoding: gzip\r\n\r\n",
    "one header of 100 KB": PATH + b"X-Long: " + b"a" * 100_000 + b"\r\n\r\n",
    "ten thousand headers": PATH + b"".join(b"X-%d: 1\r\n" % i for i in range(10_000)) + b"\r\n",
    "a path of 100 KB": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("head", BROKEN_HEADS.values(), ids=BROKEN_HEADS)
def test_malformed_head_is_rejected(served, head):
    with connected(served) as connection:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(head)
        response = read_until_closed(connection)
    if response:  # lost if a reset arrives first, when the head was not read completely
        assert status(response) in {400, 501}
        assert json.loads(response.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_slow_head_times_out(served):
    """Slowloris: each byte alone arrives in time."""
    with connected(served) as connection:
        for byte in PATH[:3]:
            connection.sendall(bytes([byte]))
            served.server.loop.skip(0.4 * HEAD)
        response = read_until_closed(connection)
    assert status(response) == 408
    assert b"request_timeout" in response


def test_idle_connection_is_closed(served):
    with connected(served) as connection:
        until(lambda: served.server.connections == 1)
        served.server.loop.skip(HEAD + 1)
        assert read_until_closed(connection) == b""


def test_slow_second_request_on_a_connection_times_out(served):
    with connected(served) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        first = connection.recv(65536)
        while not first.endswith(b"}"):
            first += connection.recv(65536)
        assert status(first) == 200
        connection.sendall(b"GET /hea")
        served.server.loop.skip(HEAD + 1)
        assert status(read_until_closed(connection)) == 408


def test_slow_connections_do_not_block_other_clients(served):
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
    "a chunk size that is not a number": (chunked(b"zz\r\nhello\r\n"), 400),
    "a chunk longer than its size": (chunked(b"3\r\nhello\r\n"), 400),
    "a chunk without an end": (chunked(b"ffff\r\nhello"), 408),
    "chunks without an end": (chunked(chunk(BODY)), 408),
    "a negative chunk": (chunked(b"-5\r\nhello\r\n"), 400),
    "a huge chunk": (chunked(b"f" * 30 + b"\r\n"), 400),
}


@pytest.mark.parametrize(("sent", "expected"), BROKEN_BODIES.values(), ids=BROKEN_BODIES)
def test_malformed_body_is_rejected(served, sent, expected):
    with connected(served) as connection:
        connection.sendall(sent)
        if expected == 408:
            until(lambda: served.server.tasks)  # its head was read
            served.server.loop.skip(BODY_PAUSE + 1)
        response = connection.recv(65536)
    assert status(response) == expected, response


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


@pytest.mark.slow
@pytest.mark.parametrize("body", BOMBS.values(), ids=BOMBS)
def test_json_bomb_is_rejected(served, body):
    with served.server.http() as client:
        response = client.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"
    assert response.json()["error"]["message"].startswith(("The body has more than", "The body is nested too deeply"))


def test_punctuation_in_text_is_not_counted_as_json_values(served):
    text = 'a, b: [c] {d} "e" \\ ' * (MAX_VALUES // 4)
    with served.server.http() as client:
        response = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}]})
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_json_at_maximum_depth_is_accepted(served):
    body = json.dumps(HELLO | {"metadata": {"note": json.loads("[" * (MAX_DEPTH - 2) + "]" * (MAX_DEPTH - 2))}})
    with served.server.http() as client:
        assert client.post("/v1/chat/completions", content=body).status_code == 200


# Concurrent requests


def test_pipelined_requests_are_served_in_order(served):
    with connected(served) as connection:
        connection.sendall(request(BODY) * 5 + request(BODY, b"Connection: close"))
        assert read_until_closed(connection).count(b"HTTP/1.1 200 OK") == 6


@pytest.mark.slow
def test_response_that_is_not_read_is_aborted(scripted):
    served = scripted("word " * 400, delay=0.005, protocol=SkippableProtocol, max_model_len=2048)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", served.server.port))
        body = HELLO | {"stream": True, "max_tokens": 1900, "n": 8, "logprobs": True, "top_logprobs": 20}
        connection.sendall(request(json.dumps(body).encode()))
        until(lambda: served.script.running == 8)
        until(lambda: served.server.writers_paused)
        served.server.loop.skip(10 * HANG + 1)
        until(lambda: served.server.connections == 0)
        until(lambda: served.script.running == 0)
    served.script.delay = 0
    assert_healthy(served)


# Disconnects

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
def test_disconnect_at_any_stage_frees_the_request(scripted, sent, reset):
    served = scripted("A long answer. " * 50, delay=0.01)
    for _ in range(5):
        with connected(served) as connection:
            served.script.delay = 0.01 if sent == request(STREAM) else NEVER
            connection.sendall(sent)
            if sent == request(STREAM):
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
                served.script.delay = NEVER
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: served.engine.stats().active_requests == 0)
    served.script.delay = 0.0
    assert_healthy(served)


def test_accepted_connections_use_tcp_keepalive():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        detect_lost_peers(listener)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30


def test_half_closed_connection_is_released(served):
    """The server cannot distinguish a half-closed connection from a disconnect, and assumes the latter unless the
    response was faster. In both cases, it must free the request, which `served` checks."""
    with connected(served) as connection:
        connection.sendall(request(BODY, b"Connection: close"))
        connection.shutdown(socket.SHUT_WR)
        assert status(read_until_closed(connection)) in {200, None}
