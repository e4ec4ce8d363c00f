"""Parse large JSON bodies in short steps.

Python's `json` module, like any C function, holds the global interpreter lock until it returns. For a body of 200 MB, a
single call would stop the event loop for 0.2 s or more, although it runs in another thread. Here, a call processes at
most a slice of the body, and other threads can run between two calls.

Long strings, such as data: URLs, are decoded slice by slice, and replaced by short ones. What remains, the skeleton, is
parsed by `json.loads`.
"""

from __future__ import annotations

import bisect
import codecs
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from dashinfer_vlm_core.errors import InvalidParameter
from dashinfer_vlm_core.protocol.json_limits import MAX_CHARACTERS, MAX_DEPTH, MAX_VALUES, TOO_DEEP, TOO_MANY_VALUES

from .json_body import (
    bad_json,
    check_is_object,
    check_unique,
    conversion_error,
    exceeded,
    reject_constant,
    syntax_error,
)

SLICE = 64 * 1024
"""Number of bytes that one call processes in about a millisecond if every second one is a backslash."""

MAX_SKELETON_BYTES = MAX_CHARACTERS
"""Maximum size of the skeleton, which one call parses."""

# Text outside of strings, and strings of up to 255 bytes without escape sequences. Other strings are replaced.
_SKELETON = re.compile(rb'[^"]*(?:"[^"\\]{0,255}"[^"]*)*')

# Text of a string up to its closing quote, or to an escape sequence of which only the backslash is in the slice.
_TEXT = re.compile(rb'[^"\\]*(?:\\[\s\S][^"\\]*)*')

_UNICODE_ESCAPE_BYTES = 6
"""Length of an escape sequence such as \\u00e9. A pair of surrogates is two of them."""

_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")

_BLOCK = 4 * 1024 * 1024
"""Minimum number of characters by which a string is extended."""

_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
_QUOTE = ord('"')


def parse_large_object(body: bytearray, *, slice_bytes: int = SLICE) -> dict[str, Any]:
    """Parse a JSON object as `parse_object` does, which accepts the same bodies except for the limit of the skeleton.

    Args:
        body: JSON in any of its encodings.
        slice_bytes: maximum number of bytes that one call processes, except for the skeleton; at least 16.

    Raises:
        InvalidParameter: as `parse_object`; or numbers, short strings and white space exceed `MAX_SKELETON_BYTES`.
    """
    try:
        encoding = json.detect_encoding(bytes(body[:8]))
        text = body if encoding == "utf-8" else _transcode(body, encoding, slice_bytes)
        return check_is_object(_Parser(text, slice_bytes).parse())
    except (ValueError, RecursionError) as error:
        raise conversion_error(error) from None


