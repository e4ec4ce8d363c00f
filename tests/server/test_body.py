"""The body of a request, before it is known to be one."""

from __future__ import annotations

import json
import re
import socket

import pytest

from dashinfer_vlm_core.errors import InvalidParameter
from dashinfer_vlm_server.request_body import PARSED_INLINE, parse_object
from tests.waiting import HANG, until

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}

NOT_REQUESTS = {
    "nothing": b"",
    "white space": b" \n ",
    "text": b"hello",
    "half an object": b'{"messages": [',
    "two objects": b"{} {}",
    "an array": b"[]",
    "a string": b'"hello"',
    "null": b"null",
    "a number": b"1",
    "NaN": b'{"temperature": NaN}',
    "Infinity": b'{"temperature": -Infinity}',
    "no UTF-8": b'{"model": "\xff\xfe"}',
    "a control character": b'{"model": "a\x00b"}',
    "a comment": b'{"model": "a"} // why',
    "single quotes": b"{'model': 'a'}",
    "a key twice": b'{"model": "a", "model": "b"}',
    "a key twice, deep inside": b'{"messages": [{"role": "user", "role": "system", "content": "a"}]}',
    "arrays without end": b"[" * 200_000,
    "arrays too deep": b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "objects too deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a number of five thousand digits": b'{"seed": ' + b"1" * 5000 + b"}",
    "a form": b"model=tiny&messages=hello",
}


@pytest.mark.parametrize("body", NOT_REQUESTS.values(), ids=NOT_REQUESTS)
def test_what_is_no_json_object_is_refused(body):
    with pytest.raises(InvalidParameter) as caught:
        parse_object(body)
    assert caught.value.code == "invalid_json"
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", 'The body is empty: send a JSON object, such as {"messages": '),
        (b"hello=1", "cannot be read from line 1, column 1 on, 'hello=1'. JSON has double quotes around names"),
        (b"{'a': 1}", "from line 1, column 2 on, \"'a': 1}\". JSON has double quotes around names and texts"),
        (b'{"a": [],}', "from line 1, column 10 on, '}'. JSON has double quotes around names and texts, and commas"),
        (b'{"a": 1', "it ends at line 1, column 8, in the midst of a value. Send the rest of it."),
        (b'{"a": "hel', "it ends within the text that begins at line 1, column 7. Send the rest of it."),
        (b'{"a": "b\nc"}', "write \\n for the line break, or \\u and four digits, at line 1, column 9."),
        (b'{"a": "b\\c"}', "there is a lone backslash at line 1, column 9. Write \\\\ for a backslash."),
        (b"[]", 'The body must be a JSON object, such as {"messages": '),
    ],
)
def test_what_is_wrong_with_json_is_said_in_our_words(body, words):
    with pytest.raises(InvalidParameter) as caught:
        parse_object(body)
    assert words in caught.value.message
    assert not re.search("Expecting|delimiter|Extra data|Illegal", caught.value.message)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_json_may_come_in_any_of_its_encodings(encoding):
    assert parse_object('{"é": "\\ud83d\\ude00"}'.encode(encoding)) == {"é": "😀"}


def test_the_place_of_a_fault_is_named():
    with pytest.raises(InvalidParameter, match="line 2, column 3"):
        parse_object(b'{\n  model: "a"}')


def test_bodies_that_are_no_json_are_answered_as_openai_does_and_the_server_goes_on(scripted):
    with scripted("Fine.").server.http() as client:
        for name, body in NOT_REQUESTS.items():
            reply = client.post("/v1/chat/completions", content=body)
            assert reply.status_code == 400, name
            error = reply.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_json"), name
        assert client.post("/v1/chat/completions", json=HELLO).status_code == 200


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/x-www-form-urlencoded", "x"])
def test_the_content_type_is_not_looked_at(scripted, kind):
    with scripted("Fine.").server.http() as client:
        reply = client.post("/v1/chat/completions", content=json.dumps(HELLO), headers={"Content-Type": kind})
    assert reply.status_code == 200


def test_a_large_request_is_read_as_well(scripted):
    served = scripted("Fine.", max_model_len=2048)
    body = HELLO | {"metadata": {"note": "x" * (PARSED_INLINE + 1)}}
    with served.server.http() as client:
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        reply = client.post("/v1/chat/completions", json=body | {"temperature": 3})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize("chunked", [False, True], ids=["length declared", "chunked"])
def test_a_body_over_the_cap_is_refused(scripted, chunked):
    body = json.dumps(HELLO | {"user": "x" * 3_000_000}).encode()
    with scripted("Fine.", max_body_bytes=100_000).server.http() as client:
        reply = client.post("/v1/chat/completions", content=pieces(body) if chunked else body)
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "request_too_large"
        assert "100000 bytes" in reply.json()["error"]["message"]
        assert client.post("/v1/chat/completions", json=HELLO).status_code == 200


@pytest.mark.parametrize("sent", [b"", b'{"messages": ['], ids=["nothing", "a part"])
def test_a_body_that_stands_still_is_refused(scripted, sent):
    server = scripted("Fine.", settings={"max_body_pause": 10 * HANG}).server
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Length: 1000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG) as connection:
        connection.sendall(head + sent)
        until(lambda: server.tasks)
        server.loop.skip(11 * HANG)
        reply = b"".join(iter(lambda: connection.recv(4096), b""))
    assert reply.startswith(b"HTTP/1.1 408")
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"] == {
        "message": "Nothing of the body came for 1200 seconds: send the request again.",
        "type": "invalid_request_error",
        "param": None,
        "code": "request_timeout",
    }


def test_a_slow_body_is_read_as_long_as_it_moves(scripted):
    """In all it takes longer than it may stand still."""
    body = json.dumps(HELLO).encode()
    server = scripted("Fine.", settings={"max_body_pause": 10 * HANG}).server
    with server.http() as client:
        assert client.post("/v1/chat/completions", content=slowly(server, body)).status_code == 200


def test_bodies_of_all_requests_together_have_a_limit(scripted):
    """Each alone is small enough; what one held is free again when it is over."""
    body = json.dumps(HELLO | {"user": "x" * 6000}).encode()
    served = scripted("A long answer. " * 50, "Fine.", delay=0.2, settings={"max_buffered_bytes": 10_000})
    with served.server.http() as client, client.stream("POST", "/v1/chat/completions", content=stream(body)) as first:
        lines = first.iter_lines()  # which would end with the stream if it were let go
        next(lines)
        with served.server.http() as other:
            reply = other.post("/v1/chat/completions", content=body)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert reply.json()["error"]["code"] == "queue_full"
    served.script.delay = 0.0
    with served.server.http() as client:
        until(lambda: served.script.running == 0)
        for _ in range(5):
            assert client.post("/v1/chat/completions", content=body).status_code == 200


def stream(body):
    return body[:-1] + b', "stream": true}'


def slowly(server, body):
    """Pieces with pauses that are too long together."""
    yield body[:4]
    until(lambda: server.tasks)
    for start in range(4, len(body), 12):
        server.loop.skip(6 * HANG)
        yield body[start : start + 12]


def pieces(body):
    for start in range(0, len(body), 10_000):
        yield body[start : start + 10_000]


def test_a_declared_length_over_the_cap_is_refused_before_the_body_is_sent(scripted):
    server = scripted("Fine.", max_body_bytes=100_000).server
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Length: 999999999999\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")
