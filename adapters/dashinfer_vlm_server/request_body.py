"""What comes in: the body of a request, under limits; and the news that the client left."""

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

PARSED_INLINE = 256 * 1024
"""Bytes up to which a body is parsed on the event loop: about a millisecond. A thread costs less beyond that."""

MAX_VALUES = 250_000
"""Most values and keys of a body: an empty array takes three bytes of it, but 64 of memory."""

EXAMPLE = 'a JSON object, such as {"messages": [{"role": "user", "content": "Hello!"}]}'

MAX_DEPTH = 64
"""How deep the values of a body may be nested."""


async def read_request(
    request: Request, parse: Callable[[object], T], *, max_bytes: int, max_pause: float, hold: Callable[[int], None]
) -> T:
    """Read a request whole; what `parse` makes of its object. The content type is not looked at: there is but one that
    it could be.

    Args:
        request: whose body was not read yet.
        parse: makes something of an object; called in a thread where that takes long.
        max_bytes: most bytes of the body.
        max_pause: most seconds between two pieces of it.
        hold: told the size of each piece before it is kept; may raise.

    Raises:
        HTTPException: 413, the body exceeds `max_bytes`; no more of it was kept. 408, nothing of it came for
            `max_pause` seconds.
        RequestError: it is no JSON object, or `parse` refuses it.
        ClientDisconnect: the client left before its request was complete.
    """
    body = await _read_body(request, max_bytes, max_pause, hold)
    if len(body) <= PARSED_INLINE:
        return parse(parse_object(body))
    return await asyncio.to_thread(lambda: parse(parse_object(body)))


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """A JSON object, in any of JSON's encodings.

    Raises:
        InvalidParameter: it is something else, has a key twice or a number unknown to JSON, is nested too deep, or has
            too many values.
    """
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        _check_shape(text)
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise _bad_json(_explain(error)) from None
    except UnicodeDecodeError:
        raise _bad_json("The body is not valid JSON: it is not UTF-8 text.") from None
    except ValueError:  # an integer of more digits than Python reads
        raise _bad_json("The body has a number with too many digits.") from None
    except RecursionError:
        raise _bad_json("The body is nested too deep.") from None
    if not isinstance(value, dict):
        raise _bad_json(f"The body must be {EXAMPLE}.")
    return value


def _explain(error: json.JSONDecodeError) -> str:
    """Where a body is no JSON; the parser's words differ between versions of Python, and name no next step."""
    where = f"line {error.lineno}, column {error.colno}"
    if not error.doc.strip():
        return f"The body is empty: send {EXAMPLE}."
    if error.msg.startswith("Unterminated string"):
        return f"The body is not valid JSON: it ends within the text that begins at {where}. Send the rest of it."
    if error.msg.startswith("Invalid control character"):
        return f"The body is not valid JSON: write \\n for the line break, or \\u and four digits, at {where}."
    if error.msg.startswith("Invalid \\"):
        return f"The body is not valid JSON: there is a lone backslash at {where}. Write \\\\ for a backslash."
    if not error.doc[error.pos :].strip():
        return f"The body is not valid JSON: it ends at {where}, in the midst of a value. Send the rest of it."
    return (
        f"The body is not valid JSON: it cannot be read from {where} on, {error.doc[error.pos : error.pos + 20]!r}."
        " JSON has double quotes around names and texts, and commas between values alone."
    )


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. The request's body must have been read.

    Raises:
        ClientDisconnect: the client left first.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _read_body(request: Request, max_bytes: int, max_pause: float, hold: Callable[[int], None]) -> bytearray:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    pieces = request.stream()
    while (piece := await _next(pieces, max_pause)) is not None:
        if len(body) + len(piece) > max_bytes:
            raise _too_large(max_bytes)
        hold(len(piece))
        body += piece
    return body


async def _next(pieces: AsyncGenerator[bytes, None], max_pause: float) -> bytes | None:
    """The next piece of a body; None at its end."""
    try:
        with anyio.fail_after(max_pause):  # `asyncio.wait_for` may lose a cancellation, see `deadline`
            return await anext(pieces, None)
    except TimeoutError:
        message = f"Nothing of the body came for {max_pause:g} seconds: send the request again."
        raise HTTPException(408, message, headers={"Connection": "close"}) from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_shape(text: str) -> None:
    """Refuse what would take far more memory than its text, before any object is made of it.

    What is counted is punctuation: each value but the first has a comma, a colon or a bracket before it.
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
        raise _bad_json(f"The body is nested too deep: {MAX_DEPTH} levels are read.")


def _depth(outside: str) -> int:
    """The deepest level of brackets, in what is outside of strings."""
    steps = (1 if bracket in "[{" else -1 for bracket in re.findall(r"[\[\]{}]", outside))
    return max(itertools.accumulate(steps), default=0)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Parsers differ in which of two equal keys counts; what one checks, another may not see."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _bad_json("An object in the body has the same key twice.")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise _bad_json(f"The body is not valid JSON: {name} is no JSON number.")


def _bad_json(message: str) -> InvalidParameter:
    return InvalidParameter(message, code="invalid_json")


def _too_many_values() -> InvalidParameter:
    return _bad_json(f"The body has more than {MAX_VALUES} values: send less.")


def _too_large(max_bytes: int) -> HTTPException:
    message = f"The body exceeds {max_bytes} bytes: send smaller pictures, or https URLs instead of data: URLs."
    return HTTPException(413, message)
