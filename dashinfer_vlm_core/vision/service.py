"""Patches -> VisualTokens: each unit is encoded once, and units of different requests are batched.

A unit is an image, or a temporal patch of a video if the encoder splits videos: a video that overlaps an earlier one
shares units with it. Visual tokens that a request contains, or refers to by uuid, are merged with the encoded ones
here. This is one file, since the cache, the lookups in the store, the queue and the passes share the state of a unit.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakValueDictionary

from cachetools import LRUCache

from ..concurrency.loop import engine_closed
from ..embedding_store.client import EmbeddingStoreClient, EmbeddingStoreStats, Lookup
from ..errors import EngineError
from ..media.types import Embeddings, VisualInput
from ..models.interface import Patches, VisionEncoder, VisualTokens
from .pruning import prune
from .units import UnitJob, UnitQueue, concatenate, size_of

if TYPE_CHECKING:
    import torch

logger: logging.Logger = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int], None]
"""Is called with the number of finished units, and their total number."""

BUDGET = 0.5
"""Time budget of a lookup in the store, as a share of the measured time that encoding takes."""

FIRST_BUDGET = 0.25
"""Seconds of that budget before an item was encoded."""

DECAY = 0.8
"""Weight of the earlier passes in the average time per patch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionStats:
    """Counters of a `VisionService`.

    Attributes:
        passes: forward passes of the vision encoder, including failed ones.
        encoded: units encoded.
        hits: units found in the cache.
        joins: units that another request was already encoding, so that both waited for one computation.
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


@dataclass(slots=True)
class _UnitCount:
    """Counts the finished units of a request, and reports them."""

    total: int
    progress: Progress | None
    done: int = 0

    def add(self, embedding: torch.Tensor) -> torch.Tensor:
        self.done += 1
        if self.progress:
            self.progress(self.done, self.total)
        return embedding


class VisionService:
    """Encodes each distinct unit once, caches it, and batches the units of concurrent requests.

    Belongs to one event loop. The encoder runs in a separate thread, so it never blocks the loop; units requested
    during a pass are batched into the next one. Units that are not cached are first looked up in the store, if there is
    one, in less time than encoding them takes.

    Args:
        encoder: the vision encoder.
        model_key: part of the cache keys: what embeddings depend on besides the content, such as the kernel set.
        cache_bytes: memory for embeddings; the least recently used ones are evicted first. 0 disables the cache. A
            video that does not fit is not cached.
        batch_patches: maximum patches per pass; a larger unit is encoded alone.
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
        self._store = store
        self._model_key = model_key
        self._batch_patches = batch_patches
        self._cache: LRUCache[bytes, torch.Tensor] = LRUCache(cache_bytes, getsizeof=size_of)
        self._joined: WeakValueDictionary[bytes, torch.Tensor] = WeakValueDictionary()  # videos in use
        self._jobs: dict[bytes, UnitJob] = {}
        self._waiting = UnitQueue()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dashinfer-vlm-vision")
        self._runner: asyncio.Task[None] | None = None
        self._closed = False
        self._lookups: set[_LookupTask] = set()
        self._seconds_per_patch: float | None = None
        self._counts: Counter[str] = Counter()  # fields of VisionStats

    @property
    def stats(self) -> VisionStats:
        store = self._store.stats if self._store else None
        return VisionStats(**self._counts, bytes=int(self._cache.currsize), store=store)

    async def embed(
        self,
        items: Sequence[Patches | Embeddings | VisualTokens],
        *,
        cache_salt: str = "",
        lora: VisionLora | None = None,
        progress: Progress | None = None,
    ) -> tuple[VisualTokens, ...]:
        """Return the visual tokens of each item, in order.

        Canceling the caller discards the units that no other request waits for, unless their pass has started.

        Args:
            items: the items of one request.
            cache_salt: part of the cache key; cached items are shared only between requests with the same salt.
            lora: the encoder to use instead of the model's.
            progress: called when a unit of the request is available, with their number so far and in total.

        Raises:
            EngineError: the vision encoder failed on an item; `param` names it.
            EngineClosed: the service was closed.
        """
        if self._closed:
            raise engine_closed()
        jobs = [self._jobs_of(item, cache_salt, lora) for item in items]
        self._start([job for job in dict.fromkeys(chain(*jobs)) if not job.started])
        try:
            count = _UnitCount(sum(map(len, jobs)), progress)
            encoding = zip(items, jobs, strict=True)
            return tuple([await self._tokens(item, units, cache_salt, lora, count) for item, units in encoding])
        finally:
            for job in chain(*jobs):
                self._release(job)

    async def find(
        self, item: VisualInput, *, cache_salt: str = "", lora: VisionLora | None = None
    ) -> VisualTokens | None:
        """Return the visual tokens of an item, or None if they are not cached."""
        units = self._units(item, lora)
        cached = [self._cache.get(self._key(_salted(digest, cache_salt), lora)) for digest in units or (item.digest,)]
        found = [embedding for embedding in cached if embedding is not None]
        if len(found) < len(cached):
            return None
        salted = _salted(item.digest, cache_salt)
        embedding = await self._join(found, self._key(salted, lora))
        return await self._prune(VisualTokens.of(item, embedding, digest=salted, units=units))

    def _units(self, item: VisualInput, lora: VisionLora | None) -> tuple[bytes, ...]:
        """Return the digests of the temporal patches that are encoded separately; none if the item is one unit."""
        return item.units if (lora.encoder if lora else self._encoder).splits_videos else ()

    async def _join(self, units: Sequence[torch.Tensor], key: bytes) -> torch.Tensor:
        if len(units) == 1:
            return units[0]
        if (joined := self._joined.get(key)) is None:
            joined = self._joined.setdefault(key, await asyncio.to_thread(concatenate, units))
        return joined

    def _add_to_cache(self, key: bytes, embedding: torch.Tensor, item_bytes: int) -> None:
        if key not in self._cache and item_bytes <= self._cache.maxsize:
            self._cache[key] = embedding

    async def close(self) -> None:
        """Fail the queued items, wait for a running pass, and release the thread and the cache; idempotent."""
        self._closed = True
        for task in self._lookups:
            task.cancel()
        await asyncio.gather(*self._lookups, return_exceptions=True)
        while job := self._waiting.next:
            self._waiting.take(job)
            self._finish(job, engine_closed())
        if self._runner is not None:
            await self._runner
        if self._store is not None:
            await self._store.close()
        self._thread.shutdown()
        self._cache.clear()

    def _key(self, salted: bytes, lora: VisionLora | None) -> bytes:
        # Keys with and without an adapter have different lengths.
        return self._model_key + (lora.key if lora else b"") + salted

    async def _tokens(
        self,
        item: Patches | Embeddings | VisualTokens,
        jobs: Sequence[UnitJob],
        cache_salt: str,
        lora: VisionLora | None,
        count: _UnitCount,
    ) -> VisualTokens:
        if isinstance(item, VisualTokens):
            self._counts["hits"] += max(1, len(item.units))
            return item
        salted = _salted(item.digest, cache_salt)
        if isinstance(item, Patches):
            units = [count.add(await job.embedding(item.path)) for job in jobs]
            embedding = await self._join(units, self._key(salted, lora))
        else:  # converted in the encoder's thread, between passes, and cached for later requests by uuid
            loop = asyncio.get_running_loop()
            embedding = await loop.run_in_executor(self._thread, self._encoder.adopt, item.rows)
            self._add_to_cache(self._key(salted, lora), embedding, size_of(embedding))
        return await self._prune(VisualTokens.of(item, embedding, digest=salted, units=self._units(item, lora)))

    async def _prune(self, item: VisualTokens) -> VisualTokens:
        if item.kept_tokens == item.tokens:
            return item
        return await asyncio.get_running_loop().run_in_executor(self._thread, prune, item)

    def _jobs_of(
        self, item: Patches | Embeddings | VisualTokens, cache_salt: str, lora: VisionLora | None
    ) -> list[UnitJob]:
        if not isinstance(item, Patches):
            return []
        units = item.temporal_patches() if self._units(item, lora) else [item]
        return [self._job(unit, cache_salt, lora, item.tokens) for unit in units]

    def _job(self, unit: Patches, cache_salt: str, lora: VisionLora | None, item_tokens: int) -> UnitJob:
        salted = _salted(unit.digest, cache_salt)
        key = self._key(salted, lora)
        encoder = lora.encoder if lora else self._encoder
        stored = hashlib.sha256(b"adapter" + lora.key + salted).digest() if lora else salted
        if (embedding := self._cache.get(key)) is not None:
            self._counts["hits"] += 1
            job = UnitJob(key, unit, encoder, stored, item_tokens)
            job.started = True
            job.finish(embedding)
        elif key in self._jobs:
            self._counts["joins"] += 1
            job = self._jobs[key]
        else:
            job = self._jobs[key] = UnitJob(key, unit, encoder, stored, item_tokens)
        job.callers += 1
        return job

    def _start(self, jobs: Sequence[UnitJob]) -> None:
        for job in jobs:
            job.started = True
        if self._store is None:
            for job in jobs:
                self._enqueue(job)
        elif jobs:
            lookups = [Lookup(job.stored_digest, job.patches.tokens) for job in jobs]
            task = asyncio.create_task(self._store.get(lookups, budget=self._budget(jobs)), name="embedding-lookup")
            self._lookups.add(task)
            task.add_done_callback(lambda task: self._looked_up(jobs, task))

    def _budget(self, jobs: Sequence[UnitJob]) -> float:
        if self._seconds_per_patch is None:
            return FIRST_BUDGET
        return BUDGET * self._seconds_per_patch * sum(job.size for job in jobs)

    def _looked_up(self, jobs: Sequence[UnitJob], task: _LookupTask) -> None:
        """Finish the units that were found, and queue the others. Called at the end of a lookup, also if it failed."""
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
                self._add_to_cache(job.key, embedding, job.item_bytes(embedding))
                self._finish(job, embedding)

    def _enqueue(self, job: UnitJob) -> None:
        if self._closed:
            self._finish(job, engine_closed())
        elif job.callers:
            self._waiting.add(job)
            if self._runner is None or self._runner.done():
                self._runner = asyncio.create_task(self._run(), name="vision")
        else:
            del self._jobs[job.key]

    def _release(self, job: UnitJob) -> None:
        job.callers -= 1
        if job.callers == 0 and self._waiting.discard(job):
            del self._jobs[job.key]

    async def _run(self) -> None:
        while batch := self._next_batch():
            await self._encode(batch)

    def _next_batch(self) -> list[UnitJob]:
        batch: list[UnitJob] = []
        remaining = self._batch_patches
        while job := self._waiting.next:
            if batch and (job.size > remaining or job.encoder is not batch[0].encoder):
                break
            self._waiting.take(job)
            batch.append(job)
            remaining -= job.size
        return batch

    async def _encode(self, batch: list[UnitJob]) -> None:
        """Encode a batch in one pass; if it fails, encode each unit separately, so that only faulty ones fail."""
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
            self._add_to_cache(job.key, embedding, job.item_bytes(embedding))
            self._finish(job, embedding)
            if self._store is not None:
                self._store.put(job.stored_digest, embedding)

    def _measure(self, seconds: float, patches: int) -> None:
        last = seconds / patches
        average = last if self._seconds_per_patch is None else self._seconds_per_patch
        self._seconds_per_patch = DECAY * average + (1 - DECAY) * last

    async def _run_encoder(self, encoder: VisionEncoder, batch: list[Patches]) -> list[torch.Tensor]:
        embeddings = await asyncio.get_running_loop().run_in_executor(self._thread, encoder.encode, batch)
        rows = [len(embedding) for embedding in embeddings]
        expected = [item.tokens for item in batch]
        if rows != expected:
            raise EngineError(f"The vision encoder returned {rows} visual tokens instead of {expected}.")
        return embeddings

    def _finish(self, job: UnitJob, outcome: torch.Tensor | Exception) -> None:
        del self._jobs[job.key]
        job.finish(outcome)


_LookupTask: TypeAlias = "asyncio.Task[list[torch.Tensor | None]]"


def _salted(digest: bytes, cache_salt: str) -> bytes:
    if not cache_salt:
        return digest
    return hashlib.sha256(b"salted" + hashlib.sha256(cache_salt.encode()).digest() + digest).digest()
