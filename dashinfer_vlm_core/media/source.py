"""Sources of a part's bytes: data: URLs in the request, local files, and http(s) URLs."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Generator, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import httpx

from ..config import EngineConfig
from ..errors import MediaRefused, MediaTooLarge, MediaUndecodable
from ..protocol.text_slices import (
    SLICE,
    count_occurrences,
    digest_text,
    end_without_spaces,
    find_character,
    split_into_slices,
)
from .local_files import LocalSource, find_file
from .types import Kind
from .url_policy import check_url

MAX_KEY_CHARS = 1024 * 1024
"""Maximum length of a data: URL that is compared as text, in less than a millisecond."""

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)
_SPACE = b" \t\r\n"
# Only the percent-escapes that base64 in a URL can need: general unquoting uses a hundred times the text's memory.
_ESCAPES = tuple(f"%{code}" for code in ["2B", "2b", "2F", "2f", "3D", "3d", "0A", "0a", "0D", "0d", "20", "09"])
_ESCAPE = re.compile(b"%(2B|2F|3D|0A|0D|20|09)", re.IGNORECASE)
_BASE64 = ";base64"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InlineSource:
    """A data: URL within the size limit, not decoded yet.

    It is equal only to itself, because comparing texts of many megabytes holds the global interpreter lock; see `key`.

    Attributes:
        url: the whole URL.
        start: the index at which its base64 text starts.
        path: the path of the part in the request.
    """

    url: str = field(repr=False)
    start: int
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteSource:
    """A URL that passed the checks that need no name resolution."""

    url: httpx.URL
    kind: Kind
    path: str = field(compare=False)


Source: TypeAlias = InlineSource | LocalSource | RemoteSource
"""Files and remote URLs are equal if they have the same path or URL; the part that uses them does not matter."""


def locate(text: str, *, kind: Kind, path: str, config: EngineConfig) -> Source:
    """Parse a media URL and check it as far as possible without reading the media.

    Raises:
        MediaRefused: a scheme, host, address or folder that is not allowed here.
        MediaTooLarge: a data: URL longer than the limit of its kind.
        MediaUndecodable: a data: URL that is not base64.
        MediaUnreachable: a path that is too long.
    """
    scheme = match.group(1).lower() if (match := _SCHEME.match(text, 0, SLICE)) else "file"
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


def key(source: Source) -> Hashable:
    """Return a value that is equal for sources with the same URL or file."""
    if not isinstance(source, InlineSource):
        return source
    return source.url if len(source.url) <= MAX_KEY_CHARS else digest_text(source.url)


def from_base64(text: str, start: int = 0, *, path: str, slice_chars: int = SLICE) -> bytes:
    """Decode the base64 text from index `start` on.

    White space, the URL-safe alphabet, percent-escapes and missing padding are accepted, because common encoders write
    them; any other character outside of base64 is an error.

    Args:
        text: contains the base64 text.
        start: where it starts.
        path: the path of the part in the request.
        slice_chars: the size of a step, at least 1.

    Raises:
        MediaUndecodable: the text is not base64.
    """
    pieces = (piece.encode("ascii") for piece in split_into_slices(text, start, slice_chars=slice_chars))
    if find_character(text, "%", start, slice_chars=slice_chars) >= 0:
        pieces = _unescape(pieces)
    data = io.BytesIO()  # grows by moving its pages, and returns its content without a copy
    try:
        for quads in _split_into_quads(pieces):
            data.write(base64.b64decode(quads, validate=True))
    except (binascii.Error, UnicodeEncodeError) as error:
        raise MediaUndecodable("The data is not valid base64. Encode it again.", param=path) from error
    return data.getvalue()


def check_base64(text: str, start: int = 0, *, limit: int, path: str, slice_chars: int = SLICE) -> None:
    """Check the size of the base64 text from index `start` on, without decoding it.

    Raises:
        MediaTooLarge: the data has more than `limit` bytes.
    """

    def count(pattern: str) -> int:
        return count_occurrences(text, pattern, start, slice_chars=slice_chars)

    has_escapes = find_character(text, "%", start, slice_chars=slice_chars) >= 0
    escaped = sum(map(count, _ESCAPES)) if has_escapes else 0
    characters = len(text) - start - 2 * escaped - sum(map(count, " \t\r\n="))
    if characters * 3 // 4 > limit:
        raise MediaTooLarge(f"The media exceeds {limit} bytes. Send a smaller file.", param=path)


def _inline(text: str, limit: int, path: str) -> InlineSource:
    comma = find_character(text, ",")
    if comma < 0 or not _declares_base64(text, comma):
        raise MediaUndecodable(
            "The data: URL is not base64. It must have the form `data:image/png;base64,...`.", param=path
        )
    check_base64(text, comma + 1, limit=limit, path=path)
    return InlineSource(url=text, start=comma + 1, path=path)


def _declares_base64(text: str, end: int) -> bool:
    end = end_without_spaces(text, end)
    return text[max(0, end - len(_BASE64)) : end].lower() == _BASE64


def _unescape(pieces: Iterable[bytes]) -> Generator[bytes, None, None]:
    """Replace percent-escapes; the beginning of one at the end of a piece is left to the next piece."""
    rest = b""
    for piece in pieces:
        text = rest + piece
        begun = text.find(b"%", max(0, len(text) - 2))
        end = len(text) if begun < 0 else begun
        rest = text[end:]
        yield _ESCAPE.sub(_unescape_character, text[:end])
    yield rest


def _unescape_character(escape: re.Match[bytes]) -> bytes:
    return bytes.fromhex(escape[1].decode())


def _split_into_quads(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield base64 text in pieces of 4 n bytes, in the standard alphabet, without white space, and padded.

    Raises:
        binascii.Error: there is padding before the end.
    """
    rest = b""
    is_padded = False
    for piece in pieces:
        characters = piece.translate(_URL_SAFE, delete=_SPACE)
        unpadded = characters.rstrip(b"=")
        if b"=" in unpadded or (is_padded and unpadded):
            raise binascii.Error("padding before the end")
        is_padded = is_padded or len(unpadded) < len(characters)
        rest += unpadded
        end = len(rest) - len(rest) % 4
        yield rest[:end]
        rest = rest[end:]
    if rest:
        yield rest + b"=" * (-len(rest) % 4)
