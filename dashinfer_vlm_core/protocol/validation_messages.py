"""Messages for pydantic's validation errors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_MESSAGES: Mapping[str, str] = MappingProxyType(
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
        "string_pattern_mismatch": "must map token IDs to numbers",
        "value_error": "{error}",
        "extra_forbidden": "is not a known option",
        "unexpected_keyword_argument": "is not a known key",
    }
)


def validation_message(error: ErrorDetails) -> str:
    """Return the message for an error, a predicate whose subject is the name of the value."""
    bounds = {name: _as_integer(value) for name, value in error.get("ctx", {}).items()}
    return _MESSAGES.get(error["type"], "has the wrong type or shape").format(**bounds)


def _as_integer(value: object) -> object:
    """Convert integral floats, such as bounds, to int: 2.0 becomes 2."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
