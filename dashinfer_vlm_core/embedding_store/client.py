"""Lookups in a store within a time budget, and writes in the background: a store that fails only costs time."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import anyio

from .breaker import LOG_INTERVAL, CircuitBreaker
from .interface import NO_SECRET, EmbeddingStore, InvalidValueError, Read

if TYPE_CHECKING:
    import torch

    from .codec import EmbeddingCodec

logger: logging.Logger = logging.getLogger(__name__)

WRITE_TIMEOUT = 10.0
"""Seconds for writing one value."""

CLOSE_TIMEOUT = 2.0
"""Seconds for the writes that wait when a client is closed."""

MAX_VALUE_BYTES = 64 << 20
"""Larger values are neither looked up nor written."""

MAX_PENDING_BYTES = 256 << 20
"""Memory of embeddings that wait to be written; further ones are dropped."""


class Lookup(NamedTuple):
    """An embedding to look up.

    Attributes:
        digest: of the content and its salt.
        tokens: number of visual tokens.
    """

    digest: bytes
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingStoreStats:
    """Counters of an `EmbeddingStoreClient`.

    Attributes:
        hits: embeddings found.
        misses: embeddings not found.
        timeouts: embeddings whose lookup exceeded its time budget.
        errors: embeddings whose lookup failed.
        skipped: embeddings not looked up, since lookups pause after failures.
        invalid: values that were found and not used: they are damaged, or not from a holder of the secret.
        writes: embeddings written.
        write_errors: embeddings whose write failed.
        dropped: embeddings not written: too large, too many were waiting, or writes pause after failures.
        pending_bytes: memory of the embeddings that wait to be written.
        available: whether lookups do not pause.
    """

    hits: int = 0
    misses: int = 0
    timeouts: int = 0
    errors: int = 0
    skipped: int = 0
    invalid: int = 0
    writes: int = 0
    write_errors: int = 0
    dropped: int = 0
    pending_bytes: int = 0
    available: bool = True


class EmbeddingStoreClient:
    """Reads and writes the embeddings of one vision encoder. Belongs to one event loop.

    Args:
        store: the store; the client closes it.
        codec: the format of values.
        model_key: what embeddings depend on besides content and salt; part of the keys.
        secret: the shared secret, empty for none. With it, keys do not reveal whether a known image is stored.
        timeout: seconds for a lookup; None for the budget that the caller computes.
        clock: the monotonic clock, in seconds, of pauses after failures.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        codec: EmbeddingCodec,
        *,
        model_key: bytes,
        secret: bytes = b"",
        timeout: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._codec = codec
        self._model_key = model_key
        self._secret = secret or NO_SECRET
        self._timeout = timeout
        self._clock = clock
        self._lookups = CircuitBreaker("Lookups in the embedding store", clock)
        self._writes = CircuitBreaker("Writes to the embedding store", clock)
        self._pending: deque[tuple[bytes, torch.Tensor]] = deque()  # digests and embeddings
        self._pending_bytes = 0
        self._writer: asyncio.Task[None] | None = None
        self._next_log = clock()
        self._counts: Counter[str] = Counter()  # fields of EmbeddingStoreStats

    @property
    def stats(self) -> EmbeddingStoreStats:
        return EmbeddingStoreStats(
            **self._counts, pending_bytes=self._pending_bytes, available=not self._lookups.is_open
        )

    async def get(self, lookups: Sequence[Lookup], *, budget: float) -> list[torch.Tensor | None]:
        """Return the stored embeddings, in order; None for those that have to be encoded. Raises no error.

        Args:
            lookups: what to look up, in one operation.
            budget: seconds; after that, encoding is faster. The argument `timeout` replaces it.
        """
        found: list[torch.Tensor | None] = [None] * len(lookups)
        wanted = [i for i, lookup in enumerate(lookups) if self._codec.size(lookup.tokens) <= MAX_VALUE_BYTES]
        if wanted and not self._lookups.allows():
            self._counts["skipped"] += len(wanted)
        elif wanted:
            chosen = [lookups[i] for i in wanted]
            for i, embedding in zip(wanted, await self._get(chosen, self._timeout or budget), strict=True):
                found[i] = embedding
        return found

    def put(self, digest: bytes, embedding: torch.Tensor) -> None:
        """Write an embedding in the background, or drop it; never waits."""
        is_too_large = self._codec.size(len(embedding)) > MAX_VALUE_BYTES
        if is_too_large or (self._pending and self._pending_bytes + embedding.nbytes > MAX_PENDING_BYTES):
            self._counts["dropped"] += 1
            return
        self._pending.append((digest, embedding))
        self._pending_bytes += embedding.nbytes
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_pending(), name="embedding-store")

    async def close(self) -> None:
        """Write what is waiting, for a limited time, and close the store; idempotent."""
        if self._writer is not None and not self._writer.done():
            await asyncio.wait({self._writer}, timeout=CLOSE_TIMEOUT)
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        self._counts["dropped"] += len(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        try:
            with anyio.move_on_after(CLOSE_TIMEOUT):
                await self._store.close()
        except Exception as error:  # noqa: BLE001 - a store can raise anything
            logger.debug("closing the embedding store failed: %s", error)

    async def _get(self, lookups: Sequence[Lookup], seconds: float) -> Sequence[torch.Tensor | None]:
        keys = [self._key(lookup.digest) for lookup in lookups]
        reads = [Read(key.hex(), self._codec.size(item.tokens)) for key, item in zip(keys, lookups, strict=True)]
        try:
            with anyio.fail_after(seconds):
                values = await self._store.get(reads)
            if len(values) != len(reads):
                raise ValueError(f"{len(values)} values instead of {len(reads)}")
        except TimeoutError:
            return self._failed_lookups("timeouts", len(reads), f"no response within {1000 * seconds:.0f} ms")
        except Exception as error:  # noqa: BLE001 - a store can raise anything
            return self._failed_lookups("errors", len(reads), _reason(error))
        self._lookups.succeeded()
        return [
            await self._decode(key, value, lookup.tokens)
            for key, value, lookup in zip(keys, values, lookups, strict=True)
        ]

    def _failed_lookups(self, counter: str, count: int, reason: str) -> list[torch.Tensor | None]:
        self._counts[counter] += count
        self._lookups.failed(reason)
        return [None] * count

    async def _decode(self, key: bytes, value: bytes | None, tokens: int) -> torch.Tensor | None:
        if value is None:
            self._counts["misses"] += 1
            return None
        try:
            embedding = await asyncio.to_thread(self._codec.decode, key, value, tokens)
        except InvalidValueError as error:
            self._counts["invalid"] += 1
            if self._clock() >= self._next_log:
                self._next_log = self._clock() + LOG_INTERVAL
                logger.warning("A value in the embedding store is not used: %s. It is replaced.", error)
            return None
        self._counts["hits"] += 1
        return embedding

    async def _write_pending(self) -> None:
        while self._pending:
            digest, embedding = self._pending.popleft()
            try:
                await self._write(self._key(digest), embedding)
            finally:
                self._pending_bytes -= embedding.nbytes

    async def _write(self, key: bytes, embedding: torch.Tensor) -> None:
        if not self._writes.allows():
            self._counts["dropped"] += 1
            return
        try:
            value = await asyncio.to_thread(self._codec.encode, key, embedding)
            with anyio.fail_after(WRITE_TIMEOUT):
                await self._store.put(key.hex(), value)
        except Exception as error:  # noqa: BLE001 - a store can raise anything
            self._counts["write_errors"] += 1
            self._writes.failed(_reason(error))
        else:
            self._counts["writes"] += 1
            self._writes.succeeded()

    def _key(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, b"key" + hashlib.sha256(self._model_key).digest() + digest, "sha256")


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")[:200]
