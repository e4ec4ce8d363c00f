"""API keys: who may ask."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dashinfer_vlm_core.config import ENV_PREFIX
from dashinfer_vlm_core.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_ROUTES = frozenset({"/health", "/health/ready"})
"""Paths that need no key: whoever watches over the process may have none."""

LONGEST_KEY = 4096

KEYS_VARIABLE = f"{ENV_PREFIX}API_KEYS"

KEY_VARIABLE = f"{ENV_PREFIX}API_KEY"
"""What clients read: a server that finds it set alone is not meant to be open."""


class ApiKeys:
    """Keys of which only digests are kept, so that nothing can print them.

    Args:
        keys: any of which opens; without any, everything is open.

    Raises:
        ConfigError: one that no header can carry.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple({_digest(_checked(key).encode()) for key in keys})

    @classmethod
    def read(cls, given: Iterable[str], file: Path | None) -> ApiKeys:
        """The keys that were given, and those of a file: one a line, between blank lines and lines that begin with #.

        Raises:
            ConfigError: the file cannot be read or holds none, or a key cannot be used.
        """
        return cls([*given, *(_lines(file) if file else ())])

    def __len__(self) -> int:
        return len(self._digests)

    def open(self, authorization: bytes) -> bool:
        """Whether the value of an Authorization header opens; takes as long for every value of one length."""
        scheme, _, key = authorization.partition(b" ")
        digest = _digest(key.strip())
        found = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, whichever fits
        return scheme.lower() == b"bearer" and any(found)


class ApiKeyMiddleware:
    """ASGI middleware: what has no key gets 401, unless its path is in `OPEN_ROUTES`.

    Paths are those that the router goes by: no header has a say in it.
    """

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, open_routes: frozenset[str] = OPEN_ROUTES) -> None:
        self._app = app
        self._keys = keys
        self._open_routes = open_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._lets_in(scope):
            await self._app(scope, receive, send)
            return
        from .errors import error_response, unauthorized

        await error_response(unauthorized())(scope, receive, send)

    def _lets_in(self, scope: Scope) -> bool:
        path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
        if not len(self._keys) or path in self._open_routes:
            return True
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(values) == 1 and self._keys.open(values[0])


def _lines(file: Path) -> list[str]:
    try:
        lines = [line.strip() for line in file.expanduser().read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"--api-key-file: {file} cannot be read: {reason}.") from error
    if not (keys := [line for line in lines if line and not line.startswith("#")]):
        raise ConfigError(f"--api-key-file: {file} holds no key: write one a line.")
    return keys


def _checked(key: str) -> str:
    if not key or len(key) > LONGEST_KEY or not key.isascii() or not key.isprintable() or key != key.strip():
        raise ConfigError("An API key is printable ASCII text without blanks around it, and not empty.")
    return key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
