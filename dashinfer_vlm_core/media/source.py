"""Sources of a part's bytes: data: URLs in the request, local files, and http(s) URLs."""

from __future__ import annotations

import base64
import binascii
import io
import re
from dataclasses import dataclass, field
from typing import TypeAlias

import httpx

from ..config import EngineConfig
from ..errors import MediaRefused, MediaTooLarge, MediaUndecodable
from .local_files import LocalSource, find_file
from .types import Kind
from .url_policy import check_url

SLICE = 256 * 1024
"""Number of base64 characters that one call decodes: it holds the global interpreter lock for about a millisecond."""

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]{0,31}):", re.IGNORECASE)
# Only the percent-escapes that base64 in a URL can need: general unquoting uses a hundred times the text's memory.
_ESCAPES = tuple(
    ("%" + code, character)
    for codes, character in (("2B 2b", "+"), ("2F 2f", "/"), ("3D 3d", "="), ("0A 0a 0D 0d 20 09", ""))
    for code in codes.split()
)
_STANDARD = str.maketrans("-_", "+/", " \t\r\n")
"""Converts the URL-safe alphabet, and removes white space."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InlineSource:
    """A data: URL within the size limit, not decoded yet.

    Attributes:
        url: the whole URL.
        start: the index at which its base64 text starts.
        path: the path of the part in the request.
    """

    url: str = field(repr=False)
    start: int
    path: str = field(compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteSource:
    """A URL that passed the checks that need no name resolution."""

    url: httpx.URL
    kind: Kind
    path: str = field(compare=False)


Source: TypeAlias = InlineSource | LocalSource | RemoteSource
"""Sources are equal if they have the same path or URL; the part that uses them does not matter."""


def locate(text: str, *, kind: Kind, path: str, config: EngineConfig) -> Source:
    """Parse a media URL and check it as far as possible without reading the media.

    Raises:
        MediaRefused: a scheme, host, address or folder that is not allowed here.
        MediaTooLarge: a data: URL longer than the limit of its kind.
        MediaUndecodable: a data: URL that is not base64.
        MediaUnreachable: a path that is too long.
    """
    scheme = match.group(1).lower() if (match := _SCHEME.match(text)) else "file"
    limit = config.image_max_bytes if kind == "image" else config.video_max_bytes
    if scheme == "data":
        return _inline(text, limit, path)
    if scheme in ("http", "https"):
        return RemoteSource(url=check_url(text, path=path, config=config), kind=kind, path=path)
    if scheme == "file":
        return find_file(text, config.allowed_local_media_path, limit=limit, path=path)
    raise MediaRefused("The URL scheme is not supported for media. Send an http:, https: or data: URL.", param=path)


def decode(source: InlineSource) -> bytes:
    """Decode a data: URL (RFC 2397).

    The declared media type is ignored; the format is detected from the bytes.

    Raises:
        MediaUndecodable: the data is not base64.
    """
    return from_base64(source.url, source.start, path=source.path)


def from_base64(text: str, start: int = 0, *, path: str) -> bytes:
    """Decode the base64 text from index `start` on.

    White space, the URL-safe alphabet, percent-escapes and missing padding are accepted, because common encoders write
    them; any other character outside of base64 is an error.

    Args:
        text: contains the base64 text.
        start: where it starts.
        path: the path of the part in the request.

    Raises:
        MediaUndecodable: the text is not base64.
    """
    try:
        try:
            return _decode(text, start)
        except binascii.Error:
            return _decode(_normalize(text[start:]), 0)
    except ValueError as error:
        raise MediaUndecodable("The data is not valid base64. Encode it again.", param=path) from error


def check_base64(text: str, start: int = 0, *, limit: int, path: str) -> None:
    """Check the size of the base64 text from index `start` on without decoding it.

    Raises:
        MediaTooLarge: the data has more than `limit` bytes.
    """
    characters = len(text) - start
    if characters * 3 // 4 <= limit:
        return
    escaped = sum(text.count(escape, start) for escape, _ in _ESCAPES)
    ignored = sum(text.count(character, start) for character in " \t\r\n=")
    if (characters - 2 * escaped - ignored) * 3 // 4 > limit:
        raise MediaTooLarge(f"The media exceeds {limit} bytes. Send a smaller file.", param=path)


def _inline(text: str, limit: int, path: str) -> InlineSource:
    start = text.find(",") + 1
    if not text[:start].removesuffix(",").rstrip().lower().endswith(";base64"):
        raise MediaUndecodable(
            "The data: URL is not base64. It must have the form `data:image/png;base64,...`.", param=path
        )
    check_base64(text, start, limit=limit, path=path)
    return InlineSource(url=text, start=start, path=path)


def _decode(text: str, start: int) -> bytes:
    if text.find("=", start, len(text) - 2) >= 0:
        raise binascii.Error("padding before the end")
    data = io.BytesIO()  # grows by moving its pages, and returns its content without a copy
    for position in range(start, len(text), SLICE):
        data.write(base64.b64decode(text[position : position + SLICE], validate=True))
    return data.getvalue()


def _normalize(text: str) -> str:
    for escape, character in _ESCAPES if "%" in text else ():
        text = text.replace(escape, character)
    text = text.translate(_STANDARD).rstrip("=")
    return text + "=" * (-len(text) % 4)
