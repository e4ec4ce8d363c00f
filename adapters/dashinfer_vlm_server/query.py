"""Query parameters that an endpoint does not read: each is logged once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from starlette.datastructures import QueryParams

from dashinfer_vlm_core.protocol.name_log import NameLog

if TYPE_CHECKING:
    from fastapi.routing import APIRoute
    from starlette.types import Scope

logger: logging.Logger = logging.getLogger(__name__)

_WITHOUT_EFFECT = frozenset({"api-version", "beta"})
"""What clients of Azure's and Anthropic's APIs add to any URL."""

_LOG = NameLog(
    logger,
    "Requests have unknown query parameters, which are ignored: %s.",
    "Further unknown query parameters are not logged.",
)


def query_names(route: APIRoute) -> frozenset[str]:
    """Return the names of the query parameters that the handler of a route has, all in one pydantic model."""
    parameters = route.dependant.query_params  # codespell:ignore dependant
    kinds = [parameter.field_info.annotation for parameter in parameters]
    return frozenset(name for kind in kinds if kind for name in kind.model_fields)


def log_unknown(scope: Scope, known: frozenset[str]) -> None:
    """Log the query parameters of a request that are not known."""
    if scope["query_string"]:
        _LOG.log(name for name in QueryParams(scope["query_string"]) if name not in known | _WITHOUT_EFFECT)
