"""Errors on the wire: each kind of error gets an HTTP status and OpenAI's error body, and nothing else gets out.

The body is `{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}`; `param` names the request's field.
"""

from __future__ import annotations

import http
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

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

logger: logging.Logger = logging.getLogger(__name__)

STATUS: Mapping[type[DashInferVLMError], int] = MappingProxyType(
    {
        # Media included, fetched or not: OpenAI answers 400 to a picture it cannot download, and clients catch that.
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
"""The status of each error; one that is not listed has that of its nearest base."""

TYPES: Mapping[int, str] = MappingProxyType(
    {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
)
"""OpenAI's `type` by status, where it is not simply the caller's fault (4xx) or the server's (5xx)."""

CLIENT_GONE = 499
"""Status in the access log of a request whose client left; nobody receives it."""

INTERNAL_ERROR = "The server failed on this request; its log says why. Other requests are not affected."

ROUTES = (
    "POST /v1/chat/completions, GET /v1/models, GET /v1/models/{model}, POST /v1/media/preview, POST /tokenize,"
    " POST /detokenize, GET /health, GET /health/ready, GET /metrics, GET /version and GET /openapi.json"
)

DRAINING = "draining"

NOT_NOW = "The server is loading, ending or has ended: try again in a moment, or ask another one."

LATER_SECONDS = 5
"""When to ask again a server that is loading, restarting or ending."""


def status_for(error: Exception) -> int:
    """The HTTP status of an error; 500 for what nobody foresaw."""
    if isinstance(error, HTTPException):
        return error.status_code
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def error_body(error: Exception) -> dict[str, Any]:
    """OpenAI's error object. Only errors that were written for the caller show their text."""
    status = status_for(error)
    body = {"message": INTERNAL_ERROR, "type": _type(status), "param": None, "code": "internal_error"}
    if isinstance(error, (RequestError, EngineError, MissingDependency)):
        body |= {"message": error.message, "param": error.param, "code": error.code}
        if isinstance(error, EngineClosed) and error.to_be_started:
            body["message"] = NOT_NOW
    elif isinstance(error, HTTPException):
        body |= {"message": _explain(error), "code": _CODES.get(status)}
    return {"error": body}


def error_response(error: Exception) -> JSONResponse:
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, QueueFull):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    elif isinstance(error, (EngineClosed, DecoderFailed)):
        headers["Retry-After"] = str(LATER_SECONDS)
    return JSONResponse(error_body(error), status_code=status_for(error), headers=headers)


def unauthorized() -> HTTPException:
    """No key, or a wrong one: which of them is not told."""
    return HTTPException(
        401,
        "A valid API key is needed: send the header `Authorization: Bearer KEY`.",
        headers={"WWW-Authenticate": "Bearer"},
    )


async def send_error(_request: Request, error: Exception) -> Response:
    """Exception handler for every error that was foreseen."""
    if isinstance(error, SetupError):  # the operator can mend it, the caller cannot
        logger.error("a request failed: %s", error.message)
    return error_response(error)


async def send_nothing(_request: Request, _error: Exception) -> Response:
    """Exception handler for a client that left."""
    return Response(status_code=CLIENT_GONE)


HANDLERS: Mapping[type[Exception], Callable[[Request, Exception], Coroutine[Any, Any, Response]]] = {
    DashInferVLMError: send_error,
    HTTPException: send_error,
    ClientDisconnect: send_nothing,
}

_CODES: Mapping[int, str] = MappingProxyType(
    {
        401: "invalid_api_key",
        404: "unknown_url",
        405: "method_not_allowed",
        408: "request_timeout",
        413: "request_too_large",
        501: "not_supported",
    }
)


def _type(status: int) -> str:
    return TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def _explain(error: HTTPException) -> str:
    if error.status_code == 404:
        return f"There is nothing at this URL. This server answers {ROUTES}."
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "other methods")
        return f"This URL answers {' and '.join(sorted(allowed.split(', ')))} only."
    return error.detail


def status_text(status: int) -> str:
    """What a status says, for the document."""
    return http.HTTPStatus(status).phrase
