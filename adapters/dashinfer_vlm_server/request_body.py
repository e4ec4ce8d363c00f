"""Read and parse request bodies under limits, and detect disconnects."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import anyio
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from dashinfer_vlm_core.errors import InvalidParameter

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.types import Receive

T = TypeVar("T")

INLINE_PARSE_BYTES = 256 * 1024
"""Bodies up to this size are parsed on the event loop, in about a millisecond; larger ones in a thread."""

MAX_VALUES = 250_000
"""Maximum number of values and keys in a body: an empty array takes three bytes of text, but 64 bytes of memory."""

EXAMPLE = 'a JSON object, such as {"messages": [{"role": "user", "content": "Hello!"}]}'

MAX_DEPTH = 64
"""Maximum nesting depth of the values in a body."""


async def read_request(
    request: Request, parse: Callable[[object], T], *, max_bytes: int, max_pause: float, reserve: Callable[[int], None]
) -> T:
    """Read the body of a request and parse it.

    The content type is ignored here: `CrossOriginMiddleware` checks it where that is necessary.

    Args:
        request: a request whose body has not been read.
        parse: converts the JSON object; called in a thread if the body is large.
        max_bytes: maximum size of the body.
        max_pause: maximum number of seconds between two chunks of the body.
        reserve: called with the size of each chunk before it is stored; may raise.

    Raises:
        HTTPException: 413, the body exceeds `max_bytes` and the rest was not stored. 408, no data was received for
            `max_pause` seconds.
        RequestError: the body is not a JSON object, or `parse` rejects it.
        ClientDisconnect: the client disconnected before the request was complete.
    """
    body = await _read_body(request, max_bytes, max_pause, reserve)
    if len(body) <= INLINE_PARSE_BYTES:
        return parse(parse_object(body))
    return await asyncio.to_thread(lambda: parse(parse_object(body)))


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object in any of JSON's encodings.

    Raises:
        InvalidParameter: the body is not a JSON object, has a duplicate key or NaN or an infinity, is nested too
            deeply, or has too many values.
    """
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        _check_shape(text)
        value = json.loads(text, parse_constant=_reject_constant, object_pairs_hook=_reject_duplicate_keys)
    except json.JSONDecodeError as error:
        raise _bad_json(_syntax_error(error)) from None
    except UnicodeDecodeError:
        raise _bad_json("The body is not valid JSON: it is not UTF-8 text.") from None
    except ValueError:  # an integer with more digits than Python converts
        raise _bad_json("The body has a number with too many digits.") from None
    except RecursionError:
        raise _bad_json("The body is nested too deeply.") from None
    if not isinstance(value, dict):
        raise _bad_json(f"The body must be {EXAMPLE}.")
    return value


def _syntax_error(error: json.JSONDecodeError) -> str:
    """Describe where and why a body is not JSON. Python's own messages vary by version and suggest no fix."""
    location = f"line {error.lineno}, column {error.colno}"
    if not error.doc.strip():
        return f"The body is empty. Send {EXAMPLE}."
    if error.msg.startswith("Unterminated string"):
        return f"The body is not valid JSON: the string that starts at {location} has no end. Send the complete body."
    if error.msg.startswith("Invalid control character"):
        return f"The body is not valid JSON: unescaped control character at {location}. Write \\n for a line break."
    if error.msg.startswith("Invalid \\"):
        return f"The body is not valid JSON: invalid escape at {location}. Write \\\\ for a backslash."
    if not error.doc[error.pos :].strip():
        return f"The body is not valid JSON: it ends at {location} within a value. Send the complete body."
    return (
        f"The body is not valid JSON: unexpected text at {location}: {error.doc[error.pos : error.pos + 20]!r}. Use"
        " double quotes around names and strings, and commas only between values."
    )


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it when the client disconnects. The body of the request must have been read.

    Raises:
        ClientDisconnect: the client disconnected first.
    """
    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({work_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            return work_task.result()
        raise ClientDisconnect
    finally:
        work_task.cancel()
        disconnect_task.cancel()
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)


async def _read_body(request: Request, max_bytes: int, max_pause: float, reserve: Callable[[int], None]) -> bytearray:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    chunks = request.stream()
    while (chunk := await _next_chunk(chunks, max_pause)) is not None:
        if len(body) + len(chunk) > max_bytes:
            raise _too_large(max_bytes)
        reserve(len(chunk))
        body += chunk
    return body


async def _next_chunk(chunks: AsyncGenerator[bytes, None], max_pause: float) -> bytes | None:
    """Return the next chunk of a body; None at its end."""
    try:
        with anyio.fail_after(max_pause):  # `asyncio.wait_for` can lose a cancellation, see `deadline.py`
            return await anext(chunks, None)
    except TimeoutError:
        message = f"No data of the body was received for {max_pause:g} seconds. Send the request again."
        raise HTTPException(408, message, headers={"Connection": "close"}) from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_shape(text: str) -> None:
    """Reject a body that would take far more memory than its text, before it is parsed.

    Values are estimated by punctuation: each value but the first follows a comma, a colon or a bracket.
    """
    if sum(map(text.count, ",:[{")) < MAX_DEPTH:
        return
    bare = text.replace(r"\\", "").replace(r"\"", "")
    if bare.count('"') > 2 * MAX_VALUES:
        raise _too_many_values()
    outside = "".join(bare.split('"')[::2])
    if sum(map(outside.count, ",:[{")) > MAX_VALUES:
        raise _too_many_values()
    if _depth(outside) > MAX_DEPTH:
        raise _bad_json(f"The body is nested too deeply: at most {MAX_DEPTH} levels are allowed.")


def _depth(outside: str) -> int:
    """Return the nesting depth of brackets in the text outside of strings."""
    steps = (1 if bracket in "[{" else -1 for bracket in re.findall(r"[\[\]{}]", outside))
    return max(itertools.accumulate(steps), default=0)


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject duplicate keys: parsers differ in which one they use, so a proxy may validate another value than we do."""
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise _bad_json("An object in the body has a duplicate key. Send each key once.")
    return unique


def _reject_constant(name: str) -> NoReturn:
    raise _bad_json(f"The body is not valid JSON: {name} is not a JSON number.")


def _bad_json(message: str) -> InvalidParameter:
    return InvalidParameter(message, code="invalid_json")


def _too_many_values() -> InvalidParameter:
    return _bad_json(f"The body has more than {MAX_VALUES} values. Send fewer.")


def _too_large(max_bytes: int) -> HTTPException:
    message = f"The body exceeds {max_bytes} bytes. Send smaller images, or https URLs instead of data: URLs."
    return HTTPException(413, message)
