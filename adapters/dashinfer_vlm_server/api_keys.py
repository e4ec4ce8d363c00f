"""Authentication with API keys."""

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

PUBLIC_ROUTES = frozenset({"/health", "/health/ready"})
"""Paths that require no key, so that process supervisors can check the server."""

MAX_KEY_LENGTH = 4096

KEYS_VARIABLE = f"{ENV_PREFIX}API_KEYS"

KEY_VARIABLE = f"{ENV_PREFIX}API_KEY"
"""The variable that clients read. The server also uses it, because a server where it is set is not meant to be open."""


class ApiKeys:
    """API keys, stored as digests only, so that they cannot be printed.

    Args:
        keys: the valid keys; without any, authentication is disabled.

    Raises:
        ConfigError: a key cannot be sent in a header.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple({_digest(_validated(key).encode()) for key in keys})

    @classmethod
    def read(cls, given: Iterable[str], file: Path | None) -> ApiKeys:
        """Combine given keys with those in a file, one per line. Blank lines and lines that start with # are ignored.

        Raises:
            ConfigError: the file cannot be read or contains no key, or a key is invalid.
        """
        return cls([*given, *(_read_keys(file) if file else ())])

    def __len__(self) -> int:
        return len(self._digests)

    def is_valid(self, authorization: bytes) -> bool:
        """Return whether an Authorization header has a valid key, in constant time for values of the same length."""
        scheme, _, key = authorization.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # no early exit
        return scheme.lower() == b"bearer" and any(matches)


class ApiKeyMiddleware:
    """ASGI middleware that responds with 401 to requests without a valid key, except on public routes.

    It compares the path that the router uses, which headers cannot change.
    """

    def __init__(self, app: ASGIApp, *, keys: ApiKeys, public_routes: frozenset[str] = PUBLIC_ROUTES) -> None:
        self._app = app
        self._keys = keys
        self._public_routes = public_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_authorized(scope):
            await self._app(scope, receive, send)
            return
        from .errors import error_response, unauthorized

        await error_response(unauthorized())(scope, receive, send)

    def _is_authorized(self, scope: Scope) -> bool:
        path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
        if not len(self._keys) or path in self._public_routes:
            return True
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(values) == 1 and self._keys.is_valid(values[0])


def _read_keys(file: Path) -> list[str]:
    try:
        lines = [line.strip() for line in file.expanduser().read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--api-key-file: {file} cannot be read: {reason}.") from error
    if not (keys := [line for line in lines if line and not line.startswith("#")]):
        raise ConfigError(f"--api-key-file: {file} contains no key. Write one key per line.")
    return keys


def _validated(key: str) -> str:
    if not key or len(key) > MAX_KEY_LENGTH or not key.isascii() or not key.isprintable() or key != key.strip():
        raise ConfigError(
            f"API keys must have 1 to {MAX_KEY_LENGTH} printable ASCII characters, and no leading or trailing spaces."
        )
    return key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
