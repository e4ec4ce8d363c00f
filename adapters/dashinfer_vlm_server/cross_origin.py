"""Protection of a server without API keys from web pages in a user's browser.

A page can send requests to any address that the browser reaches, such as the loopback address. Three checks prevent
that such a request has an effect, or that the page reads the response:

* `Host`: in DNS rebinding, a name of the attacker resolves to the address of the server, so that the browser treats
  the server as part of the attacker's site. Therefore, only names that are known to be the server's are accepted. An IP
  address is accepted because it cannot be rebound. The server cannot list its addresses: clients may use one that a
  router or a container runtime forwards.
* `Origin`: browsers send it with every request that is not a plain GET of the same site, and with the handshake of a
  WebSocket, whose messages need no permission. Other clients do not.
* `Content-Type`: a browser sends `application/json` to another origin only if a preflight request allows it.

With API keys, none of this is necessary, because a page does not know them.
"""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from .endpoint import Endpoint
from .errors import ApiError, error_response
from .request_context import get_request_context
from .sockets import ANY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import ASGIApp, Receive, Scope, Send

_SHOWN_CHARACTERS = 100
"""How much of a header's value an error message repeats."""

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\[\]:@/\s]+)(?P<port>:[0-9]*)?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class CrossOriginMiddleware:
    """ASGI middleware that rejects requests of foreign web pages with 403, and bodies that are not JSON with 415.

    Args:
        app: the wrapped application.
        allowed_hosts: host names in lowercase that clients may use, in addition to loopback names and IP addresses:
            `name`, `*.domain` for its subdomains, or `*` for all.
        allowed_origins: origins whose pages may send requests, in addition to the server's own; `*` for all.
    """

    def __init__(self, app: ASGIApp, *, allowed_hosts: Iterable[str], allowed_origins: Iterable[str]) -> None:
        self._app = app
        self._allowed_hosts = frozenset(allowed_hosts)
        self._allowed_origins = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope) if scope["type"] in {"http", "websocket"} else None
        if error is None:
            await self._app(scope, receive, send)
            return
        await error_response(error, get_request_context(scope).endpoint)(scope, receive, send)

    def _error(self, scope: Scope) -> HTTPException | None:
        endpoint = get_request_context(scope).endpoint
        headers = Headers(scope=scope)
        host = _header(headers, "host")
        if not self._is_host_exempt(scope, endpoint) and not self._is_host_allowed(host):
            return _foreign_host(host[:_SHOWN_CHARACTERS])
        for origin in headers.getlist("origin"):
            if not self._is_origin_allowed(origin, host):
                return _foreign_origin(origin[:_SHOWN_CHARACTERS])
        reads_body = endpoint and scope.get("method", "GET") not in {"GET", "HEAD", "OPTIONS"}
        if reads_body and _has_body(headers) and not _is_json(headers):
            return HTTPException(415, "The body must be JSON. Send the header `Content-Type: application/json`.")
        return None

    def _is_host_exempt(self, scope: Scope, endpoint: Endpoint | None) -> bool:
        """Return whether any host is accepted: clients of Unix sockets send arbitrary ones, and probes use any name."""
        if ANY in self._allowed_hosts or (endpoint and endpoint.any_host):
            return True
        server = scope.get("server")
        return server is not None and server[1] is None  # a Unix socket (ASGI specification, "server")

    def _is_host_allowed(self, host: str) -> bool:
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = match["name"].removesuffix(".")
        return (
            name == "localhost"
            or name.endswith(".localhost")  # RFC 6761: always a loopback address
            or _is_address(name)
            or name in self._allowed_hosts
            or any(name.endswith(host[1:]) for host in self._allowed_hosts if host.startswith("*."))
        )

    def _is_origin_allowed(self, origin: str, host: str) -> bool:
        """Return whether an origin is allowed or the server's own. The scheme is not compared: a proxy may add TLS."""
        if ANY in self._allowed_origins or origin in self._allowed_origins:
            return True
        scheme, separator, authority = origin.lower().partition("://")
        if not separator or scheme not in _DEFAULT_PORTS:
            return False
        port = _DEFAULT_PORTS[scheme]
        return authority.removesuffix(port) == host.lower().removesuffix(port)


def _foreign_host(host: str) -> ApiError:
    return ApiError(
        403,
        f"The host name {host!r} is not allowed on a server without API keys. Use the server's IP address, or start"
        " the server with this name in `--allowed-hosts`.",
        code="host_not_allowed",
    )


def _foreign_origin(origin: str) -> ApiError:
    return ApiError(
        403,
        f"Web pages of the origin {origin!r} are not allowed to send requests to a server without API keys. Start the"
        " server with this origin in `--allowed-origins`.",
        code="origin_not_allowed",
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") else name)
    except ValueError:
        return False
    return True


def _header(headers: Headers, name: str) -> str:
    values = headers.getlist(name)
    return values[0] if len(values) == 1 else ""


def _has_body(headers: Headers) -> bool:
    return any(length.strip() != "0" for length in headers.getlist("content-length")) or "transfer-encoding" in headers


def _is_json(headers: Headers) -> bool:
    return _header(headers, "content-type").partition(";")[0].strip().lower() == "application/json"
