"""The file of API keys: one key per line, which options can follow.

# comment
sk-alice-1
sk-bob-1  name=bob max_requests=4 tokens_per_minute=100000 media_workers=1
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from dashinfer_vlm_core.config.folders import warn_if_accessible
from dashinfer_vlm_core.errors import ConfigError

MAX_LIMIT = 10**12
"""The largest value of a limit."""

UNLIMITED = "none"
"""The value of a limit that disables it."""

LIMITS = ("max_requests", "tokens_per_minute", "media_workers")
OPTIONS = ("name", *LIMITS)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyEntry:
    """One line of a key file.

    Attributes:
        key: the key; not in `repr`.
        name: the name in the log; empty if there is none.
        limits: its limits.
        location: the file and the line, for errors.
    """

    key: str
    name: str
    limits: KeyLimits
    location: str

    def __repr__(self) -> str:
        return f"KeyEntry({self.location})"


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


def read_entries(file: Path, defaults: KeyLimits) -> list[KeyEntry]:
    """Read a key file. Blank lines and lines that start with # are ignored.

    Args:
        file: the path of the file.
        defaults: the limits of keys without their own.

    Raises:
        ConfigError: the file cannot be read or contains no key, or a line is invalid.
    """
    try:
        text = file.read_text(encoding="utf-8")
        warn_if_accessible(file, "API keys")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--api-key-file: {file} cannot be read: {reason}.") from error
    if not (entries := list(_parse(text, file, defaults))):
        raise ConfigError(f"--api-key-file: {file} contains no key. Write one key per line.")
    return entries


def _parse(text: str, file: Path, defaults: KeyLimits) -> Iterator[KeyEntry]:
    seen: dict[str, KeyEntry] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        location = f"--api-key-file: {file}, line {number}"
        entry = _parse_line(words, defaults, location)
        if (other := seen.setdefault(entry.key, entry)) != replace(entry, location=other.location):
            raise ConfigError(f"{location}: the key is also in {other.location}, with other options. Remove one.")
        yield entry


def _parse_line(words: list[str], defaults: KeyLimits, location: str) -> KeyEntry:
    """Parse the words of one line. Errors contain no text that could be part of a key."""
    key, *options = words
    if key.partition("=")[0] in OPTIONS:
        raise ConfigError(f"{location}: an option without a key. Write the key first.")
    values: dict[str, str] = {}
    for option in options:
        name, separator, value = option.partition("=")
        if not separator:
            raise ConfigError(f"{location}: a key must not contain spaces. Write options as NAME=VALUE after it.")
        if name not in OPTIONS:
            shown = f" {name!r}" if _OPTION_NAME.fullmatch(name) else ""
            raise ConfigError(f"{location}: unknown option{shown}. The options are {', '.join(OPTIONS)}.")
        if name in values:
            raise ConfigError(f"{location}: `{name}` is given twice. Remove one.")
        values[name] = value
    label = values.pop("name", None)
    if label is not None and not _NAME.fullmatch(label):
        raise ConfigError(f"{location}: `name` must have 1 to 64 characters of A-Z a-z 0-9 . _ -, got {label[:64]!r}.")
    limits = {option: _limit(option, value, location) for option, value in values.items()}
    return KeyEntry(key=key, name=label or "", limits=replace(defaults, **limits), location=location)


def _limit(option: str, value: str, location: str) -> int | None:
    if value == UNLIMITED:
        return None
    if value.isascii() and value.isdecimal() and len(value) <= len(str(MAX_LIMIT)) and 1 <= int(value) <= MAX_LIMIT:
        return int(value)
    raise ConfigError(
        f"{location}: `{option}` must be a whole number from 1 to {MAX_LIMIT}, or {UNLIMITED}, got {value[:32]!r}."
    )
