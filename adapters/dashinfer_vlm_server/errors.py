"""Map errors to an HTTP status and OpenAI's error body. No other details are sent to clients.

The body is `{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}`; `param` names the request's field.
"""

from __future__ import annotations

import http
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute

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

from .routes import route_path

logger: logging.Logger = logging.getLogger(__name__)

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


class _CodedHTTPException(HTTPException):
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
    elif isinstance(error, _CodedHTTPException):
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


def foreign_host(host: str) -> HTTPException:
    """Return the error for a `Host` header with a name that may not be the server's."""
    return _CodedHTTPException(
        403,
        f"The host name {host!r} is not allowed on a server without API keys. Use the server's IP address, or start"
        " the server with this name in `--allowed-hosts`.",
        code="host_not_allowed",
    )


def foreign_origin(origin: str) -> HTTPException:
    """Return the error for a request of a web page from another origin."""
    return _CodedHTTPException(
        403,
        f"Web pages of the origin {origin!r} are not allowed to send requests to a server without API keys. Start the"
        " server with this origin in `--allowed-origins`.",
        code="origin_not_allowed",
    )


def response_not_found(response_id: str) -> HTTPException:
    """Return the error for a stored response that does not exist, or belongs to another API key."""
    return _CodedHTTPException(
        404,
        f"Response with id {response_id[:80]!r} not found. It was not stored, was deleted, or has been removed to store"
        " newer ones.",
        code="response_not_found",
    )


def item_not_found(item_id: str) -> HTTPException:
    """Return the error for a reference to an item that no stored response of the API key has."""
    return _CodedHTTPException(
        404,
        f"Item with id {item_id[:80]!r} not found. Items are not persisted when `store` is set to false, and are"
        " removed to store newer ones. Send the item itself.",
        code="item_not_found",
        param="input",
    )


def no_websockets() -> HTTPException:
    """Return the error for a WebSocket handshake."""
    return _CodedHTTPException(
        404,
        "This server has no WebSockets. Send a POST request; with `stream`, the response is streamed as server-sent"
        " events.",
        code="websocket_not_supported",
    )


def unsupported_media_type() -> HTTPException:
    return HTTPException(415, "The body must be JSON. Send the header `Content-Type: application/json`.")


async def send_error(request: Request, error: Exception) -> Response:
    """Handle an expected error."""
    if isinstance(error, SetupError):  # only the operator can fix it
        logger.error("Request failed: %s", error.message)
    if isinstance(error, HTTPException) and not isinstance(error, _CodedHTTPException):
        if error.status_code in {404, 405} and request.headers.get("Upgrade", "").lower() == "websocket":
            error = no_websockets()
        elif error.status_code == 404:
            error = _unknown_url(request.app.routes, route_path(request.scope))
    return error_response(error)


async def send_nothing(_request: Request, _error: Exception) -> Response:
    """Handle a disconnected client."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


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
        415: "unsupported_media_type",
        429: "rate_limit_exceeded",
        501: "not_supported",
    }
)


_OTHER_PROTOCOL = "Use an OpenAI client with the base URL /v1, or LiteLLM's proxy, which translates other protocols."

_NEXT_STEPS: Mapping[str, str] = MappingProxyType(
    {
        "/api": _OTHER_PROTOCOL,  # Ollama's
        "/v1/audio": "The models do not support audio.",
        "/v1/completions": "Send messages to /v1/chat/completions; LlamaIndex does so with `is_chat_model=True`.",
        "/v1/conversations": "Conversations are not stored. Use `previous_response_id` of /v1/responses.",
        "/v1/embeddings": "The models generate text. Use another server for embeddings.",
        "/v1/files": "Files are not stored. Send images and videos as URLs or data: URLs.",
        "/v1/images": "The models generate text. Use another server for images.",
        "/v1/messages": _OTHER_PROTOCOL,  # Anthropic's
    }
)
"""What to do instead of requests to other routes of OpenAI's and others' APIs."""


def _type(status: int) -> str:
    return TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def _unknown_url(routes: Iterable[BaseRoute], path: str) -> HTTPException:
    """Return the error for a path that no route matches, with the next step, or a list of the routes."""
    api_routes = [route for route in routes if isinstance(route, APIRoute)]
    steps = [text for known, text in _NEXT_STEPS.items() if path == known or path.startswith(f"{known}/")]
    if any(route.path == f"/v1{path}" for route in api_routes):
        steps = ["The base URL of a client must end with /v1."]
    return HTTPException(404, f"Unknown URL. {steps[0] if steps else _list_routes(api_routes)}")


def _list_routes(routes: Iterable[APIRoute]) -> str:
    names = [
        f"{method} {route.path.replace('{name:path}', '{model}')}"
        for route in routes
        if not route.path.startswith("/page/")
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]
    return f"This server supports {', '.join(names[:-1])} and {names[-1]}."


def _http_error_message(error: HTTPException) -> str:
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "other methods")
        return f"This URL supports {' and '.join(sorted(allowed.split(', ')))} only."
    return error.detail


def status_text(status: int) -> str:
    """Return the reason phrase of a status, for the OpenAPI document."""
    return http.HTTPStatus(status).phrase