class _Parser:
    """Parses one body.

    Args:
        body: JSON in UTF-8.
        slice_bytes: maximum number of bytes that one call processes.
    """

    def __init__(self, body: bytearray, slice_bytes: int) -> None:
        self._body = body
        self._slice_bytes = slice_bytes
        self._position = 0
        self._skeleton = bytearray()
        # Replaced strings by their replacements. These start with a NUL character, which other strings in the skeleton
        # cannot contain: JSON does not allow it without an escape sequence.
        self._strings: dict[str, str] = {}
        # Positions after replaced strings, in the skeleton and in the body.
        self._skeleton_positions = [0]
        self._body_positions = [0]
        self._values = self._depth = 0

    def parse(self) -> object:
        """Return the value. Raises InvalidParameter, ValueError and RecursionError as in `parse_object`."""
        while (start := self._position) < len(self._body):
            self._position = self._match(_SKELETON, start)
            self._append(bytes(self._body[start : self._position]))
            if self._position < len(self._body) and self._body[self._position] == _QUOTE:
                self._replace_string()
        try:
            return json.loads(
                self._skeleton.decode("utf-8", "surrogatepass"),
                parse_constant=reject_constant,
                object_pairs_hook=self._object,
                parse_int=_parse_int,
                parse_float=_parse_float,
            )
        except json.JSONDecodeError as error:
            skeleton_bytes = len(error.doc[: error.pos].encode("utf-8", "surrogatepass"))
            index = bisect.bisect_right(self._skeleton_positions, skeleton_bytes) - 1
            offset = self._body_positions[index] - self._skeleton_positions[index]
            is_empty = not self._skeleton.strip()
            raise self._syntax_error(error.msg, skeleton_bytes + offset, is_empty=is_empty) from None

    def _match(self, pattern: re.Pattern[bytes], start: int) -> int:
        """Return where a match at `start` ends, within one slice. The pattern matches the empty string."""
        match = pattern.match(self._body, start, start + self._slice_bytes)
        return match.end() if match else start

    def _append(self, piece: bytes) -> None:
        """Append text outside of strings, and complete strings, to the skeleton. Check the limits on its shape."""
        self._skeleton += piece
        if len(self._skeleton) > MAX_SKELETON_BYTES:
            raise bad_json(
                f"Numbers, short strings and spaces of the body exceed {MAX_SKELETON_BYTES} bytes. Send fewer."
            )
        outside = b"".join(piece.split(b'"')[::2])
        self._values += sum(map(outside.count, (b",", b":", b"[", b"{")))
        if self._values > MAX_VALUES:
            raise exceeded(TOO_MANY_VALUES)
        for bracket in re.findall(rb"[\[\]{}]", outside):
            self._depth += 1 if bracket in b"[{" else -1
            if self._depth > MAX_DEPTH:
                raise exceeded(TOO_DEEP)

    def _replace_string(self) -> None:
        """Decode the string that starts at the position, append its replacement, and advance the position."""
        number = len(self._strings)
        if number > MAX_VALUES:
            raise exceeded(TOO_MANY_VALUES)
        self._strings[f"\0{number}"] = _concatenate(self._pieces())
        self._append(b'"\\u0000%d"' % number)
        self._skeleton_positions.append(len(self._skeleton))
        self._body_positions.append(self._position)

    def _pieces(self) -> Iterator[str]:
        """Yield the pieces of the string that starts at the position, and advance it."""
        quote = self._position
        self._position += 1
        while self._position < len(self._body):
            if self._body[self._position] == _QUOTE:
                self._position += 1
                return
            start, self._position = self._position, self._end_of_piece(self._position)
            yield self._decode(start, self._position)
        raise self._syntax_error("Unterminated string", quote)

    def _end_of_piece(self, start: int) -> int:
        """Return where a piece of a string ends: at the closing quote, or between two characters of a slice."""
        limit = min(start + self._slice_bytes, len(self._body))
        quote = self._body.find(b'"', start, limit)
        end = limit if quote < 0 else quote
        if self._body.find(b"\\", start, end) >= 0:
            end = self._match(_TEXT, start)
            quote = end if self._body[end : end + 1] == b'"' else -1
        if quote >= 0:
            return quote
        if limit == len(self._body):
            return limit
        end = self._before_incomplete_character(start, end)
        for _ in range(3):  # a character has up to four bytes
            if start < end < len(self._body) and self._body[end] in _CONTINUATION_BYTES:
                end -= 1
        return end

    def _before_incomplete_character(self, start: int, end: int) -> int:
        """Return `end`, or the start of the Unicode escape sequence or surrogate pair that is incomplete there."""
        escape = self._last_unicode_escape(start, end)
        if escape > end - _UNICODE_ESCAPE_BYTES:
            end, escape = escape, self._last_unicode_escape(start, escape)
        is_high_surrogate = escape >= 0 and _HIGH_SURROGATE.fullmatch(self._body[escape:end])
        return escape if is_high_surrogate else end

    def _last_unicode_escape(self, start: int, end: int) -> int:
        """Return where the Unicode escape sequence in the last 6 bytes before `end` starts, or -1."""
        backslash = self._body.rfind(b"\\u", max(start, end - _UNICODE_ESCAPE_BYTES), end)
        before = self._body[start : backslash + 1]
        is_escaped = (len(before) - len(before.rstrip(b"\\"))) % 2 == 0
        return -1 if backslash < 0 or is_escaped else backslash

    def _decode(self, start: int, end: int) -> str:
        """Decode a piece of a string, which contains only complete characters and escape sequences."""
        piece = self._body[start:end].decode("utf-8", "surrogatepass")
        try:
            decoded: str = json.loads(f'"{piece}"')
        except json.JSONDecodeError as error:
            before = piece[: max(error.pos - 1, 0)].encode("utf-8", "surrogatepass")
            raise self._syntax_error(error.msg, start + len(before)) from None
        return decoded

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return check_unique(pairs, {self._restore(key): self._restore(value) for key, value in pairs})

    def _restore(self, value: Any) -> Any:
        """Return the replaced string for its replacement, also in nested arrays; objects were restored before."""
        if isinstance(value, str):
            return self._strings.get(value, value)
        if isinstance(value, list):
            return [self._restore(item) for item in value]
        return value

    def _syntax_error(self, message: str, position: int, *, is_empty: bool = False) -> InvalidParameter:
        line, column = 1, 1
        for start in range(0, position, self._slice_bytes):
            before = self._body[start : min(start + self._slice_bytes, position)]
            if newlines := before.count(b"\n"):
                line += newlines
                column = 1
                before = before[before.rindex(b"\n") + 1 :]
            column += len(before.translate(None, _CONTINUATION_BYTES))
        rest = self._body[position : position + self._slice_bytes].decode("utf-8", "replace")
        return syntax_error(message, line, column, rest, is_empty=is_empty)


def _concatenate(pieces: Iterable[str]) -> str:
    """Concatenate the pieces of a string.

    CPython extends a string in place if nothing else refers to it, which only moves its pages. `str.join` would write
    all of it in one call. Blocks limit the cost of interpreters that copy the text each time.
    """
    text = ""
    for block in _blocks(pieces):
        text += block
    return text


def _blocks(pieces: Iterable[str]) -> Iterator[str]:
    block: list[str] = []
    size = 0
    for piece in pieces:
        block.append(piece)
        size += len(piece)
        if size >= _BLOCK:
            yield "".join(block)
            block.clear()
            size = 0
    yield "".join(block)


# Functions in Python, unlike `int` and `float`, allow other threads to run within a long array of numbers.


def _parse_int(digits: str) -> int:
    return int(digits)


def _parse_float(digits: str) -> float:
    return float(digits)


def _transcode(body: bytearray, encoding: str, slice_bytes: int) -> bytearray:
    """Convert text to UTF-8. Raises UnicodeDecodeError if it is not valid in its encoding."""
    decoder = codecs.getincrementaldecoder(encoding)("surrogatepass")
    text = bytearray()
    for start in range(0, len(body), slice_bytes):
        end = start + slice_bytes
        piece = decoder.decode(bytes(body[start:end]), final=end >= len(body))
        text += piece.encode("utf-8", "surrogatepass")
    return text
