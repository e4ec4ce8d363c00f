"""MediaPart -> Media: check the whole request, then get and decode its parts side by side."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, TypeVar

from ..config import EngineConfig
from ..errors import InvalidParameter, MediaTooLarge, UnsupportedParameter
from ..schema import MediaPart
from .address import Resolver, system_resolver
from .fetch import Fetcher
from .image import count_pixels, decode_picture
from .source import Inline, Local, Source, decode, locate, read
from .types import Clip, Media, Picture, Pixels, VideoReader
from .video import available, check_total, decode_clip, frame_name, stack_frames

T = TypeVar("T")


class MediaLoader:
    """Gets and decodes the media of requests: the only object here that opens sockets and files for users.

    It may be made anywhere, but belongs to the event loop that first calls `load`.

    Args:
        config: limits and permissions.
        readers: of video files, in any order.
        resolve: finds the addresses of a host name.
    """

    def __init__(
        self, config: EngineConfig, readers: Sequence[VideoReader], *, resolve: Resolver = system_resolver
    ) -> None:
        self._config = config
        self._readers = readers
        self._fetcher = Fetcher(config, resolve=resolve)
        self._threads = ThreadPoolExecutor(max(2, os.cpu_count() or 2), thread_name_prefix="dashinfer-vlm-media")

    async def load(self, parts: Sequence[MediaPart], then: Callable[[Media], T]) -> tuple[T, ...]:
        """What `then` makes of the decoded media of one request, in the order of `parts`.

        Everything that can be told from the request alone is checked before the first byte is fetched. Equal sources
        are fetched once. Each item is decoded and handed to `then` by one thread, so that no more items are held at
        full size than there are threads. The first failure, or a cancellation, cancels whatever of the request is still
        under way.

        Args:
            parts: of the request.
            then: called in a thread; what it raises fails the request.

        Raises:
            MediaError: a part is refused, too large, out of reach, or no picture or video.
            InvalidParameter, UnsupportedParameter: an option of a part does not fit its media.
            MissingDependency: a video file, and no reader for it is installed.
        """
        if not parts:
            return ()
        sources = await self._run(self._locate, parts)
        fetched = {source: asyncio.ensure_future(self._get(source)) for source in dict.fromkeys(chain(*sources))}
        made = [self._make(part, found, fetched, then) for part, found in zip(parts, sources, strict=True)]
        return tuple(await _together(made, fetched.values()))

    async def close(self) -> None:
        """Free sockets and threads; decoding that runs is left to end by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._fetcher.close()

    def _locate(self, parts: Sequence[MediaPart]) -> list[list[Source]]:
        """The sources of each part: one, or as many as a video has frames."""
        _check_counts(parts, self._config)
        if any(part.kind == "video" and isinstance(part.url, str) for part in parts):
            available(self._readers)
        return [_sources(part, self._config) for part in parts]

    async def _get(self, source: Source) -> bytes:
        if isinstance(source, Inline):
            return await self._run(decode, source)
        if isinstance(source, Local):
            return await self._run(read, source)
        return await self._fetcher.get(source.url, kind=source.kind, part=source.part)

    async def _make(
        self,
        part: MediaPart,
        sources: Sequence[Source],
        fetched: Mapping[Source, Awaitable[bytes]],
        then: Callable[[Media], T],
    ) -> T:
        data = [await fetched[source] for source in sources]
        return await self._run(lambda: then(self._decode(part, data)))

    def _decode(self, part: MediaPart, data: Sequence[bytes]) -> Media:
        if isinstance(part.url, tuple):
            return self._frames(part, data)
        if part.kind == "video":
            return decode_clip(data[0], part=part, readers=available(self._readers), config=self._config)
        pixels = self._pixels(data[0], part.part)
        return Picture(pixels=pixels, part=part.part, min_pixels=part.min_pixels, max_pixels=part.max_pixels)

    def _frames(self, part: MediaPart, data: Sequence[bytes]) -> Clip:
        """A clip of a list of pictures, whose headers are read before the first is decoded."""
        limit = self._config.max_decoded_pixels
        names = [frame_name(part, i) for i in range(len(data))]
        pixels = [count_pixels(frame, part=name, max_pixels=limit) for frame, name in zip(data, names, strict=True)]
        check_total(sum(pixels), part=part, config=self._config)
        return stack_frames([self._pixels(frame, name) for frame, name in zip(data, names, strict=True)], part)

    def _pixels(self, data: bytes, part: str) -> Pixels:
        return decode_picture(
            data, part=part, max_pixels=self._config.max_decoded_pixels, background=self._config.rgba_background
        )

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        """Blocking work in a thread, so that the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def _check_counts(parts: Sequence[MediaPart], config: EngineConfig) -> None:
    for kind, most in (("image", config.max_pictures), ("video", config.max_videos)):
        found = [part for part in parts if part.kind == kind]
        if len(found) > most:
            raise MediaTooLarge(
                f"This server takes up to {most} {kind} parts in one request, and this one has {len(found)}.",
                param=found[most].part,
            )


def _sources(part: MediaPart, config: EngineConfig) -> list[Source]:
    if isinstance(part.url, str):
        return [locate(part.url, kind=part.kind, part=part.part, config=config)]
    if part.num_frames is not None:
        raise UnsupportedParameter(
            "num_frames samples a video file; a list of frames is taken whole, so send the frames you want.",
            param=f"{part.part}.video_url.num_frames",
        )
    if not 0 < len(part.url) <= config.video_max_frames:
        raise InvalidParameter(
            f"A video is a list of 1 to {config.video_max_frames} frames, and this one has {len(part.url)}.",
            param=f"{part.part}.video_url.url",
        )
    return [locate(url, kind="image", part=frame_name(part, i), config=config) for i, url in enumerate(part.url)]


async def _together(work: Iterable[Awaitable[T]], helpers: Iterable[asyncio.Future[Any]] = ()) -> list[T]:
    """All results in order; on a failure or a cancellation nothing of `work` and `helpers` is left running."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        unfinished: list[asyncio.Future[Any]] = [*tasks, *helpers]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
