"""The OpenAPI document: the routes, with the schemas that requests are checked by and answers are made of."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from dashinfer_vlm_core.protocol import ChatRequest, DetokenizeRequest, TokenizeChat, TokenizePrompt
from dashinfer_vlm_core.version import __version__

from .errors import status_text

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.routing import BaseRoute

REF = "#/components/schemas/{model}"
REQUESTS = (ChatRequest, TokenizePrompt, TokenizeChat, DetokenizeRequest)

CHAT_STATUSES = (400, 401, 404, 408, 413, 429, 500, 503, 504)
TOKEN_STATUSES = (400, 401, 404, 408, 413, 429, 500, 501, 503)
PLAIN_STATUSES = (401, 404, 500)


class ErrorObject(BaseModel):
    """What went wrong; `param` names the field of the request."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's error body."""

    error: ErrorObject


def body_of(*models: type[BaseModel]) -> dict[str, Any]:
    """A request body that is one of `models`, for a route that reads it itself."""
    refs = [{"$ref": REF.format(model=model.__name__)} for model in models]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def errors_of(statuses: tuple[int, ...]) -> dict[int | str, dict[str, Any]]:
    """The error answers of a route."""
    return {status: {"model": ErrorBody, "description": status_text(status)} for status in statuses}


def document(app: FastAPI) -> dict[str, Any]:
    """The document of an application, made once."""
    if not app.openapi_schema:
        made = get_openapi(title=app.title, version=__version__, routes=_told(app.routes), description=app.description)
        _, schemas = models_json_schema([(model, "validation") for model in REQUESTS], ref_template=REF)
        made["components"]["schemas"] |= schemas["$defs"]
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}, {}]
        app.openapi_schema = made
    return app.openapi_schema


def _told(routes: Iterable[BaseRoute]) -> list[BaseRoute]:
    """The routes without HEAD, of which the document need not tell: it goes with GET everywhere."""
    told = [copy.copy(route) for route in routes]
    for route in told:
        if isinstance(route, APIRoute) and route.methods:
            route.methods = route.methods - {"HEAD"}
    return told
