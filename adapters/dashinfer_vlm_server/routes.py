"""Paths of the server with a special treatment."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope

PUBLIC_ROUTES = frozenset({"/health", "/health/ready"})
"""Paths that require no key, so that process supervisors can check the server."""

GENERATING_ROUTES = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/responses/compact"})
"""Paths whose requests use tokens."""


def route_path(scope: Scope) -> str:
    """Return the path that the router uses: without `--root-path`."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))
