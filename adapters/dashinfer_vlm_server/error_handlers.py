"""Send errors to clients. For an unknown URL, the response has the next step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute

from dashinfer_vlm_core.errors import DashInferVLMError, InvalidParameter, SetupError
from dashinfer_vlm_core.protocol.validation_errors import show, validation_message

from .endpoint import Endpoint
from .errors import CLIENT_CLOSED_REQUEST, ApiError, error_response

logger: logging.Logger = logging.getLogger(__name__)

_NO_WEBSOCKETS = ApiError(
    404,
    "This server has no WebSockets. Send a POST request; with `stream`, the response is sent as server-sent events.",
    code="websocket_not_supported",
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
"""What to do instead of requests to routes of OpenAI's and others' APIs that no endpoint has."""


async def send_error(request: Request, error: Exception) -> Response:
    """Handle an expected error."""
    if isinstance(error, SetupError):  # only the operator can fix it
        logger.error("Request failed: %s", error.message)
    if isinstance(error, HTTPException) and not isinstance(error, ApiError):
        if error.status_code in {404, 405} and request.headers.get("Upgrade", "").lower() == "websocket":
            error = _NO_WEBSOCKETS
        elif error.status_code == 404:
            path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
            error = _unknown_url(request.app.routes, path)
    return error_response(error)


async def send_validation_error(_request: Request, error: Exception) -> Response:
    """Handle an invalid parameter of the path or the query."""
    assert isinstance(error, RequestValidationError), "it is registered for this class"
    details = error.errors()[0]
    name = str(details["loc"][-1])
    message = f"`{name}` {validation_message(details)}, got {show(details['input'])}."
    return error_response(InvalidParameter(message, param=name))


async def send_nothing(_request: Request, _error: Exception) -> Response:
    """Handle a disconnected client."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


HANDLERS: Mapping[type[Exception], Callable[[Request, Exception], Coroutine[Any, Any, Response]]] = {
    DashInferVLMError: send_error,
    HTTPException: send_error,
    RequestValidationError: send_validation_error,
    ClientDisconnect: send_nothing,
}


def _unknown_url(routes: Iterable[BaseRoute], path: str) -> HTTPException:
    endpoints = [route for route in routes if isinstance(route, Endpoint)]
    paths = {endpoint.path for endpoint in endpoints}
    steps = [text for known, text in _NEXT_STEPS.items() if f"{path}/".startswith(f"{known}/") and known not in paths]
    if f"/v1{path}" in paths:
        steps = ["The base URL of a client must end with /v1."]
    return HTTPException(404, f"Unknown URL. {steps[0] if steps else _list(endpoints)}")


def _list(endpoints: Sequence[Endpoint]) -> str:
    names = [
        f"{endpoint.method} {endpoint.path.replace('{name:path}', '{model}')}"
        for endpoint in endpoints
        if endpoint.listed
    ]
    return f"This server supports {', '.join(names[:-1])} and {names[-1]}."
