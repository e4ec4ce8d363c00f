"""Errors in the form of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ... import errors
from ...logs import REQUEST_ID

_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's `type` for statuses that are not a plain client error (4xx) or server error (5xx)."""


def error_body(error: Exception) -> dict[str, Any]:
    """Return Anthropic's error object; `param` and `code` are an addition."""
    status = errors.status_for(error)
    fields = errors.error_body(error)["error"]
    default = "invalid_request_error" if status < 500 else "api_error"
    return {"type": "error", "error": fields | {"type": _TYPES.get(status, default)}, "request_id": REQUEST_ID.get()}
