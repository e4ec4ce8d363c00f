"""Tests of reading and parsing request bodies."""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
import resource
import socket
import threading
from pathlib import Path

import pytest
from starlette.requests import Request

from dashinfer_vlm_core.errors import InvalidParameter
from dashinfer_vlm_server.api_keys import ApiKeys
from dashinfer_vlm_server.body_memory import BodyMemory, BodyMemoryBudget
from dashinfer_vlm_server.json_body import parse_object
from dashinfer_vlm_server.request_body import (
    EXCLUSIVE_PARSE_BYTES,
    INLINE_PARSE_BYTES,
    MIN_BYTES_PER_SECOND,
    read_request,
)
from dashinfer_vlm_server.request_context import TRIM_BODY_BYTES
from dashinfer_vlm_server.settings import Settings
from tests.cases import cases
from tests.waiting import HANG, until

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}

INVALID_BODIES = {
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


@cases("body", INVALID_BODIES.values())
def test_body_that_is_not_a_json_object_is_rejected(body):
    with pytest.raises(InvalidParameter) as caught:
        parse_object(body)
    assert caught.value.code == "invalid_json"
    assert len(caught.value.message) < 200


@cases(
    ("body", "words"),
    [
        (b"", 'The body is empty. Send a JSON object with the fields of the request, such as {"model": "..."}.'),
        (b"hello=1", "unexpected text at line 1, column 1: 'hello=1'. Use double quotes around names"),
        (b"{'a': 1}", "at line 1, column 2: \"'a': 1}\". Use double quotes around names and strings"),
        (b'{"a": [],}', "at line 1, column 10: '}'. Use double quotes around names and strings, and commas"),
        (b'{"a": 1', "it ends at line 1, column 8 within a value. Send the complete body."),
        (b'{"a": "hel', "the string that starts at line 1, column 7 has no end. Send the complete body."),
        (b'{"a": "b\nc"}', "unescaped control character at line 1, column 9. Write \\n for a line break."),
        (b'{"a": "b\\c"}', "invalid escape at line 1, column 9. Write \\\\ for a backslash."),
        (b"[]", 'The body must be a JSON object with the fields of the request, such as {"model": "..."}.'),
    ],
)
def test_json_error_messages_suggest_a_fix(body, words):
    with pytest.raises(InvalidParameter) as caught:
        parse_object(body)
    assert words in caught.value.message
    assert not re.search("Expecting|delimiter|Extra data|Illegal", caught.value.message)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_json_in_any_unicode_encoding(encoding):
    assert parse_object('{"é": "\\ud83d\\ude00"}'.encode(encoding)) == {"é": "😀"}


def test_json_error_reports_line_and_column():
    with pytest.raises(InvalidParameter, match="line 2, column 3"):
        parse_object(b'{\n  model: "a"}')


def test_invalid_json_returns_openai_error(scripted):
    with scripted("Fine.").server.http() as client:
        for name, body in INVALID_BODIES.items():
            response = client.post("/v1/chat/completions", content=body)
            assert response.status_code == 400, name
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_json"), name
        assert client.post("/v1/chat/completions", json=HELLO).status_code == 200


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/x-www-form-urlencoded", "x"])
def test_content_type_is_ignored_with_keys(scripted, kind):
    settings = {"keys": ApiKeys(["right"])}
    with scripted("Fine.", settings=settings).server.http() as client:
        client.headers["Authorization"] = "Bearer right"
        response = client.post("/v1/chat/completions", content=json.dumps(HELLO), headers={"Content-Type": kind})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("size", "is_inline"),
    [(100, True), (INLINE_PARSE_BYTES, True), (INLINE_PARSE_BYTES + 1, False), (EXCLUSIVE_PARSE_BYTES + 1, False)],
)
def test_security_32_large_body_is_parsed_outside_of_the_event_loop(size, is_inline):
    body = b'{"a": ""}'.replace(b'""', b'"' + b"x" * (size - 9) + b'"')
    assert len(body) == size

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def threads():
        request = Request({"type": "http", "headers": []}, receive)
        parsed_in = await read_request(
            request,
            lambda value: (threading.current_thread(), len(value["a"])),
            settings=Settings(),
            memory=BodyMemory(BodyMemoryBudget(size)),
            parse_slot=asyncio.Semaphore(1),
        )
        return threading.current_thread(), parsed_in

    loop_thread, (parse_thread, length) = asyncio.run(threads())
    assert (parse_thread is loop_thread) == is_inline
    assert length == size - 9


