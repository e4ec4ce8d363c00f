"""Parse JSON bodies strictly, under limits on their shape."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from dashinfer_vlm_core.errors import InvalidParameter
from dashinfer_vlm_core.protocol.json_limits import JsonLimitExceeded, count_values

EXAMPLE = 'a JSON object, such as {"messages": [{"role": "user", "content": "Hello!"}]}'


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object in any of JSON's encodings.

    Raises:
        InvalidParameter: the body is not a JSON object, has a duplicate key or NaN or an infinity, is nested too
            deeply, or has too many values.
    """
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        count_values(text)
        value = json.loads(text, parse_constant=reject_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        line, column = error.lineno, error.colno
        rest = error.doc[error.pos :]
        raise syntax_error(error.msg, line, column, rest, is_empty=not error.doc.strip()) from None
    except JsonLimitExceeded as error:
        raise exceeded(str(error)) from None
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


def exceeded(limit: str) -> InvalidParameter:
    """Return the error for a body that exceeds a limit of `json_limits`."""
    return bad_json(f"The body {limit}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return check_unique(pairs, dict(pairs))
