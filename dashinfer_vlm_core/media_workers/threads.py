"""Process media in threads of this process: Python objects always, encoded media only without media workers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from ..concurrency.abandoned_threads import MEDIA_THREADS
from ..errors import EngineClosed, UnsupportedParameter
from ..media.decoder import MediaDecoder, digest_files
from ..media.documents import Document
from ..media.python_objects import digest_media
from ..media.types import NO_TOKENS, Embeddings, Image, Media, TokenCount, Video
from ..models.interface import ImageProcessor, Patches
from ..models.patches import frames_shape, least_tokens, reduced, validate_embeddings
from ..models.spec import ModelSpec
from ..protocol import DocumentPart, MediaPart


class TokenBudget:
    """Counts the visual tokens of one request while several threads process its media.

    Args:
        check: called with the sum; raises if it exceeds the limit.
        limit: the largest sum that `check` accepts.
        tokens: the initial sum, from items that need no processing.
    """

    def __init__(self, check: Callable[[TokenCount], None], limit: TokenCount, tokens: TokenCount = NO_TOKENS) -> None:
        self._check = check
        self._limit = limit
        self._tokens = tokens
        self._lock = threading.Lock()

    @property
    def remaining(self) -> TokenCount:
        """How many tokens can be added; below 0 if too many were."""
        return self._limit - self._tokens

    def check(self, tokens: TokenCount) -> None:
        """Raise if `tokens` cannot be added."""
        self._check(self._tokens + tokens)

    def add(self, tokens: TokenCount) -> None:
        with self._lock:
            self._tokens += tokens
            self._check(self._tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaWorkerStats:
    """Counters of media workers; zeros without them.

    Attributes:
        busy: workers that process an item.
        waiting: items that wait for a worker.
        started: workers started.
        timed_out: workers killed because an item took too long.
        crashed: workers that ended unexpectedly.
        canceled: workers killed because their request was canceled.
    """

    busy: int = 0
    waiting: int = 0
    started: int = 0
    timed_out: int = 0
    crashed: int = 0
    canceled: int = 0


class MediaExecutor(Protocol):
    """Decodes and processes media; belongs to one event loop."""

    @property
    def stats(self) -> MediaWorkerStats: ...

    async def process(self, part: MediaPart, data: Sequence[bytes], budget: TokenBudget) -> Patches | Embeddings:
        """Decode and process one part; canceling it stops the work.

        Args:
            part: the part.
            data: its encoded file, one per frame of a list, or none for a Python object.
            budget: counts the visual tokens of the request. What cannot fit is not resized.

        Raises:
            RequestError: the part is not a supported image or video, exceeds a limit, or the request exceeds its
                budget; `param` names the field.
            EngineClosed: the executor is closed.
        """

    async def read_document(self, part: DocumentPart, data: Sequence[bytes]) -> Document:
        """Read the selected pages of a document, without rendering them; canceling it stops the work.

        Raises:
            RequestError: it is not a PDF, or exceeds a limit; `param` names the field.
            EngineClosed: the executor is closed.
        """

    async def close(self) -> None:
        """Stop the work in progress, which raises EngineClosed or is canceled by its caller, and free all resources."""


class MediaThreads:
    """A `MediaExecutor` that uses threads.

    One thread decodes and processes an item, so no more items exist at full size than there are threads. A thread
    cannot be interrupted: decoding a video stops within a few frames, decoding an image runs to its end.
    """

    def __init__(self, decoder: MediaDecoder, processor: ImageProcessor, spec: ModelSpec) -> None:
        self._decoder = decoder
        self._processor = processor
        self._spec = spec
        self._threads = ThreadPoolExecutor(max(2, os.cpu_count() or 2), thread_name_prefix=MEDIA_THREADS)

    @property
    def stats(self) -> MediaWorkerStats:
        return MediaWorkerStats()

    async def process(self, part: MediaPart, data: Sequence[bytes], budget: TokenBudget) -> Patches | Embeddings:
        resizer = None if part.content is not None else self._processor.frame_resizer
        stop = threading.Event()

        def check_stop() -> None:
            if stop.is_set():
                raise EngineClosed("The request was canceled.")

        def decode_and_process() -> Patches | Embeddings:
            media = self._decoder.decode(part, data, check_stop, resizer)
            check_stop()
            item = self._process(media, part, budget)
            if part.uuid is None:
                return item
            return replace(item, source_digest=digest_files(data) if data else digest_media(media))

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, decode_and_process)
        finally:
            stop.set()

    async def read_document(self, part: DocumentPart, data: Sequence[bytes]) -> Document:
        raise UnsupportedParameter(
            "Documents need media workers, because a damaged file could end the engine. Run it on Linux, without"
            " `media_workers=0`, or send the pages as images.",
            param=part.path,
        )

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _process(self, media: Media, part: MediaPart, budget: TokenBudget) -> Patches | Embeddings:
        if isinstance(media, Embeddings):
            budget.add(TokenCount(len(media.rows), len(media.rows)))
            return validate_embeddings(media, self._spec, self._processor)
        # Media that can never fit the context are rejected before they are resized.
        budget.check(least_tokens(self._processor.count_tokens(media), part))
        patches = reduced(process_media(self._processor, media), part)
        budget.add(patches.token_count)
        return patches


def process_media(processor: ImageProcessor, media: Image | Video) -> Patches:
    """Return the patches of an image or video, with its size before resizing."""
    _, height, width = frames_shape(media)
    return replace(processor.process(media), source_size=(width, height))
