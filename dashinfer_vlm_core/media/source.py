"""Where a part's bytes are: in the request itself, on this machine, or in the web."""

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
# Those that base64 in a URL can need, and no others: undoing them in general costs a hundred times the text's memory.
_ESCAPES = tuple(
    (b"%" + code, sign)
    for codes, sign in (("2B 2b", b"+"), ("2F 2f", b"/"), ("3D 3d", b"="), ("0A 0a 0D 0d 20 09", b""))
    for code in codes.encode().split()
)
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


@dataclass(frozen=True, kw_only=True, slots=True)
class InlineSource:
    """A data: URL of an allowed size, not decoded yet."""

    url: str = field(repr=False)
    path: str = field(compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSource:
    """A file under the allowed folder; `limit` in bytes."""

    path: Path
    limit: int
    part: str = field(compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteSource:
    """A URL that may be fetched, as far as its writing tells."""

    url: httpx.URL
    kind: Kind
    path: str = field(compare=False)


Source: TypeAlias = InlineSource | LocalSource | RemoteSource
"""Equal for equal contents to get, whichever part asks."""


def locate(text: str, *, kind: Kind, part: str, config: EngineConfig) -> Source:
    """What a media URL points to, checked as far as possible without reading it.

    Raises:
        MediaRefused: a scheme, host, address or folder that is not allowed here.
        MediaTooLarge: a data: URL longer than the limit of its kind.
        MediaUndecodable: a data: URL that is not base64.
    """
    scheme = match.group(1).lower() if (match := _SCHEME.match(text)) else "file"
    limit = config.image_max_bytes if kind == "image" else config.video_max_bytes
    if scheme == "data":
        return _inline(text, limit, part)
    if scheme in ("http", "https"):
        return RemoteSource(url=check_url(text, part=part, config=config), kind=kind, path=part)
    if scheme == "file":
        return LocalSource(path=_allowed(text, config.allowed_local_media_path, part), limit=limit, part=part)
    raise MediaRefused("Media comes from http:, https: and data: URLs; use one of these.", param=part)


def decode(source: InlineSource) -> bytes:
    """The bytes of a data: URL (RFC 2397).

    Its media type is not looked at: what the bytes are is decided by the bytes.

    Raises:
        MediaUndecodable: it is not base64.
    """
    return from_base64(source.url.partition(",")[2], part=source.path)


def from_base64(payload: str, *, part: str) -> bytes:
    """The bytes of base64 text.

    Line breaks and blanks, the URL-safe alphabet, escapes and missing padding are accepted, because common encoders
    write them; anything else outside of base64 is an error.

    Raises:
        MediaUndecodable: it is not base64.
    """
    try:
        raw = payload.encode("ascii")
        for escape, sign in _ESCAPES if b"%" in raw else ():
            raw = raw.replace(escape, sign)
        raw = raw.translate(_URL_SAFE, delete=_SPACE).rstrip(b"=")
        return base64.b64decode(raw + b"=" * (-len(raw) % 4), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise MediaUndecodable("The data is not valid base64; encode it again.", param=part) from error


def check_base64(payload: str, *, limit: int, part: str) -> None:
    """Refuse base64 text of more than `limit` bytes, without decoding it.

    Raises:
        MediaTooLarge: it is.
    """
    escaped = sum(payload.count(escape.decode()) for escape, _ in _ESCAPES) if "%" in payload else 0
    signs = len(payload) - 2 * escaped - sum(payload.count(sign) for sign in " \t\r\n=")
    if signs * 3 // 4 > limit:
        raise MediaTooLarge(f"The media has more than {limit} bytes; send a smaller one.", param=part)


def read(source: LocalSource) -> bytes:
    """The bytes of a local file.

    Raises:
        MediaUnreachable: there is no regular file that can be read.
        MediaTooLarge: it exceeds the limit.
    """
    try:
        # Not to wait for ever on a pipe; not to follow a link that took the file's place after it was checked.
        handle = os.open(source.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(handle, "rb") as file:  # noqa: PTH123  a descriptor has no Path
            data = file.read(source.limit + 1) if stat.S_ISREG(os.fstat(handle).st_mode) else None
    except OSError as error:
        raise _missing(source.path) from error
    if data is None:
        raise _missing(source.path)
    if len(data) > source.limit:
        raise MediaTooLarge(f"The media has more than {source.limit} bytes; send a smaller one.", param=source.path)
    return data


def _inline(text: str, limit: int, part: str) -> InlineSource:
    header, comma, payload = text.partition(",")
    if not comma or not header.lower().rstrip().endswith(";base64"):
        raise MediaUndecodable("A data: URL has the form `data:image/png;base64,...`.", param=part)
    check_base64(payload, limit=limit, part=part)
    return InlineSource(url=text, path=part)


def _allowed(text: str, folder: Path | None, part: str) -> Path:
    """The real path of a file: URL or a path (relative ones start at the allowed folder), if it is inside that
    folder."""
    if folder is not None:
        try:
            root = folder.resolve()
            path = (root / _path(text)).resolve()
            if path.is_relative_to(root):
                return path
        except (OSError, ValueError, RuntimeError):  # unusable names, and loops of links
            pass
    raise MediaRefused("Local files are not served here; send a data:, http: or https: URL.", param=part)


def _path(text: str) -> str:
    if not _SCHEME.match(text):
        return text
    url = urlsplit(text)
    if url.netloc not in ("", "localhost") or url.query or url.fragment:
        raise ValueError("a file: URL is a path of this machine and nothing else")
    return unquote(url.path)


def _missing(part: str) -> MediaUnreachable:
    return MediaUnreachable("There is no such file among those that may be read; check its name.", param=part)
