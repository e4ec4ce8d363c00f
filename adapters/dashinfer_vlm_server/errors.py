"""Map errors to an HTTP status and OpenAI's error body. No other details are sent to clients.

The body is `{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}`; `param` names the request's field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from dashinfer_vlm_core.errors import (
    DashInferVLMError,
    DeadlineExceeded,
    DecoderFailed,
    EngineClosed,
    EngineError,
    MissingDependency,
    ModelNotFound,
    QueueFull,
    RequestError,
    SetupError,
)

STATUS: Mapping[type[DashInferVLMError], int] = MappingProxyType(
    {
        # Includes failed media fetches: OpenAI returns 400 for an image it cannot download, and clients expect that.
        RequestError: 400,
        ModelNotFound: 404,
        QueueFull: 429,
        EngineClosed: 503,
        DecoderFailed: 503,
        DeadlineExceeded: 504,
        EngineError: 500,
        MissingDependency: 501,
        SetupError: 500,
        DashInferVLMError: 500,
    }
)
"""The status of each error class; others have the status of their nearest base class."""

TYPES: Mapping[int, str] = MappingProxyType(
    {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
)
"""OpenAI's `type` for statuses that are not a plain client error (4xx) or server error (5xx)."""

CLIENT_CLOSED_REQUEST = 499
"""Status in the access log if the client disconnected; it is never sent."""

INTERNAL_ERROR = "Internal server error. The server's log has the cause. Other requests are not affected."

DRAINING = "draining"

UNAVAILABLE = "The server is loading or shutting down. Try again later, or use another server."

RETRY_AFTER_SECONDS = 5
"""`Retry-After` of a server that is loading, restarting or shutting down."""


class ApiError(HTTPException):
    """An HTTP error whose `code` does not follow from its status."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(status, message)
        self.code = code
        self.param = param


def status_for(error: Exception) -> int:
    """Return the HTTP status of an error; 500 for unexpected errors."""
    if isinstance(error, HTTPException):
        return error.status_code
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def error_body(error: Exception) -> dict[str, Any]:
    """Return OpenAI's error object. It contains the message only of errors that are written for callers."""
    status = status_for(error)
    body = {"message": INTERNAL_ERROR, "type": _type(status), "param": None, "code": "internal_error"}
    if isinstance(error, (RequestError, EngineError, MissingDependency)):
        body |= {"message": error.message, "param": error.param, "code": error.code}
        if isinstance(error, EngineClosed) and error.to_be_started:
            body["message"] = UNAVAILABLE
    elif isinstance(error, ApiError):
        body |= {"message": error.detail, "param": error.param, "code": error.code}
    elif isinstance(error, HTTPException):
        body |= {"message": _http_error_message(error), "code": _CODES.get(status)}
    return {"error": body}


def error_response(error: Exception) -> JSONResponse:
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, QueueFull):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    elif isinstance(error, (EngineClosed, DecoderFailed)):
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    return JSONResponse(error_body(error), status_code=status_for(error), headers=headers)


def unauthorized() -> HTTPException:
    """Return the error for a missing or invalid key. It does not reveal which."""
    return HTTPException(
        401,
        "A valid API key is required. Send the header `Authorization: Bearer KEY`.",
        headers={"WWW-Authenticate": "Bearer"},
    )


_CODES: Mapping[int, str] = MappingProxyType(
    {
        401: "invalid_api_key",
        404: "unknown_url",
        405: "method_not_allowed",
        408: "request_timeout",
        413: "request_too_large",
        415: "unsupported_media_type",
        429: "rate_limit_exceeded",
        501: "not_supported",
    }
)


def _type(status: int) -> str:
    return TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def _http_error_message(error: HTTPException) -> str:
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "other methods")
        return f"This URL supports {' and '.join(sorted(allowed.split(', ')))} only."
    return error.detail
