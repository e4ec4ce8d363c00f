"""Uuids of images and videos: media sent once with a `uuid` need not be sent again.

A uuid is bound to its request's cache salt and to the data that was first sent with it. Different data with the same
uuid is rejected, as is a uuid whose item is not, or no longer, in the cache.
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
from .service import CachedMedia, Processed, VisionLora, VisionService

MAX_VARIANTS = 8
"""Variants of one item, processed with different options, that are cached per uuid."""

_UuidKey: TypeAlias = tuple[str, Kind, str]
_Options: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _CachedItem:
    """One item, processed with one set of options."""

    digest: bytes
    grid: Grid
    tokens: int
    times: tuple[float, ...]
    sampled_fps: float | None
    source_size: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _UuidEntry:
    """The item of one uuid.

    Attributes:
        source: digest of the encoded data.
        items: processed items by the options that limited their pixels and frames.
    """

    source_digest: bytes
    items: LRUCache[_Options, _CachedItem] = field(default_factory=lambda: LRUCache(MAX_VARIANTS))

    def find(self, part: MediaPart) -> _CachedItem | None:
        """Return the item processed with the part's options; options that did not affect it are ignored."""
        variants = (
            self.items.get(options)
            for options in (_sampling_options(part), _frame_options(part), _resize_options(part), _NO_OPTIONS)
        )
        return next((content for content in variants if content), None)


class MediaUuidCache:
    """Maps an engine's media uuids to cached items. Belongs to one event loop.

    Args:
        vision: the service whose cache holds the items.
        limit: maximum number of uuids; the least recently used ones are evicted.
    """

    def __init__(self, vision: VisionService, *, limit: int) -> None:
        self._vision = vision
        self._entries: LRUCache[_UuidKey, _UuidEntry] = LRUCache(limit)

    def get(
        self, parts: Sequence[MediaPart], *, cache_salt: str = "", lora: VisionLora | None = None
    ) -> dict[str, CachedMedia]:
        """Return the cached media of the parts that have only a uuid, by their path in the request.

        Those that were encoded with another adapter are not found.

        Raises:
            InvalidParameter: a uuid is unknown, or its item is no longer cached.
        """
        return {part.path: self._get(part, cache_salt, lora) for part in parts if not part.has_source}

    def bind(self, parts: Sequence[MediaPart], processed: Sequence[Processed], *, cache_salt: str = "") -> None:
        """Bind the uuids of parts to their items.

        Args:
            parts: the parts of one request that have content.
            processed: the processed items, in the same order.
            cache_salt: the request's cache salt.

        Raises:
            InvalidParameter: a uuid is already bound to different data.
        """
        for part, media in zip(parts, processed, strict=True):
            if part.uuid is not None:
                entry = self._bind(part, part.uuid, media.source_digest, cache_salt)
                entry.items[_applied_options(part, media.item)] = _content(media)

    def _bind(self, part: MediaPart, uuid: str, source: bytes, cache_salt: str) -> _UuidEntry:
        key = (cache_salt, part.kind, uuid)
        entry = self._entries.get(key) or _UuidEntry(source_digest=source)
        if entry.source_digest != source:
            raise InvalidParameter(
                f"`{part.path}.uuid` was already sent with different data: use another uuid for this one.",
                param=f"{part.path}.uuid",
                code="uuid_conflict",
            )
        if self._entries.maxsize:
            self._entries[key] = entry
        return entry

    def _get(self, part: MediaPart, cache_salt: str, lora: VisionLora | None) -> CachedMedia:
        entry = self._entries.get((cache_salt, part.kind, part.uuid or ""))
        content = entry.find(part) if entry else None
        visual = None
        if content:
            visual = self._vision.find(content.digest, content.grid, cache_salt=cache_salt, lora=lora)
        if content is None or visual is None:
            raise InvalidParameter(
                f"`{part.path}.uuid` is not cached with these options: send the content with it.",
                param=f"{part.path}.uuid",
                code="uuid_not_cached",
            )
        return CachedMedia(
            visual=visual,
            tokens=content.tokens,
            kind=part.kind,
            path=part.path,
            times=content.times,
            sampled_fps=content.sampled_fps,
            source_size=content.source_size,
        )


def _content(media: Processed) -> _CachedItem:
    item = media.item
    return _CachedItem(
        digest=item.digest,
        grid=item.grid,
        tokens=item.tokens,
        times=item.times,
        sampled_fps=item.sampled_fps,
        source_size=media.source_size,
    )


def _applied_options(part: MediaPart, item: Patches | Embedded) -> _Options:
    """Return the options that affected a part's content: none for embeddings; sampling only for video files."""
    if isinstance(item, Embedded):
        return _NO_OPTIONS
    if part.is_sampled:
        return _sampling_options(part)
    return _frame_options(part) if part.kind == "video" else _resize_options(part)


def _sampling_options(part: MediaPart) -> _Options:
    return ("sampled", part.fps, part.num_frames, *_resize_options(part))


def _frame_options(part: MediaPart) -> _Options:
    return ("frames", part.fps, *_resize_options(part))


def _resize_options(part: MediaPart) -> _Options:
    return ("resized", part.min_pixels, part.max_pixels, part.total_pixels, part.background)


_NO_OPTIONS: _Options = ("none",)
