"""Part -> bytes: check the whole request, then load its parts concurrently and pass each to its processing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from ..concurrency.fair_slots import FairSlots
from ..concurrency.loop import engine_closed
from ..config import EngineConfig
from ..errors import MediaError, MediaTooLarge, MissingDependency, UnsupportedParameter
from ..protocol import DocumentPart, EncodedEmbeddings, MediaPart
from ..protocol.client import current_client
from .fetch import ByteBudget, Fetcher, FetchStats
from .frame_sampling import VideoSamplingPolicy
from .local_files import LocalSource, read
from .source import InlineSource, Source, decode, locate
from .types import VideoReader
from .url_policy import Resolver
from .video import check_frames, frame_path

T = TypeVar("T")
PartT = TypeVar("PartT", bound=MediaPart | DocumentPart)

ProcessPart: TypeAlias = Callable[[PartT, Sequence[bytes]], Awaitable[T]]
"""Decodes and processes one part. The bytes are one file, one file per frame of a list, or none for a Python object."""


class MediaLoader:
    """Loads the encoded media of requests; the only object here that opens sockets and files for a request.

    It may be created anywhere, but is bound to the event loop on which `load` is first called.

    Args:
        config: limits and permissions.
        readers: video readers; a request with a video file is rejected if there are none.
        policy: the model's video sampling defaults, which the configuration overrides.
        resolve: resolves host names; defaults to the operating system's resolver.
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
        self._policy = (policy or VideoSamplingPolicy()).with_config(config)
        self._readers = readers
        self._fetcher = Fetcher(config, resolve=resolve)
        self._client_threads = max(2, os.cpu_count() or 2)
        threads = self._client_threads + 1  # one client cannot occupy all of them
        self._slots = FairSlots(threads)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="dashinfer-vlm-load-media")
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def stats(self) -> FetchStats:
        return self._fetcher.stats

    def check(self, parts: Sequence[PartT]) -> None:
        """Check the number and types of the parts, without fetching or decoding anything.

        Raises:
            MediaTooLarge: more parts of a kind than are allowed in one request.
            UnsupportedParameter: the request contains embeddings, and they are not enabled.
        """
        for kind, limit in asdict(self._config.limit_mm_per_prompt).items():
            matching = [part for part in parts if part.kind == part.subject == kind]  # pages have their own limit
            if len(matching) > limit:
                raise MediaTooLarge(
                    f"The engine accepts up to {limit} {kind} parts per request, got {len(matching)}. Send fewer.",
                    param=matching[limit].path,
                )
        for part in parts:
            if (
                isinstance(part, MediaPart)
                and isinstance(part.content, EncodedEmbeddings)
                and not self._config.enable_mm_embeds
            ):
                raise UnsupportedParameter(
                    "Embeddings are not enabled. Send an `image_url`, or start the engine with --enable-mm-embeds.",
                    param=part.path,
                )

    async def load(self, parts: Sequence[PartT], process: ProcessPart[PartT, T]) -> tuple[T, ...]:
        """Load the media of one request and return the result of `process` for each part, in the order of `parts`.

        Everything that depends on the request alone is checked before the first byte is fetched. Equal sources are
        fetched once. The first failure, or a cancellation, cancels the rest of the request.

        Args:
            parts: the request's media parts, or its documents.
            process: called with each part as soon as its bytes are loaded; an exception fails the request.

        Raises:
            MediaError: a part is forbidden, too large, unreachable, or not an image or video.
            InvalidParameter: an option of a part does not apply to its media.
            UnsupportedParameter: the request contains embeddings, and they are not enabled.
            MissingDependency: the request has a video file, and no video reader is installed.
            EngineClosed: the loader is closed, or was closed while loading.
        """
        if self._closed:
            raise engine_closed()
        self.check(parts)
        if not parts:
            return ()
        task = asyncio.ensure_future(self._load(parts, process))
        self._running.add(task)
        try:
            await asyncio.wait({task})  # unlike `await task`, distinguishes cancellation by the caller from `close`
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._running.discard(task)
        try:
            if task.cancelled():
                raise engine_closed()
            return task.result()
        finally:
            del task  # its exception refers to this frame: the cycle would keep the media

    async def close(self) -> None:
        """Fail the running requests with EngineClosed, and release sockets and threads."""
        self._closed = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._fetcher.close()

    async def _load(self, parts: Sequence[PartT], process: ProcessPart[PartT, T]) -> tuple[T, ...]:
        sources = await self._run(self._locate, parts)
        slots = asyncio.Semaphore(max(1, self._config.limits.max_fetches // 2))  # leaves slots to other requests
        budget = ByteBudget(self._config.limits.max_fetched_bytes)
        fetched = {
            source: asyncio.ensure_future(self._get(source, slots, budget)) for source in dict.fromkeys(chain(*sources))
        }
        tasks = [
            asyncio.ensure_future(self._load_part(part, part_sources, fetched, process))
            for part, part_sources in zip(parts, sources, strict=True)
        ]
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:
            await _cancel([*tasks, *fetched.values()])
            tasks.clear()  # their exceptions refer to this frame: the cycle would keep the media
            fetched.clear()

    def _locate(self, parts: Sequence[PartT]) -> list[list[Source]]:
        """Return the sources of each part: one, or one per frame of a list, or none for a Python object.

        Equal sources are returned as one object: texts of many megabytes are hashed only here, in a thread.
        """
        if not self._readers and any(part.kind == "video" and isinstance(part.url, str) for part in parts):
            # Clients read this message, and the command would contain the path of the installation.
            raise MissingDependency(
                "No video reader is installed. Send a list of frames, or install the extra `video`: `dashinfer-vlm"
                " doctor` shows the command."
            )
        known: dict[Source, Source] = {}
        sources = [_sources(part, self._config, self._policy) for part in parts]
        return [[known.setdefault(source, source) for source in group] for group in sources]

    async def _get(self, source: Source, slots: asyncio.Semaphore, budget: ByteBudget) -> bytes:
        if isinstance(source, InlineSource):
            return await self._run(decode, source)
        if isinstance(source, LocalSource):
            return await self._run(read, source)
        async with slots:
            return await self._fetcher.get(source.url, kind=source.kind, path=source.path, budget=budget)

    async def _load_part(
        self,
        part: PartT,
        sources: Sequence[Source],
        fetched: Mapping[Source, Awaitable[bytes]],
        process: ProcessPart[PartT, T],
    ) -> T:
        try:
            if isinstance(part, MediaPart) and part.page is not None:
                return await process(part, [part.page.file])
            if isinstance(part, MediaPart) and isinstance(part.url, tuple):
                await _check_bytes({fetched[source] for source in sources}, part, self._config)
            return await process(part, [await fetched[source] for source in sources])
        except MediaError as error:
            error.file = error.file or _file_of(sources, error.param)
            raise

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        """Run blocking work in a thread, without blocking the event loop. Clients with many large media wait for their
        own work only."""
        async with self._slots.slot(current_client.get().id, limit=self._client_threads):
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def _file_of(sources: Sequence[Source], path: str | None) -> Path | None:
    files = (source for source in sources if isinstance(source, LocalSource))
    return next((file.folder / file.name for file in files if len(sources) == 1 or file.path == path), None)


def _sources(part: MediaPart | DocumentPart, config: EngineConfig, policy: VideoSamplingPolicy) -> list[Source]:
    if part.url is None:
        return []  # the part holds a Python object or embeddings, or is a page
    if isinstance(part, DocumentPart):
        return [locate(part.url, kind="image", path=part.path, config=config)]  # the limits of images apply
    if isinstance(part.url, str):
        return [locate(part.url, kind=part.kind, path=part.path, config=config)]
    check_frames(len(part.url), part=part, policy=policy)
    return [locate(url, kind="image", path=frame_path(part, i), config=config) for i, url in enumerate(part.url)]


async def _check_bytes(frames: Iterable[Awaitable[bytes]], part: MediaPart, config: EngineConfig) -> None:
    size = 0
    for frame in asyncio.as_completed(frames):
        size += len(await frame)
        if size > config.video_max_bytes:
            raise MediaTooLarge(
                f"The frames of the video exceed {config.video_max_bytes} bytes in total. Send fewer or smaller ones.",
                param=part.path,
            )


async def _cancel(futures: Sequence[asyncio.Future[Any]]) -> None:
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)
