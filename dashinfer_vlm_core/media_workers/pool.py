"""MediaWorkerPool: decodes and processes media in worker processes, fairly among clients."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ..concurrency.fair_slots import FairSlots
from ..config import MIB, EngineConfig
from ..errors import ConfigError, EngineClosed, MediaUndecodable
from ..media.decoder import MediaDecoder, digest_files
from ..media.documents import Document
from ..media.loader import closed_error
from ..media.types import Embeddings, VideoReader
from ..models.interface import ImageProcessor, ModelFamily, Patches
from ..models.spec import ModelSpec
from ..protocol import DocumentPart, MediaPart
from ..protocol.client import Client, current_client
from .fork_server import FORK_SERVER
from .threads import MediaExecutor, MediaThreads, MediaWorkerStats, TokenBudget
from .worker import Job, MediaWorker, WorkerConfig
from .worker_process import reference_to

logger: logging.Logger = logging.getLogger(__name__)


class MediaWorkerPool:
    """A `MediaExecutor` whose encoded media are processed in worker processes; Python objects are processed in threads.

    A worker decodes files of one client only: if another client needs a worker, an idle one is killed and a new one is
    forked. One that exceeds its time or memory, crashes, or whose request is canceled, is killed too.

    Args:
        config: limits.
        workers: maximum number of worker processes.
        worker: how workers are started.
        threads: processes Python objects.
    """

    def __init__(self, config: EngineConfig, workers: int, worker: WorkerConfig, threads: MediaThreads) -> None:
        self._config = config
        self._size = workers
        self._worker_config = worker
        self._local = threads
        self._slots = FairSlots(workers)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="dashinfer-vlm-media-worker")
        self._idle: list[MediaWorker] = []
        self._busy: set[MediaWorker] = set()
        self._started = 0
        self._ended: Counter[str] = Counter()
        self._closed = False

    @property
    def stats(self) -> MediaWorkerStats:
        return MediaWorkerStats(busy=len(self._busy), waiting=self._slots.waiting, started=self._started, **self._ended)

    async def process(self, part: MediaPart, data: Sequence[bytes], budget: TokenBudget) -> Patches | Embeddings:
        if part.content is not None:
            return await self._local.process(part, data, budget)
        patches = await self._process(Job(part=part, data=data, budget=budget, seconds=self._seconds(part)))
        assert isinstance(patches, Patches)
        return patches

    async def read_document(self, part: DocumentPart, data: Sequence[bytes]) -> Document:
        limits = self._config.limits
        budget = TokenBudget(lambda _: None, (limits.document_pages + 1) * limits.document_page_text)
        document = await self._process(Job(part=part, data=data, budget=budget, seconds=self._seconds(part)))
        assert isinstance(document, Document)
        return document

    async def _process(self, job: Job) -> Patches | Document:
        client = current_client.get()
        async with self._slots.slot(client.id, limit=self._limit(client)):
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
        for worker in self._idle:
            worker.close()
        self._idle.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._local.close()

    def _take_worker(self, client: str) -> MediaWorker:
        if self._closed:
            raise closed_error()
        worker = self._take_idle_worker(client)
        if worker is None:
            if len(self._idle) + len(self._busy) >= self._size:
                self._idle.pop(0).close()  # the one that has been idle longest
            worker = MediaWorker(self._worker_config, client)
            self._started += 1
        self._busy.add(worker)
        return worker

    def _take_idle_worker(self, client: str) -> MediaWorker | None:
        for worker in [worker for worker in reversed(self._idle) if worker.client == client]:
            self._idle.remove(worker)
            if worker.alive:
                return worker
            worker.close()  # it was killed from outside
        return None

    def _return_worker(self, worker: MediaWorker) -> None:
        self._busy.discard(worker)
        if worker.end:
            self._ended[worker.end] += 1
        if worker.reusable and not self._closed:
            self._idle.append(worker)
        else:
            worker.close()

    async def _run(self, worker: MediaWorker, job: Job) -> Patches | Document:
        running = asyncio.get_running_loop().run_in_executor(self._threads, _run_job, worker, job)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            worker.kill()
            await asyncio.gather(running, return_exceptions=True)
            raise
        except EngineClosed:
            raise closed_error() from None
        finally:
            del running  # its exception refers to this frame: the cycle would keep the media

    def _limit(self, client: Client) -> int:
        # With API keys, one worker stays available for others.
        limit = self._size if not client.id else max(1, self._size - 1)
        return limit if client.media_workers is None else min(client.media_workers, limit)

    def _seconds(self, part: MediaPart | DocumentPart) -> float:
        limits = self._config.limits
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
) -> MediaExecutor:
    """Create the executor that the configuration selects: worker processes, or threads with `media_workers=0`.

    Args:
        config: options of the engine.
        family: the model's family.
        folder: the checkpoint's folder.
        spec: the checkpoint.
        processor: the family's image processor.
        decoder: decodes media in this process.

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
    return MediaWorkerPool(config, workers or default_workers(), worker, threads)


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
