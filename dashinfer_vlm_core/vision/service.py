"""Patches -> VisualTokens: each item is encoded once, and items of different requests are batched.

Visual tokens that a request contains, or refers to by uuid, are merged with the encoded ones here. This is one file,
since the cache, the lookups in the store, the queue and the passes share the state of an item.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from cachetools import LRUCache

from ..embedding_store.client import EmbeddingStoreClient, EmbeddingStoreStats, Lookup
from ..errors import EngineClosed, EngineError
from ..media.types import Embeddings, VisualInput
from ..models.interface import Patches, VisionEncoder, VisualTokens

if TYPE_CHECKING:
    import torch

logger: logging.Logger = logging.getLogger(__name__)

BUDGET = 0.5
"""Time budget of a lookup in the store, as a share of the measured time that encoding takes."""

FIRST_BUDGET = 0.25
"""Seconds of that budget before an item was encoded."""

SMOOTHING = 0.2
"""Weight of the last pass in the average time per patch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionStats:
    """Counters of a `VisionService`.

    Attributes:
        passes: forward passes of the vision encoder, including failed ones.
        encoded: items encoded.
        hits: items found in the cache.
        joins: items that another request was already encoding, so that both waited for one computation.
        bytes: current size of the cache.
        store: counters of the store; None without one.
    """

    passes: int = 0
    encoded: int = 0
    hits: int = 0
    joins: int = 0
    bytes: int = 0
    store: EmbeddingStoreStats | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VisionLora:
    """The vision encoder with the changes of a LoRA adapter.

    Attributes:
        key: part of the cache keys, of a fixed length: what the adapter's embeddings depend on.
        encoder: the encoder.
    """

    key: bytes
    encoder: VisionEncoder


