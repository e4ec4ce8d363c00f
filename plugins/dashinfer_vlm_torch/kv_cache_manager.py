"""Who holds which rows of the pool of keys and values, and what ended runs have left in the others."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

from .kv_allocator import KVAllocation, KVAllocator
from .prefix_hash import BLOCK, PrefixHash

CANDIDATES = 8
"""Of many sequences with equal blocks, so many are compared token by token where they part: those listed last."""


class KVCopy(NamedTuple):
    """Rows to copy within the pool; the two ranges may overlap."""

    source: int
    target: int
    rows: int


class PrefixMatch(NamedTuple):
    """A slab that begins with the same `tokens` tokens."""

    allocation: KVAllocation
    num_tokens: int


class KVCacheManager:
    """Slabs of runs, and idle ones: what they hold is found by later runs, until somebody needs the room.

    Idle slabs leave when they were not used for longest, and lose their ends first. None is kept whose blocks another
    idle one has too.

    Rows are booked here and copied later: whoever uses the pool next carries out `take_moves` first, in order. A slab's
    `read` counts on that.
    """

    def __init__(self, rows: int, *, caching: bool) -> None:
        self._allocator = KVAllocator(rows)
        self._caching = caching
        self._index: dict[bytes, dict[KVAllocation, None]] = {}  # an ordered set for each block's digest
        self._free: OrderedDict[bytes, KVAllocation] = (
            OrderedDict()
        )  # by their last block; the first was not used for longest
        self._copies: list[KVCopy] = []

    @property
    def size(self) -> int:
        return self._allocator.size

    @property
    def used(self) -> int:
        """Rows that runs hold."""
        return sum(allocation.rows for allocation in self._allocator.allocations if not allocation.is_free)

    @property
    def cached(self) -> int:
        """Rows that are kept for later runs."""
        return sum(allocation.rows for allocation in self._free.values())

    def take_copies(self) -> list[KVCopy]:
        """What has to be copied before the pool is used next."""
        moves, self._copies = self._copies, []
        return moves

    def allocate(self, prefix: PrefixHash, rows: int) -> KVAllocation | None:
        """A slab of at least `rows` rows, in which the longest known beginning of `trail` is read; None if there is no
        room.

        The last token of `trail` is never among what is read: somebody wants its logits.
        """
        match = self._find_prefix(prefix)
        if match and match.allocation.is_free and match.allocation.num_computed_tokens - match.num_tokens < BLOCK:
            return self._reuse(match, prefix, rows)
        allocation = KVAllocation(prefix=prefix)
        if self._place(allocation, rows, spare=match and match.allocation):
            self._copy(match, allocation)
            return allocation
        return self._reuse(match, prefix, rows) if match and match.allocation.is_free else None

    def grow(self, allocation: KVAllocation, rows: int) -> bool:
        """Let a run's slab have `rows` rows at least, here or elsewhere; whether there is room."""
        return rows <= allocation.rows or self._place(allocation, rows)

    def mark_computed(self, allocation: KVAllocation, read: int) -> None:
        """The keys and values of the first `read` tokens of a slab are there."""
        allocation.num_computed_tokens = read
        if self._caching:
            for digest in allocation.prefix.digests[allocation.num_indexed_blocks : read // BLOCK]:
                self._index.setdefault(digest, {})[allocation] = None
            allocation.num_indexed_blocks = read // BLOCK

    def extend_from_cache(self, allocation: KVAllocation) -> int:
        """Copy what other slabs have of the tokens that are to be read next; how many tokens that are."""
        before = allocation.num_computed_tokens
        self._copy(self._find_prefix(allocation.prefix, besides=allocation), allocation)
        return allocation.num_computed_tokens - before

    def free(self, allocation: KVAllocation, *, keep: bool = True) -> None:
        """Its run has ended.

        Args:
            slab: a run's.
            keep: whether what it holds is right, so that later runs may have it.
        """
        if keep:
            self._retain(allocation)
        else:
            self._discard(allocation)

    def _find_prefix(self, prefix: PrefixHash, *, besides: KVAllocation | None = None) -> PrefixMatch | None:
        """The slab that begins as `trail` does for longest. A slab is listed with each of its blocks, so that the last
        known one can be found by bisection."""
        blocks = bisect_left(prefix.digests, True, key=lambda digest: digest not in self._index)
        if not blocks:
            return None
        start = blocks * BLOCK
        found = islice(reversed(self._index[prefix.digests[blocks - 1]]), CANDIDATES)
        matches = [
            PrefixMatch(
                allocation,
                min(
                    start + prefix.common_length(allocation.prefix, start),
                    allocation.num_computed_tokens,
                    len(prefix) - 1,
                ),
            )
            for allocation in found
            if allocation is not besides
        ]
        return max(matches, key=lambda match: match.num_tokens, default=None)

    def _copy(self, match: PrefixMatch | None, allocation: KVAllocation) -> None:
        """Let `slab` have what it lacks of a match."""
        if match is None or match.num_tokens <= allocation.num_computed_tokens:
            return
        source, read = match.allocation, allocation.num_computed_tokens
        self._copies.append(KVCopy(source.start + read, allocation.start + read, match.num_tokens - read))
        self.mark_computed(allocation, match.num_tokens)
        if source.is_free:
            self._free.move_to_end(_key(source))

    def _reuse(self, match: PrefixMatch, prefix: PrefixHash, rows: int) -> KVAllocation | None:
        """The idle slab itself, without what follows the match: there is nothing to copy unless it has to move."""
        allocation, read = match.allocation, match.allocation.num_computed_tokens
        self._remove_free(allocation)
        allocation.num_computed_tokens = match.num_tokens
        if not self._place(allocation, rows):
            allocation.num_computed_tokens = read
            self._add_free(allocation)
            return None
        self._unindex(allocation, allocation.num_computed_tokens // BLOCK)
        allocation.prefix = prefix
        return allocation

    def _place(self, allocation: KVAllocation, rows: int, *, spare: KVAllocation | None = None) -> bool:
        """Find `rows` rows for a slab, at the cost of idle ones other than `spare`, and move it there."""
        start = self._allocator.find_start(
            allocation, rows, (idle for idle in self._free.values() if idle is not spare)
        )
        if start is None:
            return False
        for other in self._allocator.overlapping(start, start + rows):
            if other is not allocation:
                self._shrink(other, start - other.start)
        if allocation.num_computed_tokens and start != allocation.start:
            self._copies.append(KVCopy(allocation.start, start, allocation.num_computed_tokens))
        self._allocator.place(allocation, start, rows)
        return True

    def _shrink(self, allocation: KVAllocation, rows: int) -> None:
        """Leave an idle slab its first rows, if they are worth it; it stays the next to go."""
        self._remove_free(allocation)
        self._unindex(allocation, max(rows, 0) // BLOCK)
        allocation.num_computed_tokens = max(rows, 0)
        self._retain(allocation)
        if allocation.is_free:
            self._free.move_to_end(_key(allocation), last=False)

    def _retain(self, allocation: KVAllocation) -> None:
        """Let a slab go idle, unless its blocks are kept already; those that it makes superfluous go."""
        others = self._index[_key(allocation)] if allocation.num_indexed_blocks else {}
        longer = next(
            (
                other
                for other in others
                if other.is_free and other.num_computed_tokens >= allocation.num_computed_tokens
            ),
            None,
        )
        if longer:
            self._free.move_to_end(_key(longer))
        if longer or not allocation.num_indexed_blocks:
            self._discard(allocation)
            return
        for digest in allocation.prefix.digests[: allocation.num_indexed_blocks]:
            if shorter := self._free.get(digest):
                self._discard(shorter)
        allocation.prefix = allocation.prefix.truncated(allocation.num_computed_tokens)
        allocation.rows = allocation.num_computed_tokens
        self._add_free(allocation)

    def _add_free(self, allocation: KVAllocation) -> None:
        allocation.is_free = True
        self._free[_key(allocation)] = allocation

    def _remove_free(self, allocation: KVAllocation) -> None:
        allocation.is_free = False
        del self._free[_key(allocation)]

    def _discard(self, allocation: KVAllocation) -> None:
        if allocation.is_free:
            self._remove_free(allocation)
        self._unindex(allocation, 0)
        self._allocator.remove(allocation)

    def _unindex(self, allocation: KVAllocation, blocks: int) -> None:
        """Let a slab be found by its first `blocks` blocks alone."""
        for digest in allocation.prefix.digests[blocks : allocation.num_indexed_blocks]:
            holders = self._index[digest]
            del holders[allocation]
            if not holders:
                del self._index[digest]
        allocation.num_indexed_blocks = min(allocation.num_indexed_blocks, blocks)


def _key(allocation: KVAllocation) -> bytes:
    """The digest of a slab's last block, which covers all of them."""
    return allocation.prefix.digests[allocation.num_indexed_blocks - 1]
