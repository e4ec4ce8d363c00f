"""Callers' names for pictures and videos: what was sent once under a `uuid` need not be sent again.

A name belongs to the salt that it came with, and to the content that it first came with: another content under the same
name is refused, as is a name whose content is not in the cache (any more).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from cachetools import LRUCache

from ..errors import InvalidParameter
from ..media.types import Kind
from ..models.interface import Embedded, Grid, Patches
from ..protocol import MediaPart
from .service import CachedMedia, Processed, VisionService

MAX_CUTS = 8
"""Ways of cutting one content that are remembered under its name."""

_Name: TypeAlias = tuple[str, Kind, str]
_Options: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Content:
    """One content, cut as some options say."""

    digest: bytes
    grid: Grid
    tokens: int
    times: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _UuidEntry:
    """What a name stands for.

    Attributes:
        source: digest of what it was decoded from.
        cuts: by the options that bound its pixels and frames.
    """

    source: bytes
    items: LRUCache[_Options, _Content] = field(default_factory=lambda: LRUCache(MAX_CUTS))

    def find(self, part: MediaPart) -> _Content | None:
        """What came before with these options; those that its content did not heed do not count."""
        found = (self.items.get(options) for options in (_sampled(part), _resized(part), _AS_IT_IS))
        return next((content for content in found if content), None)


class MediaUuidCache:
    """The names of one engine; used on one event loop.

    Args:
        vision: where the contents are cached.
        limit: most names; those least recently used are forgotten.
    """

    def __init__(self, vision: VisionService, *, limit: int) -> None:
        self._vision = vision
        self._bound: LRUCache[_Name, _UuidEntry] = LRUCache(limit)

    def get(self, parts: Sequence[MediaPart], *, cache_salt: str = "") -> dict[str, CachedMedia]:
        """The parts that come by name alone, by their place in the request.

        Raises:
            InvalidParameter: a name is not known, or its content is not cached any more.
        """
        return {part.path: self._get(part, cache_salt) for part in parts if not part.given}

    def bind(self, parts: Sequence[MediaPart], processed: Sequence[Processed], *, cache_salt: str = "") -> None:
        """Remember the parts that came with a name.

        Args:
            parts: those of one request that came along.
            processed: what became of them, in the same order.
            salt: of the request.

        Raises:
            InvalidParameter: a name belongs to another content already.
        """
        for part, (item, source) in zip(parts, processed, strict=True):
            if part.uuid is not None:
                self._bind(part, part.uuid, source, cache_salt).items[_cut(part, item)] = _content(item)

    def _bind(self, part: MediaPart, uuid: str, source: bytes, cache_salt: str) -> _UuidEntry:
        name = (cache_salt, part.kind, uuid)
        bound = self._bound.get(name) or _UuidEntry(source=source)
        if bound.source != source:
            raise InvalidParameter(
                f"`{part.path}.uuid` was sent with another content before: give this one a name of its own.",
                param=f"{part.path}.uuid",
                code="uuid_conflict",
            )
        if self._bound.maxsize:
            self._bound[name] = bound
        return bound

    def _get(self, part: MediaPart, cache_salt: str) -> CachedMedia:
        bound = self._bound.get((cache_salt, part.kind, part.uuid or ""))
        content = bound.find(part) if bound else None
        visual = self._vision.find(content.digest, content.grid, cache_salt=cache_salt) if content else None
        if content is None or visual is None:
            raise InvalidParameter(
                f"`{part.path}.uuid` names nothing that is cached here with these options: send it along.",
                param=f"{part.path}.uuid",
                code="uuid_not_cached",
            )
        return CachedMedia(visual=visual, tokens=content.tokens, kind=part.kind, path=part.path, times=content.times)


def _content(item: Patches | Embedded) -> _Content:
    return _Content(digest=item.digest, grid=item.grid, tokens=item.tokens, times=item.times)


def _cut(part: MediaPart, item: Patches | Embedded) -> _Options:
    """The options that shaped what became of a part: embeddings heed none, and only video files are sampled."""
    if isinstance(item, Embedded):
        return _AS_IT_IS
    return _sampled(part) if part.kind == "video" and isinstance(part.url, str) else _resized(part)


def _sampled(part: MediaPart) -> _Options:
    return ("sampled", part.fps, part.num_frames, *_resized(part))


def _resized(part: MediaPart) -> _Options:
    return ("resized", part.min_pixels, part.max_pixels, part.total_pixels, part.background)


_AS_IT_IS: _Options = ("as it is",)
