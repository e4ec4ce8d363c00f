"""`GET /metrics`: Prometheus metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastapi import Request
from fastapi.responses import Response

from ...endpoint import Endpoint

if TYPE_CHECKING:
    from ...server_context import ServerContext


def create_endpoints(server: ServerContext) -> Sequence[Endpoint]:
    async def metrics(request: Request) -> Response:
        # In a thread, because the status of a remote engine takes a request.
        text, content_type = await asyncio.to_thread(server.metrics.text, request.headers.get("accept", ""))
        return Response(text, media_type=content_type)

    return [Endpoint("/metrics", metrics, quiet=True, include_in_schema=False)]
