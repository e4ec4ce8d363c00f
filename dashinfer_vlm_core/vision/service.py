"""Patches -> VisualTokens: each content is encoded once, and pictures of different requests share a pass.

Visual tokens that a request brings along, or that it names, join here.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from cachetools import LRUCache

from ..errors import EngineClosed, EngineError
from ..media.types import Kind
from ..models.interface import Embedded, Grid, Patches, VisionEncoder, VisualTokens

if TYPE_CHECKING:
    import torch

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CachedMedia:
    """A picture or video that came before, held so that it cannot leave the cache meanwhile.

    Attributes:
        visual: its visual tokens.
        tokens: their number.
        kind: what it is.
        part: where it stands in the request.
        times: as in `Patches`.
    """

    visual: VisualTokens
    tokens: int
    kind: Kind
    path: str
    times: tuple[float, ...] = ()

    @property
    def grid(self) -> Grid:
        return self.visual.grid


class Processed(NamedTuple):
    """What became of a picture or video that came along, and the digest of what it was decoded from."""

    item: Patches | Embedded
    source: bytes


Item: TypeAlias = Patches | Embedded | CachedMedia
"""A picture or video of a request, as the prompt and the tower take it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionStats:
    """What a `VisionService` has done so far.

    Attributes:
        passes: times the tower ran, failed passes included.
        encoded: items that it encoded.
        hits: items that were found in the cache.
        joins: items that somebody else had asked for already, and that were waited for together.
        bytes: memory that the cache holds now.
    """

    passes: int
    encoded: int
    hits: int
    joins: int
    bytes: int


