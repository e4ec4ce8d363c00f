"""API keys, and their digests and limits."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dashinfer_vlm_core.config import ENV_PREFIX
from dashinfer_vlm_core.errors import ConfigError

from .api_key_file import FileSignature, KeyLimits, file_signature, read_entries

MAX_KEY_LENGTH = 4096

KEYS_VARIABLE = f"{ENV_PREFIX}API_KEYS"

KEY_VARIABLE = f"{ENV_PREFIX}API_KEY"
"""The variable that clients read. The server also uses it, because a server where it is set is not meant to be open."""

_ID_SECRET = os.urandom(32)
_NO_LIMITS = KeyLimits()


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKey:
    """A valid key.

    Attributes:
        digest: its SHA-256 digest.
        id: identifies it in this process. It is a keyed digest, so that weak keys cannot be guessed from it.
        name: its name in the log; empty if it has none.
        limits: its limits.
    """

    digest: bytes = field(repr=False)
    id: str
    name: str = ""
    limits: KeyLimits = _NO_LIMITS

    @classmethod
    def create(cls, key: str, *, name: str = "", limits: KeyLimits = _NO_LIMITS, location: str = "") -> ApiKey:
        """Create it from the text of a key.

        Raises:
            ConfigError: the key cannot be sent in a header; `location` is where it is from.
        """
        digest = _digest(_validated(key, location).encode())
        return cls(digest=digest, id=_client_id(digest), name=name, limits=limits)

    def __reduce__(self) -> tuple[Callable[..., ApiKey], tuple[object, ...]]:
        """Pickle the key without its `id`, which the other process computes with its own secret."""
        return _from_digest, (self.digest, self.name, self.limits)

    def cache_namespace(self, secret: bytes) -> str:
        """Return the cache namespace of the key: without a secret, its id in this process; with one, the same in all
        processes that share the secret."""
        return hmac.digest(secret, b"namespace" + self.digest, "sha256").hex() if secret else self.id


class ApiKeys:
    """API keys, stored as digests only, so that they cannot be printed.

    Args:
        keys: the valid keys; without any, authentication is disabled.
        limits: the limits of each key.

    Attributes:
        file: the file with more keys, if it can be read again; None if there is none.
        signature: the signature of the file when it was read.

    Raises:
        ConfigError: a key cannot be sent in a header.
    """

    def __init__(self, keys: Iterable[str] = (), *, limits: KeyLimits = _NO_LIMITS) -> None:
        self._given = tuple(ApiKey.create(key, limits=limits) for key in keys)
        self._limits = limits
        self._keys = _unique(self._given)
        self.file: Path | None = None
        self.signature: FileSignature = ()

    @classmethod
    def read(cls, given: Iterable[str], file: Path | None, *, limits: KeyLimits = _NO_LIMITS) -> ApiKeys:
        """Combine given keys with those in a file; `api_key_file` describes its format.

        Args:
            given: keys that are not in the file.
            file: the path of the file.
            limits: the limits of keys without their own.

        Raises:
            ConfigError: the file cannot be read or contains no key, or a line or a key is invalid.
        """
        keys = cls(given, limits=limits)
        return keys._with_file(file.expanduser()) if file else keys

    def reread(self) -> ApiKeys:
        """Return the given keys with the present ones of the file. Raises ConfigError as `read` does."""
        return self._with_file(self.file) if self.file else self

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(key.id for key in self._keys)

    def find(self, authorization: bytes) -> ApiKey | None:
        """Return the valid key of an Authorization header, in constant time for values of the same length."""
        scheme, _, key = authorization.partition(b" ")
        digest = _digest(key.strip())
        matches = [known for known in self._keys if hmac.compare_digest(digest, known.digest)]  # no early exit
        return matches[0] if matches and scheme.lower() == b"bearer" else None

    def _with_file(self, file: Path) -> ApiKeys:
        keys = ApiKeys(limits=self._limits)
        keys._given = self._given
        keys.signature = file_signature(file)  # before the file is read, so that a change in between is noticed
        entries = read_entries(file, self._limits)
        from_file = [
            ApiKey.create(entry.key, name=entry.name, limits=entry.limits, location=entry.location) for entry in entries
        ]
        keys._keys = _unique([*self._given, *from_file])
        keys.file = file if keys.signature else None  # a pipe cannot be read again
        return keys


def _from_digest(digest: bytes, name: str, limits: KeyLimits) -> ApiKey:
    return ApiKey(digest=digest, id=_client_id(digest), name=name, limits=limits)


def _unique(keys: Iterable[ApiKey]) -> tuple[ApiKey, ...]:
    return tuple({key.digest: key for key in keys}.values())


def _validated(key: str, location: str) -> str:
    if not key or len(key) > MAX_KEY_LENGTH or not key.isascii() or not key.isprintable() or key != key.strip():
        raise ConfigError(
            f"{location}{': ' if location else ''}API keys must have 1 to {MAX_KEY_LENGTH} printable ASCII characters,"
            " and no leading or trailing spaces."
        )
    return key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _client_id(digest: bytes) -> str:
    return hashlib.blake2b(digest, digest_size=16, key=_ID_SECRET).hexdigest()
