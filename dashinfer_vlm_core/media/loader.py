"""MediaPart -> Media: check the whole request, then get and decode its parts side by side."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from PIL import Image as PILImage

from ..config import EngineConfig
from ..errors import EngineClosed, MediaTooLarge, UnsupportedParameter
from ..protocol import EncodedEmbeddings, MediaPart
from .fetch import ByteBudget, Fetcher, FetchStats
from .image import count_pixels, decode_image
from .python_objects import fingerprint, load_object
from .sampling import VideoSamplingPolicy
from .source import InlineSource, LocalSource, Source, decode, locate, read
from .types import Image, Media, Pixels, StopCheck, Video, VideoReader
from .url_policy import Resolver
from .video import available, check_frames, check_total, decode_video, frame_name, stack_frames

T = TypeVar("T")


class MediaLoader:
    """Gets and decodes the media of requests: the only object here that opens sockets and files for users.

    It may be made anywhere, but belongs to the event loop that first calls `load`.

    Args:
        config: limits and permissions.
        readers: of video files, in any order.
        policy: how the model's videos are sampled, where the configuration does not say.
        resolve: finds the addresses of a host name; the operating system does by default.
    """

    def __init__(
        self,
        config: EngineConfig,
        readers: Sequence[VideoReader],
        *,
        policy: VideoSamplingPolicy | None = None,
        resolve: Resolver | None = None,
    ) -> None:
        self._config = config
        self._policy = (policy or VideoSamplingPolicy()).within(config)
        self._readers = readers
        self._fetcher = Fetcher(config, resolve=resolve)
        self._threads = ThreadPoolExecutor(max(2, os.cpu_count() or 2), thread_name_prefix="dashinfer-vlm-media")
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def stats(self) -> FetchStats:
        return self._fetcher.stats

    def check(self, parts: Sequence[MediaPart]) -> None:
        """Refuse what this server does not take, whichever way it comes; nothing is fetched or decoded.

        Raises:
            MediaTooLarge: more parts of a kind than are allowed in one request.
            UnsupportedParameter: embeddings, and they are not allowed.
        """
        _check_counts(parts, self._config)
        _check_embeddings(parts, self._config)

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
            EngineClosed: the loader was closed before or meanwhile.
        """
        if self._closed:
            raise _closed()
        self.check(parts)
        if not parts:
            return ()
        stop = threading.Event()
        work = asyncio.ensure_future(self._load(parts, then, stop))
        self._running.add(work)
        try:
            await asyncio.wait({work})  # unlike `await work`, tells the caller's cancellation from that by `close`
        finally:
            stop.set()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            self._running.discard(work)
        if work.cancelled():
            raise _closed()
        return work.result()

    async def close(self) -> None:
        """End the requests that run with EngineClosed, and free sockets and threads; what a thread does right now is
        left to end by itself, which a video does within a few frames."""
        self._closed = True
        for work in self._running:
            work.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._fetcher.close()

    async def _load(
        self, parts: Sequence[MediaPart], then: Callable[[Media], T], stop: threading.Event
    ) -> tuple[T, ...]:
        sources = await self._run(self._locate, parts)
        share = asyncio.Semaphore(max(1, self._config.max_fetches // 2))  # the rest is left to other requests
        allowance = ByteBudget(self._config.max_fetched_bytes)
        fetched = {
            source: asyncio.ensure_future(self._get(source, share, allowance))
            for source in dict.fromkeys(chain(*sources))
        }
        made = [self._make(part, found, fetched, then, stop) for part, found in zip(parts, sources, strict=True)]
        return tuple(await _together(made, fetched.values()))

    def _locate(self, parts: Sequence[MediaPart]) -> list[list[Source]]:
        """The sources of each part: one, as many as a video has frames, or none for an object.

        Equal ones are one object: texts of many megabytes are hashed and compared here, in a thread, and nowhere else.
        """
        if any(part.kind == "video" and isinstance(part.url, str) for part in parts):
            available(self._readers)
        known: dict[Source, Source] = {}
        return [
            [known.setdefault(source, source) for source in _sources(part, self._config, self._policy)]
            for part in parts
        ]

    async def _get(self, source: Source, share: asyncio.Semaphore, allowance: ByteBudget) -> bytes:
        if isinstance(source, InlineSource):
            return await self._run(decode, source)
        if isinstance(source, LocalSource):
            return await self._run(read, source)
        async with share:
            return await self._fetcher.get(source.url, kind=source.kind, part=source.path, allowance=allowance)

    async def _make(
        self,
        part: MediaPart,
        sources: Sequence[Source],
        fetched: Mapping[Source, Awaitable[bytes]],
        then: Callable[[Media], T],
        stop: threading.Event,
    ) -> T:
        if isinstance(part.url, tuple):
            await _check_bytes({fetched[source] for source in sources}, part, self._config)
        data = [await fetched[source] for source in sources]

        def check_stop() -> None:
            if stop.is_set():
                raise _closed()

        def work() -> T:
            media = self._decode(part, data, check_stop)
            check_stop()
            if part.uuid is not None:
                media = replace(media, source=_digest(data) if data else fingerprint(media))
            return then(media)

        return await self._run(work)

    def _decode(self, part: MediaPart, data: Sequence[bytes], check_stop: StopCheck) -> Media:
        check_stop()
        if part.content is not None:
            return load_object(part, self._config, self._policy, check_stop)
        if isinstance(part.url, tuple):
            return self._frames(part, data, check_stop)
        if part.kind == "video":
            readers = available(self._readers)
            return decode_video(
                data[0],
                part=part,
                readers=readers,
                config=self._config,
                policy=self._policy,
                check_stop=check_stop,
            )
        image = self._image(data[0], part, part.path)
        return Image(image=image, path=part.path, min_pixels=part.min_pixels, max_pixels=part.max_pixels)

    def _frames(self, part: MediaPart, data: Sequence[bytes], check_stop: StopCheck) -> Video:
        """A clip of a list of pictures, whose headers are read before the first is decoded."""
        limit = self._config.max_decoded_pixels
        frames = [(encoded, frame_name(part, i)) for i, encoded in enumerate(data)]
        pixels = sum(count_pixels(encoded, part=name, max_pixels=limit) for encoded, name in frames)
        check_total(pixels, part=part, config=self._config)

        def decoded() -> Iterator[Pixels]:
            for encoded, name in frames:
                check_stop()
                yield np.asarray(self._image(encoded, part, name))

        return stack_frames(decoded(), len(frames), part, self._policy)

    def _image(self, data: bytes, part: MediaPart, name: str) -> PILImage.Image:
        background = part.background or self._config.rgba_background
        return decode_image(data, part=name, max_pixels=self._config.max_decoded_pixels, background=background)

    async def _run(self, work: Callable[..., T], *arguments: object) -> T:
        """Blocking work in a thread, so that the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def _check_counts(parts: Sequence[MediaPart], config: EngineConfig) -> None:
    for kind, most in asdict(config.limit_mm_per_prompt).items():
        found = [part for part in parts if part.kind == kind]
        if len(found) > most:
            raise MediaTooLarge(
                f"This server takes up to {most} {kind} parts in one request, and this one has {len(found)}.",
                param=found[most].path,
            )


def _sources(part: MediaPart, config: EngineConfig, policy: VideoSamplingPolicy) -> list[Source]:
    if part.url is None:
        return []  # it is there already
    if isinstance(part.url, str):
        return [locate(part.url, kind=part.kind, part=part.path, config=config)]
    check_frames(len(part.url), part=part, policy=policy)
    return [locate(url, kind="image", part=frame_name(part, i), config=config) for i, url in enumerate(part.url)]


async def _check_bytes(frames: Iterable[Awaitable[bytes]], part: MediaPart, config: EngineConfig) -> None:
    """Wait for the frames of a list, and refuse it as soon as those that have come are too large for one video."""
    size = 0
    for frame in asyncio.as_completed(frames):
        size += len(await frame)
        if size > config.video_max_bytes:
            raise MediaTooLarge(
                f"The frames of the video have more than {config.video_max_bytes} bytes; send fewer or smaller ones.",
                param=part.path,
            )


def _check_embeddings(parts: Sequence[MediaPart], config: EngineConfig) -> None:
    for part in parts:
        if isinstance(part.content, EncodedEmbeddings) and not config.enable_mm_embeds:
            raise UnsupportedParameter(
                "This server takes pictures, not embeddings of them: send an `image_url`, or start it with"
                " --enable-mm-embeds.",
                param=part.path,
            )


def _digest(data: Sequence[bytes]) -> bytes:
    """32 bytes for all of the encoded files of a part, each with its length."""
    digest = hashlib.sha256()
    for item in data:
        digest.update(len(item).to_bytes(8, "big") + hashlib.sha256(item).digest())
    return digest.digest()


def _closed() -> EngineClosed:
    return EngineClosed("The engine was closed; start it again, or send the request to another one.")


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
