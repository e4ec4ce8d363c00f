"""The OpenAPI document matches the server: schemathesis sends valid and invalid requests."""

from __future__ import annotations

import importlib

import pytest

from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_server import create_app
from dashinfer_vlm_server.endpoints.openapi import document
from tests.server.conftest import serving


@pytest.fixture(scope="module")
def conformance():
    """The module with the checks.

    pytest rewrites the assertions of schemathesis when it is imported. This must happen before a server thread runs:
    CPython 3.11 can fail with "AST constructor recursion depth mismatch" if threads switch during parsing.
    """
    return importlib.import_module("tests.server.conformance")


@pytest.fixture(scope="module")
def server(conformance, tiny_checkpoint):
    options = {"served_model_name": "tiny", "allow_remote_media": False}
    with scripted_engine("Fine.", model=str(tiny_checkpoint), **options) as engine, serving(engine) as server:
        yield server


ROUTES = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/v1/messages", "POST"),
    ("/v1/messages/count_tokens", "POST"),
    ("/v1/ocr", "POST"),
    ("/api/chat", "POST"),
    ("/api/generate", "POST"),
    ("/api/embed", "POST"),
    ("/api/embeddings", "POST"),
    ("/api/tags", "GET"),
    ("/api/ps", "GET"),
    ("/api/show", "POST"),
    ("/api/version", "GET"),
    ("/api/pull", "POST"),
    ("/api/create", "POST"),
    ("/api/copy", "POST"),
    ("/api/push", "POST"),
    ("/api/delete", "DELETE"),
    ("/v1/responses", "POST"),
    ("/v1/responses/compact", "POST"),
    ("/v1/responses/input_tokens", "POST"),
    ("/v1/responses/{response_id}", "DELETE"),
    ("/v1/responses/{response_id}", "GET"),
    ("/v1/responses/{response_id}/cancel", "POST"),
    ("/v1/responses/{response_id}/input_items", "GET"),
    ("/v1/embeddings", "POST"),
    ("/v1/rerank", "POST"),
    ("/v2/rerank", "POST"),
    ("/rerank", "POST"),
    ("/v1/score", "POST"),
    ("/score", "POST"),
    ("/pooling", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/load", "POST"),
    ("/v1/models/unload", "POST"),
    ("/v1/models/{name}", "GET"),
    ("/v1/media/preview", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/health", "GET"),
    ("/health/ready", "GET"),
    ("/version", "GET"),
]
ALIASES = ("/v2/rerank", "/rerank", "/score")
"""Further URLs of a handler."""
WITHOUT_BODY = ("/cancel", "/api/create", "/api/copy", "/api/push")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "method", "mode"),
    [
        (path, method, mode)
        for path, method in ROUTES
        if path not in ALIASES
        for mode in ("positive", "negative")
        if (method == "POST" and not path.endswith(WITHOUT_BODY)) or mode == "positive"
    ],
)
def test_responses_conform_to_the_openapi_document(conformance, server, path, method, mode):
    conformance.check_operation(server.url, path, method, mode)


def test_openapi_document_lists_every_route(tiny_checkpoint):
    app = create_app(scripted_engine("Fine.", model=str(tiny_checkpoint)))
    documented = document(app)
    omitted = {"/", "/page/{name}", "/metrics", "/openapi.json"}
    served = {getattr(route, "path", "").replace(":path", "") for route in app.routes}
    assert set(documented["paths"]) == served - omitted
    assert sorted(ROUTES) == sorted(
        (path, method.upper()) for path, methods in documented["paths"].items() for method in methods
    )
    schema = documented["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/ChatRequest"}
    assert {"messages", "temperature", "tools"} < set(documented["components"]["schemas"]["ChatRequest"]["properties"])
    operations = [each for path in documented["paths"].values() for each in path.values()]
    assert all("422" not in operation["responses"] for operation in operations)
    assert "HTTPValidationError" not in documented["components"]["schemas"]
