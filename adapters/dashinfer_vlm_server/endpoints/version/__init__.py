"""`GET /version`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastapi.responses import Response
from pydantic import BaseModel

from dashinfer_vlm_core import __version__

from ...endpoint import PLAIN_STATUSES, Endpoint, json_response

if TYPE_CHECKING:
    from ...server_context import ServerContext


class Version(BaseModel):
    """The version of this package."""

    version: str


def create_endpoints(_server: ServerContext) -> Sequence[Endpoint]:
    return [Endpoint("/version", version, response=Version, errors=PLAIN_STATUSES)]


async def version() -> Response:
    return json_response(Version(version=__version__))