class VisionService:
    """Encodes each content once, caches it, and lets requests share passes of the tower.

    Belongs to one event loop. A thread of its own waits for the tower, so the loop never does; whatever is asked for
    meanwhile goes into the next pass.

    Args:
        encoder: the tower.
        model_key: names checkpoint and number type, where one cache could serve several.
        cache_bytes: memory for embeddings; those least recently used leave first. 0 keeps none.
        batch_patches: most patches of one pass; an item that has more goes alone.
    """

    def __init__(self, encoder: VisionEncoder, *, model_key: bytes = b"", cache_bytes: int, batch_patches: int) -> None:
        self._encoder = encoder
        self._model_key = model_key
        self._batch_patches = batch_patches
        self._cache: LRUCache[bytes, torch.Tensor] = LRUCache(cache_bytes, getsizeof=_size)
        self._jobs: dict[bytes, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vision")
        self._runner: asyncio.Task[None] | None = None
        self._closed = False
        self._passes = self._encoded = self._hits = self._joins = 0

    @property
    def stats(self) -> VisionStats:
        return VisionStats(
            passes=self._passes,
            encoded=self._encoded,
            hits=self._hits,
            joins=self._joins,
            bytes=int(self._cache.currsize),
        )

    async def embed(self, items: Sequence[Item], *, cache_salt: str = "") -> tuple[VisualTokens, ...]:
        """The visual tokens of each item, in order.

        Cancelling the caller drops what nobody else waits for, unless the tower has it already.

        Args:
            items: of one request.
            salt: what is encoded under it is found in the cache under it alone.

        Raises:
            EngineError: the tower failed on one of the items; `param` says which.
            EngineClosed: the service was closed.
        """
        if self._closed:
            raise EngineClosed("The engine was closed. Start another one.")
        jobs = [self._job(item, cache_salt) for item in items if isinstance(item, Patches)]
        try:
            encoding = iter(jobs)
            return tuple([await self._tokens(item, encoding, cache_salt) for item in items])
        finally:
            for job in jobs:
                self._leave(job)

    def find(self, digest: bytes, grid: Grid, *, cache_salt: str = "") -> VisualTokens | None:
        """What is in the cache for the content of this digest (as in `Patches`)."""
        name = _salted(digest, cache_salt)
        embedding = self._cache.get(self._model_key + name)
        return None if embedding is None else VisualTokens(embedding=embedding, grid=grid, digest=name)

    def _keep(self, key: bytes, embedding: torch.Tensor) -> None:
        """At the cost of those least recently used; one above the whole budget is not kept."""
        if key not in self._cache and _size(embedding) <= self._cache.maxsize:
            self._cache[key] = embedding

    async def close(self) -> None:
        """Fail what waits, let a running pass end, and free the thread and the cache. Closing twice is allowed."""
        self._closed = True
        while self._waiting:
            self._finish(self._waiting.popleft(), EngineClosed("The engine was closed while the request waited."))
        if self._runner is not None:
            await self._runner
        self._thread.shutdown()
        self._cache.clear()

    async def _tokens(self, item: Item, encoding: Iterator[_Job], cache_salt: str) -> VisualTokens:
        if isinstance(item, CachedMedia):
            self._hits += 1
            return item.visual
        if isinstance(item, Embedded):
            return await self._adopt(item, _salted(item.digest, cache_salt))
        return await next(encoding).tokens(item.path)

    async def _adopt(self, item: Embedded, name: bytes) -> VisualTokens:
        """Between two passes of the tower; cached, so that it can be named later."""
        loop = asyncio.get_running_loop()
        embedding = await loop.run_in_executor(self._thread, self._encoder.adopt, item.rows)
        self._keep(self._model_key + name, embedding)
        return VisualTokens(embedding=embedding, grid=item.grid, digest=name)

    def _job(self, item: Patches, cache_salt: str) -> _Job:
        """The job that yields this content: done if it is cached, else one that runs or waits, else a new one."""
        name = _salted(item.digest, cache_salt)
        key = self._model_key + name
        if (embedding := self._cache.get(key)) is not None:
            self._hits += 1
            job = _Job(key, name, item)
            job.finish(embedding)
        elif key in self._jobs:
            self._joins += 1
            job = self._jobs[key]
        else:
            job = self._jobs[key] = _Job(key, name, item)
            self._waiting.append(job)
            self._wake()
        job.callers += 1
        return job

    def _leave(self, job: _Job) -> None:
        job.callers -= 1
        if job.callers == 0 and job in self._waiting:
            self._waiting.remove(job)
            del self._jobs[job.key]

    def _wake(self) -> None:
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run(), name="vision")

    async def _run(self) -> None:
        while batch := self._next_batch():
            await self._encode(batch)

    def _next_batch(self) -> list[_Job]:
        """Jobs for one pass, first come first served: the first one, and those behind it that still fit."""
        batch: list[_Job] = []
        room = self._batch_patches
        while self._waiting and (not batch or self._waiting[0].size <= room):
            batch.append(self._waiting.popleft())
            room -= batch[-1].size
        return batch

    async def _encode(self, batch: list[_Job]) -> None:
        """One pass; if it fails, one pass for each item, so that it fails for those alone that are to blame."""
        self._passes += 1
        try:
            embeddings = await self._pass([job.patches for job in batch])
        except Exception as error:
            if len(batch) == 1:
                logger.exception("The vision tower failed on a grid of %s", batch[0].patches.grid)
                self._finish(batch[0], error)
            else:
                for job in batch:
                    await self._encode([job])
            return
        self._encoded += len(batch)
        for job, embedding in zip(batch, embeddings, strict=True):
            self._keep(job.key, embedding)
            self._finish(job, embedding)

    async def _pass(self, batch: list[Patches]) -> list[torch.Tensor]:
        """Run the tower, and hold it to its contract."""
        embeddings = await asyncio.get_running_loop().run_in_executor(self._thread, self._encoder.encode, batch)
        rows, expected = [len(embedding) for embedding in embeddings], [item.tokens for item in batch]
        if rows != expected:
            raise EngineError(f"The vision tower made {rows} visual tokens instead of {expected}.")
        return embeddings

    def _finish(self, job: _Job, outcome: torch.Tensor | Exception) -> None:
        del self._jobs[job.key]
        job.finish(outcome)


class _Job:
    """One content on its way through the tower, and everybody who waits for it.

    Attributes:
        key: in the cache.
        name: digest of the visual tokens.
        size: in patches.
        callers: how many wait.
    """

    def __init__(self, key: bytes, name: bytes, patches: Patches) -> None:
        self.key = key
        self.name = name
        self.patches = patches
        self.size = patches.grid.patches
        self.callers = 0
        self._done = asyncio.Event()
        self._outcome: torch.Tensor | Exception | None = None

    def finish(self, outcome: torch.Tensor | Exception) -> None:
        self._outcome = outcome
        self._done.set()

    async def tokens(self, part: str) -> VisualTokens:
        """The outcome, for the caller whose request holds this content at `part`."""
        await self._done.wait()
        assert self._outcome is not None
        if isinstance(self._outcome, EngineClosed):
            raise EngineClosed(self._outcome.message)
        if isinstance(self._outcome, Exception):
            message = "The vision tower failed on this picture or video. Try again; the engine's log has the cause."
            raise EngineError(message, param=part, code="vision_failed") from self._outcome
        return VisualTokens(embedding=self._outcome, grid=self.patches.grid, digest=self.name)


def _salted(digest: bytes, cache_salt: str) -> bytes:
    """The digest itself without a salt; else one of both, of the same length."""
    if not cache_salt:
        return digest
    return hashlib.sha256(b"salted" + hashlib.sha256(cache_salt.encode()).digest() + digest).digest()


def _size(embedding: torch.Tensor) -> int:
    return embedding.element_size() * embedding.numel()
