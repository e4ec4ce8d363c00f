"""The endpoints of the server. Each package in this folder is served; it is listed nowhere else."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..endpoint import Endpoint
    from ..server_context import ServerContext


def create_endpoints(server: ServerContext) -> list[Endpoint]:
    """Return what `create_endpoints` of each package returns."""
    packages = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return [endpoint for package in packages for endpoint in package.create_endpoints(server)]
