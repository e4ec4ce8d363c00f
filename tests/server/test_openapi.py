"""The OpenAPI document says what the server does: schemathesis asks what it allows, and what it does not."""

from __future__ import annotations

import pytest
import schemathesis
import schemathesis.openapi.loaders
import schemathesis.specs.openapi.schemas  # not first in a test: see below
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_server import create_app, openapi
from dashinfer_vlm_server.page import FILES
from tests.server.conftest import serving

# pytest parses what it imports of schemathesis. That has to be done before a server's thread runs: CPython 3.11 can
# fail with "AST constructor recursion depth mismatch" if threads change meanwhile.
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
)
FEW = settings(
    max_examples=30,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def server(tiny_checkpoint):
    options = {"served_model_name": "tiny", "allow_remote_media": False}
    with scripted_engine("Fine.", model=str(tiny_checkpoint), **options) as engine, serving(engine) as server:
        yield server


ROUTES = {
    "/v1/chat/completions": "POST",
    "/v1/models": "GET",
    "/v1/models/{name}": "GET",
    "/v1/media/preview": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/health": "GET",
    "/health/ready": "GET",
    "/version": "GET",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "method", "mode"),
    [
        (path, method, mode)
        for path, method in ROUTES.items()
        for mode in GenerationMode
        if method == "POST" or mode is GenerationMode.POSITIVE  # without a body, nothing of a request can be wrong
    ],
)
def test_every_answer_is_one_that_the_document_names(server, path, method, mode):
    """`mode` says whether requests are those that the document allows, or others."""
    operation = schemathesis.openapi.from_url(f"{server.url}/openapi.json")[path][method]

    @FEW
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        case.call_and_validate(checks=list(CHECKS))

    check()


def test_every_route_is_in_the_document(tiny_checkpoint):
    app = create_app(scripted_engine("Fine.", model=str(tiny_checkpoint)))
    told = openapi.document(app)
    left_out = {"/metrics", "/openapi.json", *FILES}
    served = {getattr(route, "path", "").replace(":path", "") for route in app.routes}
    assert set(told["paths"]) == set(ROUTES) == served - left_out
    assert {path: [method.upper() for method in told["paths"][path]] for path in ROUTES} == {
        path: [method] for path, method in ROUTES.items()
    }
    schema = told["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/ChatRequest"}
    assert {"messages", "temperature", "tools"} < set(told["components"]["schemas"]["ChatRequest"]["properties"])
