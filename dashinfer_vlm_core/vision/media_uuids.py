"""Uuids of images and videos: media sent once with a `uuid` need not be sent again, nor a page be rendered again.

A uuid is bound to its request's cache salt and to the data that was first sent with it. Different data with the same
uuid is rejected, as is a uuid whose item is not, or no longer, in the cache.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from cachetools import LRUCache

from ..errors import InvalidParameter
from ..media.types import Embeddings, Kind, VisualInput
from ..models.interface import Patches, VisualTokens
from ..protocol import MediaPart
from .service import VisionLora, VisionService

MAX_VARIANTS = 8
"""Variants of one item, processed with different options, that are cached per uuid."""

_UuidKey: TypeAlias = tuple[str, Kind, str]
_Options: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _UuidEntry:
    """The item of one uuid.

    Attributes:
        source_digest: digest of the encoded data.
        items: without their values, by the options that limited their pixels and frames.
    """

    source_digest: bytes
    items: LRUCache[_Options, VisualInput] = field(default_factory=lambda: LRUCache(MAX_VARIANTS))


class MediaUuidCache:
    """Maps an engine's media uuids to cached items. Belongs to one event loop.

    Args:
        vision: the service whose cache holds the items.
        limit: maximum number of uuids, and of pages; the least recently used ones are evicted.
    """

    def __init__(self, vision: VisionService, *, limit: int) -> None:
        self._vision = vision
        self._entries: LRUCache[_UuidKey, _UuidEntry] = LRUCache(limit)
        self._pages: LRUCache[Hashable, VisualInput] = LRUCache(limit)

    async def get(
        self, parts: Sequence[MediaPart], *, cache_salt: str = "", lora: VisionLora | None = None
    ) -> list[VisualTokens | None]:
        """Return the visual tokens of each part that has only a uuid, or is a page that is cached; None for others.

        Those that were encoded with another adapter are not found.

        Raises:
            InvalidParameter: a uuid is unknown, or its item is no longer cached.
        """
        return [await (self._get_page if part.has_source else self._get)(part, cache_salt, lora) for part in parts]

    def bind(self, parts: Sequence[MediaPart], items: Sequence[Patches | Embeddings], *, cache_salt: str = "") -> None:
        """Bind the uuids of parts, and pages, to their items.

        Args:
            parts: the parts of one request that have content.
            items: their patches or embeddings, in the same order.
            cache_salt: the request's cache salt.

        Raises:
            InvalidParameter: a uuid is already bound to different data.
        """
        for part, item in zip(parts, items, strict=True):
            if part.uuid is not None:
                entry = self._bind(part, part.uuid, item.source_digest, cache_salt)
                entry.items[_applied_options(part, item)] = VisualInput(**item.shared_fields())
            if part.page is not None and self._pages.maxsize:
                self._pages[_page_key(part, cache_salt)] = VisualInput(**item.shared_fields())

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

    async def _get(self, part: MediaPart, cache_salt: str, lora: VisionLora | None) -> VisualTokens:
        entry = self._entries.get((cache_salt, part.kind, part.uuid or ""))
        # Options that did not affect the item are ignored.
        item = next(filter(None, map(entry.items.get, _options(part))), None) if entry else None
        tokens = await self._vision.find(item, cache_salt=cache_salt, lora=lora) if item else None
        if tokens is None:
            raise InvalidParameter(
                f"`{part.path}.uuid` is not cached with these options: send the content with it.",
                param=f"{part.path}.uuid",
                code="uuid_not_cached",
            )
        return replace(tokens, path=part.path)

    async def _get_page(self, part: MediaPart, cache_salt: str, lora: VisionLora | None) -> VisualTokens | None:
        item = self._pages.get(_page_key(part, cache_salt)) if part.page else None
        tokens = await self._vision.find(item, cache_salt=cache_salt, lora=lora) if item else None
        return tokens and replace(tokens, path=part.path)


def _page_key(part: MediaPart, cache_salt: str) -> Hashable:
    assert part.page is not None
    return (cache_salt, part.page.file_digest, part.page.number, part.page.size, part.min_pixels, part.max_pixels)


def _applied_options(part: MediaPart, item: VisualInput) -> _Options:
    sampled, frames, resized, none = _options(part)
    if isinstance(item, Embeddings):
        return none
    if part.is_sampled:
        return sampled
    return frames if part.kind == "video" else resized


def _options(part: MediaPart) -> tuple[_Options, _Options, _Options, _Options]:
    """Return the options of a part if it is a video file, a list of frames, an image, or embeddings."""
    resized = (part.min_pixels, part.max_pixels, part.total_pixels, part.background, part.pruning_rate or 0.0)
    return (
        ("sampled", part.fps, part.num_frames, bool(part.align), part.min_change, *resized),
        ("frames", part.fps, bool(part.align), part.min_change, *resized),
        ("resized", *resized),
        ("none",),
    )
