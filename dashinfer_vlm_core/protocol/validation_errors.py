"""Errors of fields: their messages, also those of pydantic's errors, which become `InvalidParameter`."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from ..errors import InvalidParameter, RequestError, UnsupportedParameter

SHOWN_CHARACTERS = 60

TAGS = frozenset({"string", "strings", "array", "arrays", "object", "number", "boolean", "subset", "ids"})
"""Tags of union members, which pydantic's locations contain although the request does not."""

_FIELD_ERROR = "field_error"

_QUOTED = re.compile(r"`([^`\s]+)`")
_INDEX = re.compile(r"\[\d+\]")

_NEXT_STEPS: Mapping[str, str] = {
    "messages": ' Write "messages": [{"role": "user", "content": "..."}].',
    "prompt": ' Write "prompt": "..." or "prompt": ["...", "..."].',
    "role": ' Write "role": "user" for prompts.',
    "tools[].function": ' Write "function": {"name": "...", "parameters": {...}}.',
    "tools": ' Write "tools": [{"type": "function", "function": {"name": "...", "parameters": {...}}}].',
    "input": ' Write "input": "...", or "input": [{"role": "user", "content": "..."}].',
    "response_format": ' Write "response_format": {"type": "json_object"}.',
    "stream_options": ' Write "stream_options": {"include_usage": true}.',
    "image_url": ' Write "image_url": {"url": "..."}.',
    "video_url": ' Write "video_url": {"url": "..."}.',
    "input_video": ' Write "input_video": {"data": "..."} with a file in base64, or {"url": "..."}.',
}


_MESSAGES: Mapping[str, str] = {
    "missing": "is required",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a finite number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "tuple_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "string_or_array": "must be a string or an array",
    "string_or_object": "must be a string or an object",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "less_than": "must be less than {lt}",
    "too_short": "must not be empty",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "string_unicode": "must be valid Unicode, without lone surrogates",
    "string_pattern_mismatch": "must map token IDs to numbers",
    "value_error": "{error}",
    "extra_forbidden": "is not a known option",
    "unexpected_keyword_argument": "is not a known key",
}

_SHAPE_ERRORS = frozenset({"missing", "model_type", "string_or_object", "tuple_type", "too_short"})

_UNQUOTED: Mapping[str, re.Pattern[str]] = {
    "int_type": re.compile(r"-?\d{1,20}"),
    "float_type": re.compile(r"-?\d{1,20}(\.\d{1,20})?"),
    "bool_type": re.compile(r"true|false"),
}
"""Strings that would be valid without their quotes, by error type."""


def validation_message(error: ErrorDetails) -> str:
    """Return the message for an error, a predicate whose subject is the name of the value."""
    bounds = {name: _as_integer(value) for name, value in error.get("ctx", {}).items()}
    return _MESSAGES.get(error["type"], "has the wrong type or shape").format(**bounds)


def _as_integer(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def invalid(path: str, predicate: str) -> InvalidParameter:
    """Return the error for a field; `predicate` continues the sentence that its path begins."""
    return InvalidParameter(f"`{path}` {predicate}", param=path)


def unsupported(path: str, predicate: str) -> UnsupportedParameter:
    """Return the error for a field whose feature is not available, like `invalid`."""
    return UnsupportedParameter(f"`{path}` {predicate}", param=path)


def field_error(name: str, predicate: str) -> PydanticCustomError:
    """Return the error for a field of the object that pydantic validates; `explain` adds the path of the object."""
    return PydanticCustomError(_FIELD_ERROR, "{predicate}", {"name": name, "predicate": predicate})


def explain(error: ValidationError) -> InvalidParameter:
    """Convert the first error to an `InvalidParameter` with the field and the allowed values."""
    details = error.errors(include_url=False)[0]
    if details["type"] == _FIELD_ERROR:
        return invalid(_param((*details["loc"], details["ctx"]["name"])), details["ctx"]["predicate"])
    param = _param(details["loc"])
    message = validation_message(details)
    got = "" if details["type"] in {"missing", "too_short", "string_too_short"} else f"; got {show(details['input'])}"
    next_step = _next_step(details, param)
    return InvalidParameter(
        f"{f'`{param}`' if param else 'The request'} {message}{got}.{next_step}", param=param or None
    )


@contextlib.contextmanager
def renamed_errors(rename: Callable[[str], str]) -> Iterator[None]:
    """Rename the fields that errors of the block name: `rename` returns the path in the request of the caller."""
    try:
        yield
    except RequestError as error:
        renamed = copy.copy(error)
        renamed.message = _QUOTED.sub(lambda match: f"`{rename(match[1])}`", error.message)
        renamed.param = error.param and rename(error.param)
        renamed.args = (renamed.message,)
        raise renamed from None


def _next_step(details: ErrorDetails, param: str) -> str:
    if details["type"] == "extra_forbidden":
        return " Remove it."
    return _unquote_hint(details) or (_example(param) if details["type"] in _SHAPE_ERRORS else "")


def _example(param: str) -> str:
    pattern = _INDEX.sub("[]", param)
    return _NEXT_STEPS.get(pattern) or _NEXT_STEPS.get(param.rpartition(".")[2], "")


def _unquote_hint(details: ErrorDetails) -> str:
    value = details["input"]
    plain = _UNQUOTED.get(details["type"])
    meant = plain is not None and isinstance(value, str) and plain.fullmatch(value)
    return " Write it without quotes." if meant else ""


def _param(location: tuple[int | str, ...]) -> str:
    """Return a location in OpenAI's notation: `messages[0].content[1].image_url.url`."""
    if location and location[-1] == "[key]":  # the error is in a key of the object, which can be any string
        location = location[:-2]
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in location if step not in TAGS)
    return "".join(steps).removeprefix(".")


def show(value: object) -> str:
    """Format a value for a message: always short, and without traversing nested values."""
    if isinstance(value, str):
        return repr(value if len(value) <= SHOWN_CHARACTERS else value[:SHOWN_CHARACTERS] + "...")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**30):
        return str(value)
    if isinstance(value, int):
        return "a huge number"
    if isinstance(value, (list, tuple)):
        return "an array"
    return "an object" if isinstance(value, dict) else f"a value of type {type(value).__name__}"
