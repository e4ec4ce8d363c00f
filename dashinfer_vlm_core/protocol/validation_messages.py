"""Pydantic's faults in our words."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_WORDS: Mapping[str, str] = MappingProxyType(
    {
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
        "too_short": "must not be empty",
        "too_long": "must have at most {max_length} entries",
        "string_too_short": "must not be empty",
        "string_too_long": "must have at most {max_length} characters",
        "string_unicode": "must be valid Unicode, without lone surrogates",
        "string_pattern_mismatch": "must map token ids to numbers",
        "value_error": "{error}",
        "extra_forbidden": "is no option that is known here: leave it out",
        "unexpected_keyword_argument": "is not known here: leave it out",
    }
)


def validation_message(fault: ErrorDetails) -> str:
    """What a value must be, as the end of a sentence that begins with its name."""
    bounds = {name: _short(value) for name, value in fault.get("ctx", {}).items()}
    return _WORDS.get(fault["type"], "has the wrong type or shape").format(**bounds)


def _short(value: object) -> object:
    """2.0 as 2: bounds of numbers that need not be whole."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
