"""The OpenAPI document: the routes, with the schemas of requests and responses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from dashinfer_vlm_core import __version__
from dashinfer_vlm_core.protocol import ChatRequest, DetokenizeRequest, TokenizeChat, TokenizePrompt
from dashinfer_vlm_core.protocol.responses import CompactRequest, ResponsesRequest

from .errors import status_text

if TYPE_CHECKING:
    from fastapi import FastAPI

REF = "#/components/schemas/{model}"
REQUESTS = (ChatRequest, ResponsesRequest, CompactRequest, TokenizePrompt, TokenizeChat, DetokenizeRequest)

CHAT_STATUSES = (400, 401, 403, 404, 408, 413, 415, 429, 500, 501, 503, 504)
TOKEN_STATUSES = (400, 401, 403, 404, 408, 413, 415, 429, 500, 501, 503, 504)
PLAIN_STATUSES = (401, 403, 404, 500)
RESPONSE_STATUSES = (400, 401, 403, 404, 415, 429, 500)

RESPONSE_OBJECT: dict[int | str, dict[str, Any]] = {
    200: {"description": "A response object", "content": {"application/json": {"schema": {"type": "object"}}}}
}
"""The description of OpenAI's response object. Its schema has hundreds of types and would take long to build."""


class ErrorObject(BaseModel):
    """An error; `param` names the field of the request that caused it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's error body."""

    error: ErrorObject


def request_body(*models: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a body that matches one of `models`, for a route that reads it itself."""
    refs = [{"$ref": REF.format(model=model.__name__)} for model in models]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def error_responses(statuses: tuple[int, ...]) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of a route's error responses."""
    return {status: {"model": ErrorBody, "description": status_text(status)} for status in statuses}


class DocumentedRoute(APIRoute):
    """A route that supports HEAD if it supports GET (RFC 9110, 9.1); the HTTP server omits the body.

    Attributes:
        documented: creates the route of the OpenAPI document, without HEAD and with the models of its responses.
            FastAPI builds a validator for each of them. That would take most of the time of creating an application,
            and no response is validated.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        responses: dict[int | str, dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path, endpoint, **options)
        self.documented: Callable[[], APIRoute] = partial(APIRoute, path, endpoint, responses=responses, **options)
        if self.methods and "GET" in self.methods:
            self.methods.add("HEAD")


def document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an application, which is created once."""
    if not app.openapi_schema:
        routes = [route.documented() if isinstance(route, DocumentedRoute) else route for route in app.routes]
        schema = get_openapi(title=app.title, version=__version__, routes=routes, description=app.description)
        _, schemas = models_json_schema([(model, "validation") for model in REQUESTS], ref_template=REF)
        schema["components"]["schemas"] |= schemas["$defs"]
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}, {}]
        app.openapi_schema = schema
    return app.openapi_schema