class VisionService:
    """Encodes each distinct item once, caches it, and batches the items of concurrent requests.

    Belongs to one event loop. The encoder runs in a separate thread, so it never blocks the loop; items requested
    during a pass are batched into the next one. Items that are not cached are first looked up in the store, if there is
    one, in less time than encoding them takes.

    Args:
        encoder: the vision encoder.
        model_key: part of the cache keys: what embeddings depend on besides the content, such as the kernel set.
        cache_bytes: memory for embeddings; the least recently used ones are evicted first. 0 disables the cache.
        batch_patches: maximum patches per pass; a larger item is encoded alone.
        store: embeddings that other processes can use too; the service closes it.
    """

    def __init__(
        self,
        encoder: VisionEncoder,
        *,
        model_key: bytes = b"",
        cache_bytes: int,
        batch_patches: int,
        store: EmbeddingStoreClient | None = None,
    ) -> None:
        self._encoder = encoder
        self._shared = store
        self._model_key = model_key
        self._batch_patches = batch_patches
        self._cache: LRUCache[bytes, torch.Tensor] = LRUCache(cache_bytes, getsizeof=_size)
        self._jobs: dict[bytes, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vision")
        self._runner: asyncio.Task[None] | None = None
        self._closed = False
        self._lookups: set[_LookupTask] = set()
        self._seconds_per_patch: float | None = None
        self._counts: Counter[str] = Counter()  # fields of VisionStats

    @property
    def stats(self) -> VisionStats:
        store = self._shared.stats if self._shared else None
        return VisionStats(**self._counts, bytes=int(self._cache.currsize), store=store)

    async def embed(
        self,
        items: Sequence[Patches | Embeddings | VisualTokens],
        *,
        cache_salt: str = "",
        lora: VisionLora | None = None,
    ) -> tuple[VisualTokens, ...]:
        """Return the visual tokens of each item, in order.

        Canceling the caller discards the items that no other request waits for, unless their pass has started.

        Args:
            items: the items of one request.
            cache_salt: part of the cache key; cached items are shared only between requests with the same salt.
            lora: the encoder to use instead of the model's.

        Raises:
            EngineError: the vision encoder failed on an item; `param` names it.
            EngineClosed: the service was closed.
        """
        if self._closed:
            raise EngineClosed("The engine was closed; start another one.")
        jobs = [self._job(item, cache_salt, lora) for item in items if isinstance(item, Patches)]
        self._start([job for job in dict.fromkeys(jobs) if not job.started])
        try:
            encoding = iter(jobs)
            return tuple([await self._tokens(item, encoding, cache_salt, lora) for item in items])
        finally:
            for job in jobs:
                self._release(job)

    def find(self, item: VisualInput, *, cache_salt: str = "", lora: VisionLora | None = None) -> VisualTokens | None:
        """Return the visual tokens of an item, or None if they are not cached."""
        salted = _salted(item.digest, cache_salt)
        embedding = self._cache.get(self._key(salted, lora))
        return None if embedding is None else VisualTokens.of(item, embedding, digest=salted)

    def _store(self, key: bytes, embedding: torch.Tensor) -> None:
        if key not in self._cache and _size(embedding) <= self._cache.maxsize:
            self._cache[key] = embedding

    async def close(self) -> None:
        """Fail the queued items, wait for a running pass, and release the thread and the cache; idempotent."""
        self._closed = True
        for task in self._lookups:
            task.cancel()
        await asyncio.gather(*self._lookups, return_exceptions=True)
        while self._waiting:
            self._finish(self._waiting.popleft(), _closed_error())
        if self._runner is not None:
            await self._runner
        if self._shared is not None:
            await self._shared.close()
        self._thread.shutdown()
        self._cache.clear()

    def _key(self, salted: bytes, lora: VisionLora | None) -> bytes:
        # Keys with and without an adapter have different lengths.
        return self._model_key + (lora.key if lora else b"") + salted

    async def _tokens(
        self,
        item: Patches | Embeddings | VisualTokens,
        encoding: Iterator[_Job],
        cache_salt: str,
        lora: VisionLora | None,
    ) -> VisualTokens:
        if isinstance(item, VisualTokens):
            self._counts["hits"] += 1
            return item
        salted = _salted(item.digest, cache_salt)
        if isinstance(item, Patches):
            embedding = await next(encoding).embedding(item.path)
        else:  # converted in the encoder's thread, between passes, and cached for later requests by uuid
            loop = asyncio.get_running_loop()
            embedding = await loop.run_in_executor(self._thread, self._encoder.adopt, item.rows)
            self._store(self._key(salted, lora), embedding)
        return VisualTokens.of(item, embedding, digest=salted)

    def _job(self, item: Patches, cache_salt: str, lora: VisionLora | None) -> _Job:
        """Return the job for this item: a finished one if it is cached, else the pending one, else a new one."""
        salted = _salted(item.digest, cache_salt)
        key = self._key(salted, lora)
        encoder = lora.encoder if lora else self._encoder
        stored = hashlib.sha256(b"adapter" + lora.key + salted).digest() if lora else salted
        if (embedding := self._cache.get(key)) is not None:
            self._counts["hits"] += 1
            job = _Job(key, item, encoder, stored)
            job.started = True
            job.finish(embedding)
        elif key in self._jobs:
            self._counts["joins"] += 1
            job = self._jobs[key]
        else:
            job = self._jobs[key] = _Job(key, item, encoder, stored)
        job.callers += 1
        return job

    def _start(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            job.started = True
        if self._shared is None:
            for job in jobs:
                self._enqueue(job)
        elif jobs:
            lookups = [Lookup(job.stored_digest, job.patches.tokens) for job in jobs]
            task = asyncio.create_task(self._shared.get(lookups, budget=self._budget(jobs)), name="embedding-lookup")
            self._lookups.add(task)
            task.add_done_callback(lambda task: self._looked_up(jobs, task))

    def _budget(self, jobs: Sequence[_Job]) -> float:
        if self._seconds_per_patch is None:
            return FIRST_BUDGET
        return BUDGET * self._seconds_per_patch * sum(job.size for job in jobs)

    def _looked_up(self, jobs: Sequence[_Job], task: _LookupTask) -> None:
        """Finish the items that were found, and queue the others. Called at the end of a lookup, also if it failed."""
        self._lookups.discard(task)
        found: Sequence[torch.Tensor | None] = [None] * len(jobs)
        if not task.cancelled():
            if error := task.exception():
                logger.error("A lookup in the embedding store failed.", exc_info=error)
            else:
                found = task.result()
        for job, embedding in zip(jobs, found, strict=True):
            if embedding is None:
                self._enqueue(job)
            else:
                self._store(job.key, embedding)
                self._finish(job, embedding)

    def _enqueue(self, job: _Job) -> None:
        if self._closed:
            self._finish(job, _closed_error())
        elif job.callers:
            self._waiting.append(job)
            if self._runner is None or self._runner.done():
                self._runner = asyncio.create_task(self._run(), name="vision")
        else:
            del self._jobs[job.key]

    def _release(self, job: _Job) -> None:
        job.callers -= 1
        if job.callers == 0 and job in self._waiting:
            self._waiting.remove(job)
            del self._jobs[job.key]

    async def _run(self) -> None:
        while batch := self._next_batch():
            await self._encode(batch)

    def _next_batch(self) -> list[_Job]:
        batch: list[_Job] = []
        remaining = self._batch_patches
        while self._waiting and (
            not batch or (self._waiting[0].size <= remaining and self._waiting[0].encoder is batch[0].encoder)
        ):
            batch.append(self._waiting.popleft())
            remaining -= batch[-1].size
        return batch

    async def _encode(self, batch: list[_Job]) -> None:
        """Encode a batch in one pass; if it fails, encode each item separately, so that only faulty items fail."""
        self._counts["passes"] += 1
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            embeddings = await self._run_encoder(batch[0].encoder, [job.patches for job in batch])
        except Exception as error:
            if len(batch) == 1:
                logger.exception("The vision encoder failed on a grid of %s", batch[0].patches.grid)
                self._finish(batch[0], error)
            else:
                for job in batch:
                    await self._encode([job])
            return
        self._counts["encoded"] += len(batch)
        self._measure(clock() - start, sum(job.size for job in batch))
        for job, embedding in zip(batch, embeddings, strict=True):
            self._store(job.key, embedding)
            self._finish(job, embedding)
            if self._shared is not None:
                self._shared.put(job.stored_digest, embedding)

    def _measure(self, seconds: float, patches: int) -> None:
        last = seconds / patches
        average = last if self._seconds_per_patch is None else self._seconds_per_patch
        self._seconds_per_patch = average + SMOOTHING * (last - average)

    async def _run_encoder(self, encoder: VisionEncoder, batch: list[Patches]) -> list[torch.Tensor]:
        embeddings = await asyncio.get_running_loop().run_in_executor(self._thread, encoder.encode, batch)
        rows = [len(embedding) for embedding in embeddings]
        expected = [item.tokens for item in batch]
        if rows != expected:
            raise EngineError(f"The vision encoder returned {rows} visual tokens instead of {expected}.")
        return embeddings

    def _finish(self, job: _Job, outcome: torch.Tensor | Exception) -> None:
        del self._jobs[job.key]
        job.finish(outcome)


_LookupTask: TypeAlias = "asyncio.Task[list[torch.Tensor | None]]"


@dataclass(slots=True, eq=False)
class _Job:
    """One item to encode, shared by all callers that wait for it.

    Attributes:
        key: cache key.
        patches: the item.
        encoder: the encoder to use.
        stored_digest: what identifies its embedding in the store: the salted digest, and the adapter if there is one.
        callers: number of waiting callers.
        started: whether it is looked up, queued, encoded or finished.
    """

    key: bytes
    patches: Patches
    encoder: VisionEncoder
    stored_digest: bytes
    callers: int = 0
    started: bool = False
    _done: asyncio.Event = field(default_factory=asyncio.Event)
    _outcome: torch.Tensor | Exception | None = None

    @property
    def size(self) -> int:
        """Number of patches."""
        return self.patches.grid.patches

    def finish(self, outcome: torch.Tensor | Exception) -> None:
        self._outcome = outcome
        self._done.set()

    async def embedding(self, path: str) -> torch.Tensor:
        """Wait for the result; `path` is the item's location in the caller's request, used in errors."""
        await self._done.wait()
        assert self._outcome is not None
        if isinstance(self._outcome, EngineClosed):
            raise EngineClosed(self._outcome.message)
        if isinstance(self._outcome, Exception):
            message = "The vision encoder failed on this image or video. Try again; the engine's log has the cause."
            raise EngineError(message, param=path, code="vision_failed") from self._outcome
        return self._outcome


def _closed_error() -> EngineClosed:
    return EngineClosed("The engine was closed while the request waited.")


def _salted(digest: bytes, cache_salt: str) -> bytes:
    """Return the digest unchanged without a salt, else a digest of both, of the same length."""
    if not cache_salt:
        return digest
    return hashlib.sha256(b"salted" + hashlib.sha256(cache_salt.encode()).digest() + digest).digest()


def _size(embedding: torch.Tensor) -> int:
    return embedding.element_size() * embedding.numel()
