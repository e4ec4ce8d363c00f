"""Pydantic's faults in the words of the API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ..errors import InvalidParameter
from .base import TAGS
from .validation_messages import validation_message

SHOWN_CHARACTERS = 60

_INDEX = re.compile(r"\[\d+\]")

_NEXT_STEPS: Mapping[str, str] = MappingProxyType(
    {
        "messages": ' Write "messages": [{"role": "user", "content": "..."}].',
        "role": ' Write "role": "user", for what the model is asked.',
        "tools[].function": ' Write "function": {"name": "...", "parameters": {...}}.',
        "tools": ' Write "tools": [{"type": "function", "function": {"name": "...", "parameters": {...}}}].',
        "response_format": ' Write "response_format": {"type": "json_object"}.',
        "stream_options": ' Write "stream_options": {"include_usage": true}.',
        "image_url": ' Write "image_url": {"url": "..."}.',
        "video_url": ' Write "video_url": {"url": "..."}.',
    }
)


_SHAPES = frozenset({"missing", "model_type", "tuple_type", "too_short"})

_PLAIN: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "int_type": re.compile(r"-?\d{1,20}"),
        "float_type": re.compile(r"-?\d{1,20}(\.\d{1,20})?"),
        "bool_type": re.compile(r"true|false"),
    }
)
"""What would be right without the quotes around it."""


def explain(error: ValidationError) -> InvalidParameter:
    """The first fault, as an error that names the field and what it may hold."""
    fault = error.errors(include_url=False)[0]
    param = _param(fault["loc"])
    words = validation_message(fault)
    got = "" if fault["type"] in {"missing", "too_short", "string_too_short"} else f"; got {show(fault['input'])}"
    next_step = _quoted(fault) or (_shape(param) if fault["type"] in _SHAPES else "")
    return InvalidParameter(f"{f'`{param}`' if param else 'The request'} {words}{got}.{next_step}", param=param or None)


def _shape(param: str) -> str:
    """What to write at a place: by its whole name, or by its last part, where that means the same everywhere."""
    place = _INDEX.sub("[]", param)
    return _NEXT_STEPS.get(place) or _NEXT_STEPS.get(param.rpartition(".")[2], "")


def _quoted(fault: ErrorDetails) -> str:
    """The next step for a number or a truth value that came as a text: a common slip, and not mended here."""
    value, plain = fault["input"], _PLAIN.get(fault["type"])
    meant = plain is not None and isinstance(value, str) and plain.fullmatch(value)
    return " Write it without quotes." if meant else ""


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
