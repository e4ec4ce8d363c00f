"""Routes of the server: paths with a special treatment, and the route of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.routing import BaseRoute
    from starlette.types import Scope

PUBLIC_ROUTES = frozenset({"/health", "/health/ready"})
"""Paths that require no key, so that process supervisors can check the server."""

GENERATING_ROUTES = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/responses/compact"})
"""Paths whose requests use tokens."""


def find_route(routes: Sequence[BaseRoute], scope: Scope) -> BaseRoute | None:
    """Return the route for the path of a request, whatever its method; None if there is none."""
    from starlette.routing import Match  # not needed to list the command, which works without the extra `server`

    return next((route for route in routes if route.matches(scope)[0] is not Match.NONE), None)


def route_path(scope: Scope) -> str:
    """Return the path that the router uses: without `--root-path`."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))
