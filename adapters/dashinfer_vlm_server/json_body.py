"""Parse JSON bodies strictly, under limits on their shape."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from dashinfer_vlm_core.errors import InvalidParameter
from dashinfer_vlm_core.protocol.json_limits import JsonLimitExceeded, count_values

EXAMPLE = 'a JSON object with the fields of the request, such as {"model": "..."}'


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object in any of JSON's encodings.

    Raises:
        InvalidParameter: the body is not a JSON object, has a duplicate key or NaN or an infinity, is nested too
            deeply, or has too many values.
    """
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")
        count_values(text)
        value = json.loads(text, parse_constant=_reject_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise _bad_json(_explain(error)) from None
    except JsonLimitExceeded as error:
        raise _bad_json(f"The body {error}") from None
    except UnicodeDecodeError:
        raise _bad_json("The body is not valid JSON: it is not UTF-8 text.") from None
    except ValueError:  # more digits than Python converts to an integer
        raise _bad_json("The body has a number with too many digits.") from None
    if not isinstance(value, dict):
        raise _bad_json(f"The body must be {EXAMPLE}.")
    return value


def _explain(error: json.JSONDecodeError) -> str:
    location = f"line {error.lineno}, column {error.colno}"
    rest = error.doc[error.pos : error.pos + 20]
    if not error.doc.strip():
        return f"The body is empty. Send {EXAMPLE}."
    if error.msg.startswith("Unterminated string"):
        problem = f"the string that starts at {location} has no end. Send the complete body."
    elif error.msg.startswith("Invalid control character"):
        problem = f"unescaped control character at {location}. Write \\n for a line break."
    elif error.msg.startswith("Invalid \\"):
        problem = f"invalid escape at {location}. Write \\\\ for a backslash."
    elif not rest.strip():
        problem = f"it ends at {location} within a value. Send the complete body."
    else:
        problem = (
            f"unexpected text at {location}: {rest!r}. Use double quotes around names and strings, and commas only"
            " between values."
        )
    return f"The body is not valid JSON: {problem}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject duplicate keys: parsers differ in which one they use, so a proxy may validate another value than we do."""
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise _bad_json("An object in the body has a duplicate key. Send each key once.")
    return unique


def _reject_constant(name: str) -> NoReturn:
    raise _bad_json(f"The body is not valid JSON: {name} is not a JSON number.")


def _bad_json(message: str) -> InvalidParameter:
    return InvalidParameter(message, code="invalid_json")
