"""The endpoints of the server. Each package in this folder is served; it is listed nowhere else.

Those of a package with a `PROTOCOL` are served if `--protocols` names it.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from dashinfer_vlm_core.errors import ConfigError

from ..endpoint import Endpoint, WebSocketEndpoint
from ..errors import ApiError

if TYPE_CHECKING:
    from fastapi.responses import Response

    from ..server_context import ServerContext


def create_endpoints(server: ServerContext) -> list[Endpoint | WebSocketEndpoint]:
    """Return what `create_endpoints` of each package returns.

    Raises:
        ConfigError: `--protocols` has an unknown name.
    """
    packages = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    protocols = {package: getattr(package, "PROTOCOL", "") for package in packages}
    known = sorted({*protocols.values()} - {""})
    enabled = server.settings.protocols or known
    for name in enabled:
        if name not in known:
            raise ConfigError(f"--protocols: {name[:80]!r} is unknown. Choose from {', '.join(known)}.")
    routes: list[Endpoint | WebSocketEndpoint] = []
    for package, protocol in protocols.items():
        for endpoint in package.create_endpoints(server):
            if protocol in {"", *enabled}:
                routes.append(endpoint)
            elif isinstance(endpoint, Endpoint):
                routes.append(_disabled(endpoint, protocol))
    return routes


def _disabled(endpoint: Endpoint, protocol: str) -> Endpoint:
    async def reject() -> Response:
        raise ApiError(
            404,
            f"The protocol {protocol!r} is disabled on this server. Start it with --protocols {protocol}.",
            code="protocol_disabled",
        )

    return Endpoint(
        endpoint.path,
        reject,
        method=endpoint.method,
        error_body=endpoint.error_body,
        x_api_key=endpoint.x_api_key,
        include_in_schema=False,
    )
