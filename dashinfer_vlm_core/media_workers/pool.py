"""MediaWorkerPool: decodes and processes media in worker processes, fairly among clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ..concurrency.fair_slots import FairSlots
from ..concurrency.loop import engine_closed
from ..config import MIB, EngineConfig
from ..errors import ConfigError, EngineClosed, MediaUndecodable
from ..media.decoder import MediaDecoder, digest_files
from ..media.documents import Document
from ..media.types import Embeddings, TokenCount, VideoReader
from ..models.interface import ImageProcessor, ModelFamily, Patches
from ..models.spec import ModelSpec
from ..protocol import DocumentPart, MediaPart
from ..protocol.client import Client, current_client
from .fork_server import FORK_SERVER
from .threads import MediaExecutor, MediaThreads, MediaWorkerStats, TokenBudget
from .worker import Job, MediaWorker, WorkerConfig
from .worker_process import reference_to

logger: logging.Logger = logging.getLogger(__name__)


class WorkerLimit:
    """The worker processes that the pools of one or several models may have together.

    Args:
        size: their maximum number.

    Attributes:
        size: as above.
        slots: one for each worker that processes an item.
        lock: protects the other attributes.
        idle: those that wait for an item; the first has waited longest.
        num_busy: the number of the others.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots = FairSlots(size)
        self.lock = threading.Lock()
        self.idle: list[MediaWorker] = []
        self.num_busy = 0


class MediaWorkerPool:
    """A `MediaExecutor` whose encoded media are processed in worker processes; Python objects are processed in threads.

    A worker decodes files of one client only: if another client needs a worker, an idle one is killed and a new one is
    forked. One that exceeds its time or memory, crashes, or whose request is canceled, is killed too.

    Args:
        config: limits.
        limit: how many worker processes it may have, and which others share.
        worker: how workers are started.
        threads: processes Python objects.
    """

    def __init__(self, config: EngineConfig, limit: WorkerLimit, worker: WorkerConfig, threads: MediaThreads) -> None:
        self._config = config
        self._shared = limit
        self._worker_config = worker
        self._local = threads
        self._threads = ThreadPoolExecutor(limit.size, thread_name_prefix="dashinfer-vlm-media-worker")
        self._waiting = 0
        self._busy: set[MediaWorker] = set()
        self._started = 0
        self._ended: Counter[str] = Counter()
        self._closed = False

    @property
    def stats(self) -> MediaWorkerStats:
        return MediaWorkerStats(busy=len(self._busy), waiting=self._waiting, started=self._started, **self._ended)

    async def process(self, part: MediaPart, data: Sequence[bytes], budget: TokenBudget) -> Patches | Embeddings:
        if part.content is not None:
            return await self._local.process(part, data, budget)
        patches = await self._process(Job(part=part, data=data, budget=budget, seconds=self._seconds(part)))
        assert isinstance(patches, Patches)
        return patches

    async def read_document(self, part: DocumentPart, data: Sequence[bytes]) -> Document:
        limits = self._config.limits
        characters = (limits.document_pages + 1) * limits.document_page_text
        budget = TokenBudget(lambda _: None, TokenCount(kept=characters, encoded=0))
        document = await self._process(Job(part=part, data=data, budget=budget, seconds=self._seconds(part)))
        assert isinstance(document, Document)
        return document

    async def _process(self, job: Job) -> Patches | Document:
        client = current_client.get()
        self._waiting += 1
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._shared.slots.slot(client.id, limit=self._limit(client)))
            finally:
                self._waiting -= 1
            return await self._run_in_worker(client.id, job)

    async def _run_in_worker(self, client: str, job: Job) -> Patches | Document:
        """Run a job; in another worker if one that was idle ended before it had received it. After that, the file may
        be what ended the worker, and would end the next one too."""
        while True:
            worker = self._take_worker(client)
            was_idle = worker.pid is not None
            try:
                return await self._run(worker, job)
            except MediaUndecodable:
                if not was_idle or not worker.lost_job:
                    raise
            finally:
                self._return_worker(worker)

    async def close(self) -> None:
        self._closed = True
        for worker in self._busy:
            worker.kill()  # `_return_worker` closes it
        with self._shared.lock:
            idle = [worker for worker in self._shared.idle if self._is_own(worker)]
            self._shared.idle = [worker for worker in self._shared.idle if not self._is_own(worker)]
        for worker in idle:
            worker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._local.close()

    def _take_worker(self, client: str) -> MediaWorker:
        if self._closed:
            raise engine_closed()
        worker, replaced = self._take_or_create(client)
        for other in replaced:
            other.close()
        self._busy.add(worker)
        return worker

    def _take_or_create(self, client: str) -> tuple[MediaWorker, list[MediaWorker]]:
        """Return a worker, and those to close before it is used."""
        shared = self._shared
        ended: list[MediaWorker] = []
        with shared.lock:
            shared.num_busy += 1
            for worker in [each for each in reversed(shared.idle) if self._is_own(each) and each.client == client]:
                shared.idle.remove(worker)
                if worker.alive:
                    return worker, ended
                ended.append(worker)  # it was killed from outside
            if len(shared.idle) + shared.num_busy > shared.size:
                ended.append(shared.idle.pop(0))  # the one that has been idle longest
        self._started += 1
        return MediaWorker(self._worker_config, client), ended

    def _is_own(self, worker: MediaWorker) -> bool:
        return worker.config is self._worker_config

    def _return_worker(self, worker: MediaWorker) -> None:
        self._busy.discard(worker)
        if worker.end:
            self._ended[worker.end] += 1
        is_reusable = worker.reusable and not self._closed
        with self._shared.lock:
            self._shared.num_busy -= 1
            if is_reusable:
                self._shared.idle.append(worker)
        if not is_reusable:
            worker.close()

    async def _run(self, worker: MediaWorker, job: Job) -> Patches | Document:
        running = asyncio.get_running_loop().run_in_executor(self._threads, _run_job, worker, job)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            worker.kill()
            while not running.done():  # the thread uses the descriptors that the caller closes
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({running})
            raise
        except EngineClosed:
            raise engine_closed() from None
        finally:
            del running  # its exception refers to this frame: the cycle would keep the media

    def _limit(self, client: Client) -> int:
        # With API keys, one worker stays available for others.
        size = self._shared.size
        limit = size if not client.id else max(1, size - 1)
        return limit if client.media_workers is None else min(client.media_workers, limit)

    def _seconds(self, part: MediaPart | DocumentPart) -> float:
        limits = self._config.limits
        if part.kind == "video":
            return self._config.video_decode_seconds
        return limits.image_decode_timeout if part.kind == "image" else limits.video_decode_timeout


