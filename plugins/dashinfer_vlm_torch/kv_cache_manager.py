"""Assign the rows of the KV pool to sequences, and keep the rows of finished sequences as a prefix cache."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from .kv_cache import KVAllocation, KVAllocator
from .prefix_hash import BLOCK_SIZE, PrefixHash

MAX_CANDIDATES = 8
"""Maximum number of allocations that are compared token by token. If more share a block, only the most recently
indexed ones are compared."""


class KVCopy(NamedTuple):
    """Rows to copy within the pool; the two ranges may overlap."""

    source: int
    target: int
    rows: int


class PrefixMatch(NamedTuple):
    """An allocation with computed tokens of a prefix.

    Attributes:
        allocation: the allocation.
        num_matched: leading tokens that match.
        num_tokens: those of them that may be taken from the cache.
    """

    allocation: KVAllocation
    num_matched: int
    num_tokens: int


class KVCacheManager:
    """Manages the allocations of running sequences and the cached ones, which form the prefix cache.

    Cached allocations are evicted in least recently used order, and truncated before they are discarded. An allocation
    is not kept if another cached one has the same blocks.

    This class only records which rows are copied: the next user of the pool has to execute `take_copies` first, in
    order. `KVAllocation.num_computed_tokens` assumes that these copies have been executed.

    Args:
        rows: number of rows of the pool.
        caching: whether to keep the rows of finished sequences.
        usable_tokens: how many of the matching tokens of a prefix may be taken from the cache; all by default.
    """

    def __init__(
        self, rows: int, *, caching: bool, usable_tokens: Callable[[PrefixHash, int], int] | None = None
    ) -> None:
        self._allocator = KVAllocator(rows)
        self._caching = caching
        self._usable_tokens = usable_tokens
        self._index: dict[bytes, dict[KVAllocation, None]] = {}  # an ordered set for each block's digest
        # By the digest of the last block, least recently used first.
        self._cached: OrderedDict[bytes, KVAllocation] = OrderedDict()
        self._copies: list[KVCopy] = []

    @property
    def used(self) -> int:
        """Rows of running sequences."""
        return sum(allocation.rows for allocation in self._allocator.allocations if not allocation.is_cached)

    @property
    def cached(self) -> int:
        """Rows that are kept for later sequences."""
        return sum(allocation.rows for allocation in self._cached.values())

    def take_copies(self) -> list[KVCopy]:
        """Return and clear the copies to execute before the pool is used again."""
        copies = self._copies
        self._copies = []
        return copies

    def allocate(self, prefix: PrefixHash, rows: int) -> KVAllocation | None:
        """Allocate at least `rows` rows that begin with the longest cached prefix of `prefix`; None if that is not
        possible.

        The last token of `prefix` is never taken from the cache, since its logits are required.
        """
        match = self._find_prefix(prefix)
        allocation = self._allocate(match, prefix, rows)
        if allocation:
            allocation.num_matched_tokens = match.num_matched if match else 0
        return allocation

    def grow(self, allocation: KVAllocation, rows: int) -> bool:
        """Grow an allocation to at least `rows` rows, in place or by moving it; returns whether that was possible."""
        return rows <= allocation.rows or self._reserve_rows(allocation, rows)

    def mark_computed(self, allocation: KVAllocation, num_tokens: int) -> None:
        """Record that the keys and values of the first `num_tokens` tokens are computed, and index their blocks."""
        allocation.num_computed_tokens = num_tokens
        if self._caching:
            for digest in allocation.prefix.digests[allocation.num_indexed_blocks : num_tokens // BLOCK_SIZE]:
                self._index.setdefault(digest, {})[allocation] = None
            allocation.num_indexed_blocks = num_tokens // BLOCK_SIZE

    def extend_from_cache(self, allocation: KVAllocation) -> int:
        """Copy the next pending tokens from other allocations that have them; returns the number of tokens copied."""
        before = allocation.num_computed_tokens
        self._copy(self._find_prefix(allocation.prefix, exclude=allocation), allocation)
        return allocation.num_computed_tokens - before

    def free(self, allocation: KVAllocation, *, keep: bool = True) -> None:
        """Free the allocation of a sequence.

        Args:
            allocation: an allocation that is in use.
            keep: whether its keys and values are valid and may be cached.
        """
        if keep:
            self._retain(allocation)
        else:
            self._discard(allocation)

    def forget(self, cache_salt: str) -> None:
        """Discard the cached allocations of prompts with this salt."""
        for allocation in list(self._cached.values()):
            if allocation.prefix.cache_salt == cache_salt:
                self._discard(allocation)

    def _allocate(self, match: PrefixMatch | None, prefix: PrefixHash, rows: int) -> KVAllocation | None:
        is_reusable = match is not None and match.allocation.is_cached
        if match and is_reusable and match.allocation.num_computed_tokens - match.num_matched < BLOCK_SIZE:
            return self._reuse(match, prefix, rows)
        allocation = KVAllocation(prefix=prefix)
        if self._reserve_rows(allocation, rows, exclude=match and match.allocation):
            self._copy(match, allocation)
            return allocation
        return self._reuse(match, prefix, rows) if match and is_reusable else None

    def _find_prefix(self, prefix: PrefixHash, *, exclude: KVAllocation | None = None) -> PrefixMatch | None:
        """Find the allocation with the longest common prefix. Allocations are indexed by each of their blocks, so that
        the last cached block can be found by bisection."""
        blocks = bisect_left(prefix.digests, True, key=lambda digest: digest not in self._index)
        if not blocks:
            return None
        start = blocks * BLOCK_SIZE
        candidates = islice(reversed(self._index[prefix.digests[blocks - 1]]), MAX_CANDIDATES)
        matches = []
        for allocation in candidates:
            if allocation is not exclude:
                num_equal = start + prefix.common_length(allocation.prefix, start)
                num_matched = min(num_equal, allocation.num_computed_tokens, len(prefix) - 1)
                matches.append(PrefixMatch(allocation, num_matched, num_matched))
        match = max(matches, key=attrgetter("num_matched"), default=None)
        if match is None or self._usable_tokens is None:
            return match
        return match._replace(num_tokens=self._usable_tokens(prefix, match.num_matched))

    def _copy(self, match: PrefixMatch | None, allocation: KVAllocation) -> None:
        if match is None or match.num_tokens <= allocation.num_computed_tokens:
            return
        source = match.allocation
        num_computed = allocation.num_computed_tokens
        num_missing = match.num_tokens - num_computed
        self._copies.append(KVCopy(source.start + num_computed, allocation.start + num_computed, num_missing))
        if not num_computed:  # otherwise, the draft model's rows before these may be missing
            allocation.num_drafted_tokens = min(source.num_drafted_tokens, match.num_tokens)
        self.mark_computed(allocation, match.num_tokens)
        if source.is_cached:
            self._cached.move_to_end(source.last_digest)

    def _reuse(self, match: PrefixMatch, prefix: PrefixHash, rows: int) -> KVAllocation | None:
        # Nothing is copied unless it has to move.
        allocation = match.allocation
        num_computed = allocation.num_computed_tokens
        self._remove_cached(allocation)
        num_drafted = allocation.num_drafted_tokens
        allocation.num_computed_tokens = match.num_tokens
        allocation.num_drafted_tokens = min(num_drafted, match.num_tokens)
        if not self._reserve_rows(allocation, rows):
            allocation.num_computed_tokens = num_computed
            allocation.num_drafted_tokens = num_drafted
            self._add_cached(allocation)
            return None
        self._unindex(allocation, allocation.num_computed_tokens // BLOCK_SIZE)
        allocation.prefix = prefix
        return allocation

    def _reserve_rows(self, allocation: KVAllocation, rows: int, *, exclude: KVAllocation | None = None) -> bool:
        evictable = (cached for cached in self._cached.values() if cached is not exclude)
        start = self._allocator.find_start(allocation, rows, evictable)
        if start is None:
            return False
        for other in self._allocator.overlapping(start, start + rows):
            if other is not allocation:
                self._shrink(other, start - other.start)
        if allocation.num_computed_tokens and start != allocation.start:
            self._copies.append(KVCopy(allocation.start, start, allocation.num_computed_tokens))
            allocation.num_drafted_tokens = min(allocation.num_drafted_tokens, allocation.num_computed_tokens)
        self._allocator.assign(allocation, start, rows)
        return True

    def _shrink(self, allocation: KVAllocation, rows: int) -> None:
        # It remains the next to be evicted, and is discarded if no whole block is left.
        self._remove_cached(allocation)
        self._unindex(allocation, max(rows, 0) // BLOCK_SIZE)
        allocation.num_computed_tokens = max(rows, 0)
        allocation.num_drafted_tokens = min(allocation.num_drafted_tokens, allocation.num_computed_tokens)
        self._retain(allocation)
        if allocation.is_cached:
            self._cached.move_to_end(allocation.last_digest, last=False)

    def _retain(self, allocation: KVAllocation) -> None:
        """Cache an allocation unless its blocks are already cached; discard others that it makes redundant."""
        if not allocation.num_indexed_blocks:
            self._discard(allocation)
            return
        for other in self._index[allocation.last_digest]:
            if other.is_cached and other.num_computed_tokens >= allocation.num_computed_tokens:
                self._cached.move_to_end(other.last_digest)
                self._discard(allocation)
                return
        for digest in allocation.prefix.digests[: allocation.num_indexed_blocks]:
            if shorter := self._cached.get(digest):
                self._discard(shorter)
        allocation.prefix = allocation.prefix.truncated(allocation.num_computed_tokens)
        allocation.rows = allocation.num_computed_tokens
        allocation.num_drafted_tokens = min(allocation.num_drafted_tokens, allocation.rows)
        self._add_cached(allocation)

    def _add_cached(self, allocation: KVAllocation) -> None:
        allocation.is_cached = True
        self._cached[allocation.last_digest] = allocation

    def _remove_cached(self, allocation: KVAllocation) -> None:
        allocation.is_cached = False
        del self._cached[allocation.last_digest]

    def _discard(self, allocation: KVAllocation) -> None:
        if allocation.is_cached:
            self._remove_cached(allocation)
        self._unindex(allocation, 0)
        self._allocator.remove(allocation)

    def _unindex(self, allocation: KVAllocation, blocks: int) -> None:
        for digest in allocation.prefix.digests[blocks : allocation.num_indexed_blocks]:
            holders = self._index[digest]
            del holders[allocation]
            if not holders:
                del self._index[digest]
        allocation.num_indexed_blocks = min(allocation.num_indexed_blocks, blocks)
