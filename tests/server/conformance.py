"""Valid and invalid requests made by schemathesis, which takes long to import, and checks of their responses."""

from __future__ import annotations

import schemathesis
import schemathesis.openapi.loaders
import schemathesis.specs.openapi.schemas
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

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
)
FEW = settings(
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def check_operation(url: str, path: str, method: str, mode: str) -> None:
    """Send requests to a route and check their responses. `mode` is `positive` for valid ones, or `negative`."""
    operation = schemathesis.openapi.from_url(f"{url}/openapi.json")[path][method]

    # An invalid request has several mistakes, and takes five times as long to make.
    @settings(FEW, max_examples=10 if mode == "positive" else 5)
    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def check(case):
        case.call_and_validate(checks=list(CHECKS))

    check()
