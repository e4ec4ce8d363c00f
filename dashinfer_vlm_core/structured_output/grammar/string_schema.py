"""Schemas of strings to rules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from . import bounds
from .any_value import string_body
from .rules import Rules

_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"})
_FORMAT_CHARACTERS = 256


def string_rule(rules: Rules, schema: Mapping[str, Any], path: str) -> str | None:
    """Add the rule of a schema of strings; None if it allows none.

    Raises:
        SchemaError: `pattern` is not a supported regular expression, or the request has too many of them.
    """
    min_length = schema.get("minLength", 0)
    format_name = schema.get("format") if schema.get("format") in _FORMATS else None
    default = _FORMAT_CHARACTERS if format_name else bounds.STRING_CHARACTERS
    max_length = min(schema.get("maxLength", max(min_length, default)), bounds.MAX_STRING_CHARACTERS)
    if min_length > max_length:
        return None
    if "pattern" not in schema and format_name is None:
        return rules.terminal(string_body(min_length, max_length))
    text = {"type": "string", "minLength": min_length, "maxLength": max_length}
    text |= {key: schema[key] for key in ("pattern", "format") if key in schema and (key != "format" or format_name)}
    keyword = "pattern" if "pattern" in schema else "format"
    return rules.pattern(f"%json {json.dumps(text)}", f"{path}.{keyword}")
