"""Sources of a part's bytes: data: URLs in the request, local files, and http(s) URLs."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

import httpx

from ..config import EngineConfig
from ..errors import MediaRefused, MediaTooLarge, MediaUndecodable, MediaUnreachable
from .types import Kind
from .url_policy import check_url

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)
_SPACE = b" \t\r\n"
# Only the percent-escapes that base64 in a URL can need: general unquoting uses a hundred times the text's memory.
_ESCAPES = tuple(
    (b"%" + code, character)
    for codes, character in (("2B 2b", b"+"), ("2F 2f", b"/"), ("3D 3d", b"="), ("0A 0a 0D 0d 20 09", b""))
    for code in codes.encode().split()
)
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


@dataclass(frozen=True, kw_only=True, slots=True)
class InlineSource:
    """A data: URL within the size limit, not decoded yet."""

    url: str = field(repr=False)
    path: str = field(compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSource:
    """A file in the allowed folder; `limit` is in bytes."""

    file: Path
    limit: int
    path: str = field(compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteSource:
    """A URL that passed the checks that need no name resolution."""

    url: httpx.URL
    kind: Kind
    path: str = field(compare=False)


Source: TypeAlias = InlineSource | LocalSource | RemoteSource
"""Sources are equal if they have the same URL or file; the part that uses them does not matter."""


def locate(text: str, *, kind: Kind, path: str, config: EngineConfig) -> Source:
    """Parse a media URL and check it as far as possible without reading the media.

    Raises:
        MediaRefused: a scheme, host, address or folder that is not allowed here.
        MediaTooLarge: a data: URL longer than the limit of its kind.
        MediaUndecodable: a data: URL that is not base64.
    """
    scheme = match.group(1).lower() if (match := _SCHEME.match(text)) else "file"
    limit = config.image_max_bytes if kind == "image" else config.video_max_bytes
    if scheme == "data":
        return _inline(text, limit, path)
    if scheme in ("http", "https"):
        return RemoteSource(url=check_url(text, path=path, config=config), kind=kind, path=path)
    if scheme == "file":
        return LocalSource(file=_allowed_file(text, config.allowed_local_media_path, path), limit=limit, path=path)
    raise MediaRefused("The URL scheme is not supported for media. Send an http:, https: or data: URL.", param=path)


def decode(source: InlineSource) -> bytes:
    """Decode a data: URL (RFC 2397).

    The declared media type is ignored; the format is detected from the bytes.

    Raises:
        MediaUndecodable: the data is not base64.
    """
    return from_base64(source.url.partition(",")[2], path=source.path)


def from_base64(payload: str, *, path: str) -> bytes:
    """Decode base64 text.

    White space, the URL-safe alphabet, percent-escapes and missing padding are accepted, because common encoders write
    them; any other character outside of base64 is an error.

    Raises:
        MediaUndecodable: the text is not base64.
    """
    try:
        raw = payload.encode("ascii")
        for escape, character in _ESCAPES if b"%" in raw else ():
            raw = raw.replace(escape, character)
        raw = raw.translate(_URL_SAFE, delete=_SPACE).rstrip(b"=")
        return base64.b64decode(raw + b"=" * (-len(raw) % 4), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise MediaUndecodable("The data is not valid base64. Encode it again.", param=path) from error


def check_base64(payload: str, *, limit: int, path: str) -> None:
    """Check the size of base64 text without decoding it.

    Raises:
        MediaTooLarge: the data has more than `limit` bytes.
    """
    escaped = sum(payload.count(escape.decode()) for escape, _ in _ESCAPES) if "%" in payload else 0
    characters = len(payload) - 2 * escaped - sum(payload.count(ignored) for ignored in " \t\r\n=")
    if characters * 3 // 4 > limit:
        raise MediaTooLarge(f"The media exceeds {limit} bytes. Send a smaller file.", param=path)


def read(source: LocalSource) -> bytes:
    """Read a local file.

    Raises:
        MediaUnreachable: the path is not a readable regular file.
        MediaTooLarge: the file exceeds the limit.
    """
    try:
        # O_NONBLOCK does not wait for a pipe; O_NOFOLLOW rejects a link that replaced the file after the check.
        handle = os.open(source.file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(handle, "rb") as file:  # noqa: PTH123  a descriptor has no Path
            data = file.read(source.limit + 1) if stat.S_ISREG(os.fstat(handle).st_mode) else None
    except OSError as error:
        raise _missing_file_error(source.path) from error
    if data is None:
        raise _missing_file_error(source.path)
    if len(data) > source.limit:
        raise MediaTooLarge(f"The media exceeds {source.limit} bytes. Send a smaller file.", param=source.path)
    return data


def _inline(text: str, limit: int, path: str) -> InlineSource:
    header, comma, payload = text.partition(",")
    if not comma or not header.lower().rstrip().endswith(";base64"):
        raise MediaUndecodable(
            "The data: URL is not base64. It must have the form `data:image/png;base64,...`.", param=path
        )
    check_base64(payload, limit=limit, path=path)
    return InlineSource(url=text, path=path)


def _allowed_file(text: str, folder: Path | None, path: str) -> Path:
    """Resolve a file: URL or a path to a real path inside the allowed folder, to which relative paths refer.

    Raises:
        MediaRefused: local files are not allowed, or the path is outside the folder.
    """
    if folder is not None:
        try:
            root = folder.resolve()
            file = (root / _path_from_url(text)).resolve()
            if file.is_relative_to(root):
                return file
        except (OSError, ValueError, RuntimeError):  # invalid names and symlink loops
            pass
    raise MediaRefused("Local files are not allowed here. Send a data:, http: or https: URL.", param=path)


def _path_from_url(text: str) -> str:
    if not _SCHEME.match(text):
        return text
    url = urlsplit(text)
    if url.netloc not in ("", "localhost") or url.query or url.fragment:
        raise ValueError("a file: URL must be a path on this machine, without a host, query or fragment")
    return unquote(url.path)


def _missing_file_error(path: str) -> MediaUnreachable:
    return MediaUnreachable("The file does not exist or cannot be read. Check its name.", param=path)
