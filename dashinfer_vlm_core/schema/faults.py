"""Pydantic's faults in the words of the API."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import ValidationError

from ..errors import InvalidParameter
from .base import TAGS

SHOWN_CHARACTERS = 60

_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "missing": "is required",
        "string_type": "must be a string",
        "int_type": "must be an integer",
        "float_type": "must be a finite number",
        "finite_number": "must be a finite number",
        "bool_type": "must be true or false",
        "tuple_type": "must be an array",
        "dict_type": "must be an object",
        "model_type": "must be an object",
        "string_or_array": "must be a string or an array",
        "string_or_object": "must be a string or an object",
        "greater_than": "must be above {gt}",
        "greater_than_equal": "must be at least {ge}",
        "less_than_equal": "must be at most {le}",
        "literal_error": "must be {expected}",
        "too_short": "must not be empty",
        "too_long": "must have at most {max_length} entries",
        "string_too_short": "must not be empty",
        "string_too_long": "must have at most {max_length} characters",
        "string_unicode": "must be valid Unicode, without lone surrogates",
        "string_pattern_mismatch": "must map token ids to numbers",
        "value_error": "{error}",
        "extra_forbidden": "is no option that is known here: leave it out",
    }
)

_NEXT_STEPS: Mapping[str, str] = MappingProxyType(
    {
        "image_url": ' Write "image_url": {"url": "..."}.',
        "video_url": ' Write "video_url": {"url": "..."}.',
    }
)


def explain(error: ValidationError) -> InvalidParameter:
    """The first fault, as an error that names the field and what it may hold."""
    fault = error.errors(include_url=False)[0]
    param = _param(fault["loc"])
    words = _WORDS.get(fault["type"], "has the wrong type or shape").format(**fault.get("ctx", {}))
    got = "" if fault["type"] in {"missing", "too_short", "string_too_short"} else f"; got {show(fault['input'])}"
    next_step = _NEXT_STEPS.get(param.rpartition(".")[2], "") if fault["type"] in {"model_type", "missing"} else ""
    return InvalidParameter(f"{f'`{param}`' if param else 'The request'} {words}{got}.{next_step}", param=param or None)


def _param(location: tuple[int | str, ...]) -> str:
    """OpenAI's notation of a place: `messages[0].content[1].image_url.url`."""
    if location and location[-1] == "[key]":  # the fault is a key of the object, which may be anything
        location = location[:-2]
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in location if step not in TAGS)
    return "".join(steps).removeprefix(".")


def show(value: object) -> str:
    """A value for a message: short whatever its size, and without looking into what may be deep."""
    if isinstance(value, str):
        return repr(value if len(value) <= SHOWN_CHARACTERS else value[:SHOWN_CHARACTERS] + "...")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 10**30):
        return str(value)
    if isinstance(value, int):
        return "a huge number"
    return "an object" if isinstance(value, dict) else "an array" if isinstance(value, (list, tuple)) else "neither"
