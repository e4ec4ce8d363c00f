"""Errors in the form of Ollama's API."""

from __future__ import annotations

from typing import Any

from ... import errors


def error_body(error: Exception) -> dict[str, Any]:
    """Return Ollama's error object; `param` and `code` are an addition."""
    fields = errors.error_body(error)["error"]
    return {"error": fields["message"], "param": fields["param"], "code": fields["code"]}
