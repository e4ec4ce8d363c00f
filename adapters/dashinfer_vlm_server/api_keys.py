"""API keys, and their file: one key per line, which options can follow.

# comment
sk-alice-1
sk-bob-1  name=bob max_requests=4 tokens_per_minute=100000 media_workers=1
sk-root-1 admin=true
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from dashinfer_vlm_core.config import ENV_PREFIX
from dashinfer_vlm_core.config.folders import warn_if_accessible
from dashinfer_vlm_core.errors import ConfigError

MAX_KEY_LENGTH = 4096

KEYS_VARIABLE = f"{ENV_PREFIX}API_KEYS"

KEY_VARIABLE = f"{ENV_PREFIX}API_KEY"
"""The variable that clients read. The server also uses it, because a server where it is set is not meant to be open."""

MAX_LIMIT = 10**12
"""The largest value of a limit."""

UNLIMITED = "none"
"""The value of a limit that disables it."""

LIMITS = ("max_requests", "tokens_per_minute", "media_workers")
OPTIONS = ("name", *LIMITS, "admin")

_ID_SECRET = os.urandom(32)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_OPTION_NAME = re.compile(r"[a-z_]{1,32}")

FileSignature: TypeAlias = tuple[int, ...]
"""Identifies the content of a file: it differs if the file was changed or replaced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyLimits:
    """Limits of one API key; None for no limit.

    Attributes:
        max_requests: maximum number of concurrent requests.
        tokens_per_minute: maximum number of tokens of prompts and completions per minute.
        media_workers: maximum number of media workers that its requests can occupy.
    """

    max_requests: int | None = None
    tokens_per_minute: int | None = None
    media_workers: int | None = None


_NO_LIMITS = KeyLimits()


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKey:
    """A valid key.

    Attributes:
        digest: its SHA-256 digest.
        name: its name in the log; empty if it has none.
        limits: its limits.
        admin: whether it may load and unload models.
    """

    digest: bytes = field(repr=False)
    name: str = ""
    limits: KeyLimits = _NO_LIMITS
    admin: bool = False

    @classmethod
    def create(cls, key: str, *, name: str = "", limits: KeyLimits = _NO_LIMITS, admin: bool = False) -> ApiKey:
        """Create it from the text of a key. Raises ConfigError if the key cannot be sent in a header."""
        if not key or len(key) > MAX_KEY_LENGTH or not key.isascii() or not key.isprintable() or key != key.strip():
            raise ConfigError(
                f"API keys must have 1 to {MAX_KEY_LENGTH} printable ASCII characters, and no leading or trailing"
                " spaces."
            )
        return cls(digest=_digest(key.encode()), name=name, limits=limits, admin=admin)

    @property
    def id(self) -> str:
        """Identifies it in this process. It is a keyed digest, so that weak keys cannot be guessed from it."""
        return hashlib.blake2b(self.digest, digest_size=16, key=_ID_SECRET).hexdigest()

    def cache_namespace(self, secret: bytes) -> str:
        """Return the cache namespace of the key: without a secret, its id in this process; with one, the same in all
        processes that share the secret."""
        return hmac.digest(secret, b"namespace" + self.digest, "sha256").hex() if secret else self.id


class ApiKeys:
    """API keys, stored as digests only, so that they cannot be printed.

    Args:
        keys: the valid keys; without any, and without a file, authentication is disabled.
        file: the path of a file with more keys.
        limits: the limits of keys without their own.

    Attributes:
        file: the file, if it can be read again.
        signature: the signature of the file when it was read.

    Raises:
        ConfigError: a key cannot be sent in a header, the file cannot be read or contains no key, or a line is invalid.
    """

    def __init__(self, keys: Iterable[str] = (), file: Path | None = None, *, limits: KeyLimits = _NO_LIMITS) -> None:
        self._given = tuple(ApiKey.create(key, limits=limits) for key in keys)
        self._limits = limits
        self._read(file.expanduser() if file else None)

    def reread(self) -> ApiKeys:
        """Return the given keys with the present ones of the file. Raises ConfigError as the constructor does."""
        keys: ApiKeys = copy.copy(self)
        keys._read(self.file)
        return keys

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

    def _read(self, file: Path | None) -> None:
        self.signature = file_signature(file) if file else ()  # first, so that a change in between is noticed
        self.file = file if self.signature else None  # a pipe cannot be read again
        from_file = _read_file(file, self._limits) if file else []
        self._keys = tuple({key.digest: key for key in [*self._given, *from_file]}.values())


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def file_signature(file: Path) -> FileSignature:
    """Return the signature of a file; if it cannot be read, of the error.

    A file that is not regular, such as a pipe, has an empty signature: it can be read once only.
    """
    try:
        found = file.stat()
    except OSError as error:
        return (error.errno or 0,)
    if not stat.S_ISREG(found.st_mode):
        return ()
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev)


def _read_file(file: Path, defaults: KeyLimits) -> list[ApiKey]:
    try:
        text = file.read_text(encoding="utf-8")
        warn_if_accessible(file, "API keys")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--api-key-file: {file} cannot be read: {reason}.") from error
    if not (keys := list(_parse(text, file, defaults))):
        raise ConfigError(f"--api-key-file: {file} contains no key. Write one key per line.")
    return keys


def _parse(text: str, file: Path, defaults: KeyLimits) -> Iterator[ApiKey]:
    seen: dict[bytes, tuple[ApiKey, str]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        location = f"--api-key-file: {file}, line {number}"
        try:
            key = _parse_line(words, defaults)
        except ConfigError as error:
            raise ConfigError(f"{location}: {error.message}") from None
        other, other_location = seen.setdefault(key.digest, (key, location))
        if key != other:
            raise ConfigError(f"{location}: the key is also in {other_location}, with other options. Remove one.")
        yield key


def _parse_line(words: list[str], defaults: KeyLimits) -> ApiKey:
    """Parse the words of one line. Errors contain no text that could be part of a key."""
    key, *options = words
    if key.partition("=")[0] in OPTIONS:
        raise ConfigError("an option without a key. Write the key first.")
    values: dict[str, str] = {}
    for option in options:
        name, separator, value = option.partition("=")
        if not separator:
            raise ConfigError("a key must not contain spaces. Write options as NAME=VALUE after it.")
        if name not in OPTIONS:
            shown = f" {name!r}" if _OPTION_NAME.fullmatch(name) else ""
            raise ConfigError(f"unknown option{shown}. The options are {', '.join(OPTIONS)}.")
        if name in values:
            raise ConfigError(f"`{name}` is given twice. Remove one.")
        values[name] = value
    label = values.pop("name", None)
    if label is not None and not _NAME.fullmatch(label):
        raise ConfigError(f"`name` must have 1 to 64 characters of A-Z a-z 0-9 . _ -, got {label[:64]!r}.")
    admin = values.pop("admin", "false")
    if admin not in {"true", "false"}:
        raise ConfigError(f"`admin` must be true or false, got {admin[:32]!r}.")
    limits = {option: _limit(option, value) for option, value in values.items()}
    return ApiKey.create(key, name=label or "", limits=replace(defaults, **limits), admin=admin == "true")


def _limit(option: str, value: str) -> int | None:
    if value == UNLIMITED:
        return None
    if value.isascii() and value.isdecimal() and len(value) <= len(str(MAX_LIMIT)) and 1 <= int(value) <= MAX_LIMIT:
        return int(value)
    raise ConfigError(f"`{option}` must be a whole number from 1 to {MAX_LIMIT}, or {UNLIMITED}, got {value[:32]!r}.")
