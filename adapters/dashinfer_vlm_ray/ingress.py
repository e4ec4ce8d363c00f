"""The ingress deployment: the application of the server, whose engine is the replicas."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ray import serve

from dashinfer_vlm_server import create_app

from .engine_replica import log_to_serve
from .ray_engine import RayEngine

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from dashinfer_vlm_server.settings import Settings


@serve.ingress()
class Ingress:
    """A replica of the ingress: an ASGI deployment, whose application is created in `__serve_build_asgi_app__`.

    Args:
        engine: the handle of the engine deployment.
        model: the name of the model, which is known before a replica has loaded it.
        settings: the settings of the application.
    """

    def __init__(self, engine: Any, *, model: str, settings: Settings) -> None:
        log_to_serve()
        self._engine = RayEngine(engine, model=model)
        self._settings = settings
        self._watching: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Create the application on the event loop that will run it."""
        self._watching = asyncio.create_task(self._engine.watch(), name="replica-status")
        app = create_app(self._engine, self._settings, replica_metrics=self._engine.replica_metrics)
        return without_request_id(app)


def without_request_id(app: ASGIApp) -> ASGIApp:
    """Remove the header `X-Request-Id` of responses: Ray Serve's proxy adds it, with the same ID."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [header for header in message["headers"] if header[0].lower() != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_without_id)

    return run