def test_large_body_is_parsed_in_a_thread(scripted):
    served = scripted("Fine.", max_model_len=2048)
    body = HELLO | {"metadata": {"note": "x" * (INLINE_PARSE_BYTES + 1)}}
    with served.server.http() as client:
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        response = client.post("/v1/chat/completions", json=body | {"temperature": 3})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize("chunked", [False, True], ids=["length declared", "chunked"])
def test_body_over_the_limit_is_rejected(scripted, chunked):
    body = json.dumps(HELLO | {"user": "x" * 3_000_000}).encode()
    with scripted("Fine.", max_body_bytes=100_000).server.http() as client:
        response = client.post("/v1/chat/completions", content=chunks(body) if chunked else body)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert "100000 bytes" in response.json()["error"]["message"]
        assert client.post("/v1/chat/completions", json=HELLO).status_code == 200


@pytest.mark.parametrize("sent", [b"", b'{"messages": ['], ids=["nothing", "a part"])
def test_stalled_body_times_out(scripted, sent):
    server = scripted("Fine.", settings={"max_body_pause": 10 * HANG}).server
    head = HEAD + b"Content-Length: 1000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG) as connection:
        connection.sendall(head + sent)
        until(lambda: server.tasks)
        server.loop.skip(11 * HANG)
        response = b"".join(iter(lambda: connection.recv(4096), b""))
    assert response.startswith(b"HTTP/1.1 408")
    assert json.loads(response.partition(b"\r\n\r\n")[2])["error"] == {
        "message": "The body was received too slowly: no data for 1200 seconds, or less than 16384 bytes per second."
        " Send the request again.",
        "type": "invalid_request_error",
        "param": None,
        "code": "request_timeout",
    }


@pytest.mark.parametrize(("rate", "status"), [(1.3, 200), (0.8, 408)], ids=["fast enough", "too slow"])
def test_security_18_body_has_a_minimum_rate(scripted, rate, status):
    """Each pause is allowed; in total, the body takes much longer than the longest allowed pause."""
    pause = 1.5 * HANG
    body = json.dumps(HELLO | {"user": "x" * int(rate * 2 * pause * MIN_BYTES_PER_SECOND)}).encode()
    server = scripted("Fine.", settings={"max_body_pause": pause}).server
    with server.http() as client:
        response = client.post("/v1/chat/completions", content=slowly(server, body, 2.6 * pause))
    assert response.status_code == status


def test_total_size_of_buffered_bodies_is_limited(scripted):
    """Each body alone is small enough; its memory is released when the request ends."""
    body = json.dumps(HELLO | {"user": "x" * 6000}).encode()
    served = scripted("A long answer. " * 50, "Fine.", delay=0.2, settings={"max_buffered_bytes": 10_000})
    with served.server.http() as client, client.stream("POST", "/v1/chat/completions", content=stream(body)) as first:
        lines = first.iter_lines()  # kept, because its garbage collection would close the stream
        next(lines)
        with served.server.http() as other:
            response = other.post("/v1/chat/completions", content=body)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert response.json()["error"]["code"] == "queue_full"
    served.script.delay = 0.0
    with served.server.http() as client:
        until(lambda: served.script.running == 0)
        for _ in range(5):
            assert client.post("/v1/chat/completions", content=body).status_code == 200


def stream(body):
    return body[:-1] + b', "stream": true}'


def slowly(server, body, seconds):
    """Yield a body in five chunks, and move the clock between them."""
    size = len(body) // 5 + 1
    yield body[:size]
    until(lambda: server.tasks)
    for start in range(size, len(body), size):
        server.loop.skip(seconds / 4)
        yield body[start : start + size]


def chunks(body):
    for start in range(0, len(body), 10_000):
        yield body[start : start + 10_000]


def test_content_length_over_the_limit_is_rejected_early(scripted):
    server = scripted("Fine.", max_body_bytes=100_000).server
    head = HEAD + b"Content-Length: 999999999999\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG) as connection:
        connection.sendall(head)
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc only")
def test_freed_memory_returns_to_the_system_after_a_large_body(scripted):
    server = scripted("Hello.", max_body_bytes=2 * TRIM_BODY_BYTES).server
    before = fragmented_heap()
    with server.http() as client:
        response = client.post("/v1/chat/completions", content=b" " * (TRIM_BODY_BYTES + 1))
    assert response.status_code == 400
    until(lambda: resident_bytes() < before - HEAP_BYTES // 2)


HEAP_BYTES = 64 * 1024 * 1024


def fragmented_heap() -> int:
    """Write to blocks on the heap and free them, all but the last, which keeps the heap from shrinking.

    Returns the resident memory afterwards.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    size = 64 * 1024  # less than the size from which blocks are mapped
    blocks = [libc.malloc(size) for _ in range(HEAP_BYTES // size)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    for block in blocks[:-1]:
        libc.free(block)
    return resident_bytes()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
