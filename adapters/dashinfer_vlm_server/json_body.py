"""Parse JSON bodies strictly, under limits on their shape."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, NoReturn

from dashinfer_vlm_core.errors import InvalidParameter

MAX_VALUES = 250_000
"""Maximum number of values and keys in a body: an empty array takes three bytes of text, but 64 bytes of memory."""

MAX_DEPTH = 64
"""Maximum nesting depth of the values in a body."""

EXAMPLE = 'a JSON object, such as {"messages": [{"role": "user", "content": "Hello!"}]}'


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object in any of JSON's encodings.

    Raises:
        InvalidParameter: the body is not a JSON object, has a duplicate key or NaN or an infinity, is nested too
            deeply, or has too many values.
    """
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        _check_shape(text)
        value = json.loads(text, parse_constant=reject_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        line, column = error.lineno, error.colno
        rest = error.doc[error.pos :]
        raise syntax_error(error.msg, line, column, rest, is_empty=not error.doc.strip()) from None
    except (ValueError, RecursionError) as error:
        raise conversion_error(error) from None
    return check_is_object(value)


def check_is_object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_json(f"The body must be {EXAMPLE}.")
    return value


def conversion_error(error: ValueError | RecursionError) -> InvalidParameter:
    """Describe an error other than invalid syntax that Python raises for a body."""
    if isinstance(error, UnicodeDecodeError):
        return bad_json("The body is not valid JSON: it is not UTF-8 text.")
    if isinstance(error, RecursionError):
        return bad_json("The body is nested too deeply.")
    return bad_json("The body has a number with too many digits.")  # more than Python converts to an integer


def syntax_error(message: str, line: int, column: int, rest: str, *, is_empty: bool) -> InvalidParameter:
    """Describe where and why a body is not JSON. Python's own messages vary by version and suggest no fix.

    Args:
        message: the message of `json.JSONDecodeError`.
        line, column: the location in the body, from 1.
        rest: the text from there on, or its beginning.
        is_empty: whether the body is empty.
    """
    location = f"line {line}, column {column}"
    if is_empty:
        return bad_json(f"The body is empty. Send {EXAMPLE}.")
    if message.startswith("Unterminated string"):
        problem = f"the string that starts at {location} has no end. Send the complete body."
    elif message.startswith("Invalid control character"):
        problem = f"unescaped control character at {location}. Write \\n for a line break."
    elif message.startswith("Invalid \\"):
        problem = f"invalid escape at {location}. Write \\\\ for a backslash."
    elif not rest.strip():
        problem = f"it ends at {location} within a value. Send the complete body."
    else:
        problem = (
            f"unexpected text at {location}: {rest[:20]!r}. Use double quotes around names and strings, and commas only"
            " between values."
        )
    return bad_json(f"The body is not valid JSON: {problem}")


def check_unique(pairs: list[tuple[str, Any]], unique: dict[str, Any]) -> dict[str, Any]:
    """Reject duplicate keys: parsers differ in which one they use, so a proxy may validate another value than we do."""
    if len(unique) < len(pairs):
        raise bad_json("An object in the body has a duplicate key. Send each key once.")
    return unique


def reject_constant(name: str) -> NoReturn:
    raise bad_json(f"The body is not valid JSON: {name} is not a JSON number.")


def bad_json(message: str) -> InvalidParameter:
    return InvalidParameter(message, code="invalid_json")


def too_many_values() -> InvalidParameter:
    return bad_json(f"The body has more than {MAX_VALUES} values. Send fewer.")


def too_deep() -> InvalidParameter:
    return bad_json(f"The body is nested too deeply: at most {MAX_DEPTH} levels are allowed.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return check_unique(pairs, dict(pairs))


def _check_shape(text: str) -> None:
    """Reject a body that would take far more memory than its text, before it is parsed.

    Values are estimated by punctuation: each value but the first follows a comma, a colon or a bracket.
    """
    if sum(map(text.count, ",:[{")) < MAX_DEPTH:
        return
    bare = text.replace(r"\\", "").replace(r"\"", "")
    if bare.count('"') > 2 * MAX_VALUES:
        raise too_many_values()
    outside = "".join(bare.split('"')[::2])
    if sum(map(outside.count, ",:[{")) > MAX_VALUES:
        raise too_many_values()
    if _depth(outside) > MAX_DEPTH:
        raise too_deep()


def _depth(outside: str) -> int:
    """Return the nesting depth of brackets in the text outside of strings."""
    steps = (1 if bracket in "[{" else -1 for bracket in re.findall(r"[\[\]{}]", outside))
    return max(itertools.accumulate(steps), default=0)
