"""Tests of parsing large bodies: the same result as for small ones, at every slice, and in another thread."""

from __future__ import annotations

import asyncio
import json
import random
import threading

import pytest
from starlette.requests import Request

from dashinfer_vlm_core.errors import InvalidParameter
from dashinfer_vlm_core.protocol.json_limits import MAX_VALUES
from dashinfer_vlm_server.body_memory import BodyMemory, BodyMemoryBudget
from dashinfer_vlm_server.json_body import parse_object
from dashinfer_vlm_server.large_json import MAX_SKELETON_BYTES, SLICE, parse_large_object
from dashinfer_vlm_server.request_body import EXCLUSIVE_PARSE_BYTES, INLINE_PARSE_BYTES, read_request
from tests.server.test_bad_clients import BOMBS
from tests.server.test_request_body import INVALID_BODIES

SLICES = range(16, 33)

VALUES = [
    {},
    {"a": 1, "b": [1.5, -2, True, None, "x", {"c": [[]]}]},
    {"long": "x" * 1000, "y" * 300: ["z" * 400, ["w" * 256] * 3]},
    {"é": "é中😀" * 50, "中" * 100: 'a\nb\t\\"/\u0001' * 20},
    {"escapes": "\\" * 99, "quotes": '"' * 99, "u": "\\u0041\\\\u0041", "surrogates": "😀" * 40, "\n": "\u0000" * 3},
    {"lone": "\ud83d" * 20 + "\ude00", "reversed": "\ude00\ud83d" * 20},
    {"like a replacement": ["\x000", "\x001", "\n"]},
]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_large_body_is_parsed_as_a_small_one(value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only).replace("\\n", "\\u000A")
    body = text.encode("utf-8", "surrogatepass")
    for size in SLICES:
        assert parse_large_object(bytearray(body), slice_bytes=size) == parse_object(body) == json.loads(text)
    assert parse_large_object(bytearray(body)) == json.loads(text)


ALPHABET = [
    "\\",
    '"',
    "\\u",
    "\\ud83d",
    "\\ude00",
    "d83d",
    "00e9",
    "n",
    "é",
    "😀",
    "\\\\",
    "\n",
    "{",
    "}",
    ",",
    " ",
    "x" * 20,
]


def test_random_strings_are_parsed_as_by_the_small_parser():
    """Valid and invalid strings of escape sequences, cut at every position."""
    source = random.Random(1)
    accepted = 0
    for _ in range(2000):
        text = "".join(source.choices(ALPHABET, k=source.randrange(30)))
        body = f'{{"a": "{text}", "b": ["c"]}}'.encode()
        expected = outcome(parse_object, body)
        accepted += isinstance(expected, dict)
        for size in (16, 17, 23, 64):
            assert (
                outcome(lambda body, size=size: parse_large_object(bytearray(body), slice_bytes=size), body) == expected
            )
    assert 100 < accepted < 1900


def outcome(parse, body):
    try:
        return parse(body)
    except InvalidParameter:
        return "rejected"


@pytest.mark.slow
@pytest.mark.parametrize("body", [*INVALID_BODIES.values(), *BOMBS.values()], ids=[*INVALID_BODIES, *BOMBS])
def test_invalid_large_body_is_rejected_as_a_small_one(body):
    with pytest.raises(InvalidParameter) as small:
        parse_object(body)
    with pytest.raises(InvalidParameter) as large:
        parse_large_object(bytearray(body))
    assert large.value.code == small.value.code
    if "nested too deeply" not in small.value.message and "more than" not in small.value.message:
        assert large.value.message == small.value.message


LONG = "é" * 500


@pytest.mark.parametrize(
    "text",
    [
        f'{{"a": "{LONG}", "b": x}}',
        f'{{"a": "{LONG}",\n "b": "{LONG}", }}',
        f'{{"a": "{LONG}\n"}}',
        f'{{"a": "{LONG}\\x"}}',
        f'{{"a": "{LONG}\\u12"}}',
        f'{{"a": "{LONG}", "b": "{LONG}',
        f'{{"a": "{LONG}" "b"}}',
        f'{{"{LONG}": 1, "{LONG}": 2}}',
        '{"a": "\\n", "\\u0061": 1}',
    ],
)
def test_error_of_a_large_body_has_the_same_location(text):
    with pytest.raises(InvalidParameter) as small:
        parse_object(text.encode())
    for size in SLICES:
        with pytest.raises(InvalidParameter) as large:
            parse_large_object(bytearray(text.encode()), slice_bytes=size)
        assert large.value.message == small.value.message


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "utf-16-be"])
def test_large_json_in_any_unicode_encoding(encoding):
    value = {"é": "😀" * 100}
    body = json.dumps(value, ensure_ascii=False).encode(encoding)
    for size in SLICES:
        assert parse_large_object(bytearray(body), slice_bytes=size) == value


@pytest.mark.slow
def test_skeleton_is_limited():
    with pytest.raises(InvalidParameter, match=f"exceed {MAX_SKELETON_BYTES} bytes"):
        parse_large_object(bytearray(b'{"a": ' + b" " * MAX_SKELETON_BYTES + b"1}"))
    with pytest.raises(InvalidParameter, match=f"more than {MAX_VALUES} values"):
        parse_large_object(bytearray(b'{"a": [' + b'"\\n"' * (MAX_VALUES + 2) + b"]}"))


class RecordingBody(bytearray):
    """A body that records the size of each copied part, and cannot be decoded as a whole."""

    largest = 0

    def __getitem__(self, key):
        part = super().__getitem__(key)
        if isinstance(key, slice):
            self.largest = max(self.largest, len(part))
        return part

    def decode(self, *_args):
        raise AssertionError("the body is decoded by one call")


def test_security_32_large_body_is_parsed_in_slices():
    text = "A" * 5_000_000 + "\\n" * 100_000
    body = RecordingBody(f'{{"a": "{text}"}}'.encode())
    assert parse_large_object(body)["a"] == json.loads(f'"{text}"')
    assert 0 < body.largest <= SLICE


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
            max_bytes=size,
            max_pause=60,
            memory=BodyMemory(BodyMemoryBudget(size)),
            parse_slot=asyncio.Semaphore(1),
        )
        return threading.current_thread(), parsed_in

    loop_thread, (parse_thread, length) = asyncio.run(threads())
    assert (parse_thread is loop_thread) == is_inline
    assert length == size - 9
