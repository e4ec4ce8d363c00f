"""`GET /openapi.json`: the endpoints, with the schemas of requests and responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from pydantic.json_schema import models_json_schema

from dashinfer_vlm_core import __version__

from ...endpoint import REF, Endpoint

if TYPE_CHECKING:
    from ...server_context import ServerContext


def create_endpoints(_server: ServerContext) -> Sequence[Endpoint]:
    return [Endpoint("/openapi.json", show, include_in_schema=False)]


async def show(request: Request) -> Response:
    return JSONResponse(document(request.app))


def document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of an application, which is created once."""
    if not app.openapi_schema:
        endpoints = [route for route in app.routes if isinstance(route, Endpoint)]
        routes = [endpoint.documented() for endpoint in endpoints]
        schema = get_openapi(title=app.title, version=__version__, routes=routes, description=app.description)
        for operation in (each for path in schema["paths"].values() for each in path.values()):
            operation["responses"].pop("422", None)  # FastAPI's; the server's status is 400
        models = dict.fromkeys(model for endpoint in endpoints for model in endpoint.body_models)
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        _, schemas = models_json_schema([(model, "validation") for model in models], ref_template=REF)
        schema["components"]["schemas"] |= schemas["$defs"]
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}, {}]
        app.openapi_schema = schema
    return app.openapi_schema