def _run_job(worker: MediaWorker, job: Job) -> Patches | Document:
    result = worker.run(job)
    if isinstance(result, Document) or isinstance(job.part, DocumentPart) or job.part.uuid is None:
        return result
    return replace(result, source_digest=digest_files(job.data))


def create_executor(
    config: EngineConfig,
    *,
    family: ModelFamily,
    folder: Path,
    spec: ModelSpec,
    processor: ImageProcessor,
    decoder: MediaDecoder,
    limit: WorkerLimit | None = None,
) -> MediaExecutor:
    """Create the executor that the configuration selects: worker processes, or threads with `media_workers=0`.

    Args:
        config: options of the engine.
        family: the model's family.
        folder: the checkpoint's folder.
        spec: the checkpoint.
        processor: the family's image processor.
        decoder: decodes media in this process.
        limit: that of worker processes, if other models share it; otherwise that of the configuration.

    Raises:
        ConfigError: `media_workers` is set, but this platform has no worker processes; or there are none, and a video
            reader may crash.
    """
    threads = MediaThreads(decoder, processor, spec)
    workers = config.media_workers
    if workers and not is_supported():
        raise ConfigError("media_workers: worker processes need Linux. Set it to 0.", param="media_workers")
    references = [reference_to(item) for item in (family, *decoder.readers)]
    if workers == 0 or not is_supported() or None in references:
        _check_without_workers(decoder.readers)
        if workers != 0:
            reason = "a registered model family or video reader is not importable"
            logger.warning("Media are decoded in threads: %s.", reason if is_supported() else "workers need Linux")
        return threads
    setup = {
        "config": config.model_dump(mode="json"),
        "folder": str(folder.absolute()),
        "family": references[0],
        "readers": references[1:],
        "memory_bytes": config.limits.media_worker_memory_mib * MIB,
    }
    FORK_SERVER.prepare(setup)
    worker = WorkerConfig(setup=setup, processor=processor, pixels=spec.pixels)
    return MediaWorkerPool(config, limit or WorkerLimit(workers or default_workers()), worker, threads)


def _check_without_workers(readers: Iterable[VideoReader]) -> None:
    for reader in readers:
        if reader.may_crash:
            raise ConfigError(
                f"video_reader: {reader.name!r} needs media workers, because a damaged file can crash it and would end"
                " the engine. Use `pyav`, or remove `media_workers=0` (worker processes need Linux).",
                param="video_reader",
            )


def default_workers() -> int:
    """One more than there are processors: with API keys, one worker is reserved for other clients."""
    return max(2, os.cpu_count() or 2) + 1


def is_supported() -> bool:
    """Whether this platform has worker processes."""
    return sys.platform == "linux" and bool(sys.executable)
