"""Convert errors to responses, with an HTTP status and the protocol's error body. No other details are sent to clients.

The body is `{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}`; `param` names the request's field.
For an unknown URL, the message has the next step.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute

from dashinfer_vlm_core.errors import (
    DashInferVLMError,
    DeadlineExceeded,
    DecoderFailed,
    EngineClosed,
    EngineError,
    InvalidParameter,
    MissingDependency,
    ModelNotFound,
    QueueFull,
    RequestError,
    SetupError,
)
from dashinfer_vlm_core.protocol.validation_errors import show, validation_message

from .endpoint import Endpoint, find_endpoint

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

logger: logging.Logger = logging.getLogger(__name__)

STATUS: Mapping[type[DashInferVLMError], int] = {
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
"""The status of each error class; others have the status of their nearest base class."""

TYPES: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
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
    default_type = "invalid_request_error" if status < 500 else "server_error"
    body = {"message": INTERNAL_ERROR, "type": TYPES.get(status, default_type), "param": None, "code": "internal_error"}
    if isinstance(error, (RequestError, EngineError, MissingDependency)):
        body |= {"message": error.message, "param": error.param, "code": error.code}
        if isinstance(error, EngineClosed) and error.to_be_started:
            body["message"] = UNAVAILABLE
    elif isinstance(error, ApiError):
        body |= {"message": error.detail, "param": error.param, "code": error.code}
    elif isinstance(error, HTTPException):
        body |= {"message": _http_error_message(error), "code": _CODES.get(status)}
    return {"error": body}


def error_response(error: Exception, endpoint: Endpoint | None = None) -> JSONResponse:
    """Return the response to an error, in the form of the endpoint's protocol."""
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, QueueFull):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    elif isinstance(error, (EngineClosed, DecoderFailed)):
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    to_body = (endpoint and endpoint.error_body) or error_body
    return JSONResponse(to_body(error), status_code=status_for(error), headers=headers)


_CODES: Mapping[int, str] = {
    401: "invalid_api_key",
    404: "unknown_url",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    501: "not_supported",
}


def _http_error_message(error: HTTPException) -> str:
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "other methods")
        return f"This URL supports {' and '.join(sorted(allowed.split(', ')))} only."
    return error.detail


_NO_WEBSOCKET = ApiError(
    404,
    "There is no WebSocket at this URL. Connect to /v1/responses, or send a request.",
    code="websocket_not_supported",
)

_NEXT_STEPS: Mapping[str, str] = {
    "/api": "The server has no other routes of Ollama's API.",
    "/v1/audio": "The models do not support audio.",
    "/v1/conversations": "Conversations are not stored. Use `previous_response_id` of /v1/responses.",
    "/v1/files": "Files are not stored. Send images and videos as URLs or data: URLs.",
    "/v1/images": "The models generate text. Use another server for images.",
    "/v1/messages/batches": "Send the requests to /v1/messages at the same time.",
}
"""What to do instead of requests to routes of OpenAI's and others' APIs that no endpoint has."""


_FOLDERS = ("/api/", "/v1/messages/")
"""Where other protocols than OpenAI's have their routes."""


async def send_error(request: Request, error: Exception) -> Response:
    """Handle an expected error."""
    if isinstance(error, SetupError):  # only the operator can fix it
        logger.error("Request failed: %s", error.message)
    if isinstance(error, HTTPException) and not isinstance(error, ApiError) and error.status_code == 404:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        error = _unknown_url(request.app.routes, path)
        return error_response(error, _endpoint_of_protocol(request.app.routes, path))
    return error_response(error, find_endpoint(request.app.routes, request.scope))


async def send_not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """Serve what no route matches.

    Raises:
        HTTPException: 404, for a request; `send_error` handles it.
    """
    if scope["type"] != "websocket":
        raise HTTPException(404)
    await error_response(_NO_WEBSOCKET)(scope, receive, send)


async def send_validation_error(request: Request, error: Exception) -> Response:
    """Handle an invalid parameter of the path or the query."""
    assert isinstance(error, RequestValidationError), "it is registered for this class"
    details = error.errors()[0]
    name = str(details["loc"][-1])
    message = f"`{name}` {validation_message(details)}, got {show(details['input'])}."
    return error_response(InvalidParameter(message, param=name), find_endpoint(request.app.routes, request.scope))


async def send_nothing(_request: Request, _error: Exception) -> Response:
    """Handle a disconnected client."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


HANDLERS: Mapping[type[Exception], Callable[[Request, Exception], Coroutine[Any, Any, Response]]] = {
    DashInferVLMError: send_error,
    HTTPException: send_error,
    RequestValidationError: send_validation_error,
    ClientDisconnect: send_nothing,
}


def _endpoint_of_protocol(routes: Iterable[BaseRoute], path: str) -> Endpoint | None:
    """Return an endpoint of the protocol of an unknown URL, which has the form of its errors; None for OpenAI's."""
    endpoints = (route for route in routes if isinstance(route, Endpoint))
    folder = next((folder for folder in _FOLDERS if f"{path}/".startswith(folder)), None)
    return next((endpoint for endpoint in endpoints if folder and f"{endpoint.path}/".startswith(folder)), None)


def _unknown_url(routes: Iterable[BaseRoute], path: str) -> HTTPException:
    paths = [route.path for route in routes if isinstance(route, Endpoint) and "{" not in route.path]
    steps = [text for known, text in _NEXT_STEPS.items() if f"{path}/".startswith(f"{known}/") and known not in paths]
    if f"/v1{path}" in paths:
        steps = ["The base URL of a client must end with /v1."]
    if not steps:
        similar = difflib.get_close_matches(path, paths, n=1, cutoff=0.7)
        hint = f"Did you mean {similar[0]}?" if similar else "Chat requests go to POST /v1/chat/completions."
        steps = [f"{hint} GET /openapi.json lists the URLs of this server."]
    return HTTPException(404, f"Unknown URL. {steps[0]}")
