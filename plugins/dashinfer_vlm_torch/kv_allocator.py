"""Where in the pool of keys and values a slab of contiguous rows can lie."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from .prefix_hash import PrefixHash


@dataclass(slots=True, kw_only=True, eq=False)
class KVAllocation:
    """Contiguous rows of the pool, which hold the keys and values of one sequence.

    Contiguous, because attention then reads a request's keys as a view: gathering pages would copy them once per layer
    and step.

    Attributes:
        trail: the sequence.
        start: the first row; -1 before there is one.
        rows: how many there are.
        read: tokens, from the first on, whose keys and values are there.
        listed: blocks of the trail by which the slab can be found.
        idle: whether nobody runs on it any more.
    """

    prefix: PrefixHash
    start: int = -1
    rows: int = 0
    num_computed_tokens: int = 0
    num_indexed_blocks: int = 0
    is_free: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.rows


class KVAllocator:
    """Slabs in `size` rows, none on top of another. What it does takes time linear in the number of slabs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._allocations: list[KVAllocation] = []  # by start

    @property
    def allocations(self) -> tuple[KVAllocation, ...]:
        """By their rows."""
        return tuple(self._allocations)

    def place(self, allocation: KVAllocation, start: int, rows: int) -> None:
        """Let a slab, new or not, have these rows, which belong to nobody else."""
        if allocation.rows:
            self.remove(allocation)
        allocation.start, allocation.rows = start, rows
        insort(self._allocations, allocation, key=attrgetter("start"))

    def remove(self, allocation: KVAllocation) -> None:
        self._allocations.remove(allocation)

    def overlapping(self, start: int, stop: int) -> list[KVAllocation]:
        return [allocation for allocation in self._allocations if allocation.start < stop and start < allocation.stop]

    def find_start(self, allocation: KVAllocation, rows: int, leaving: Iterable[KVAllocation]) -> int | None:
        """The first of `rows` rows that `slab` can have; None if there is no way.

        Its own rows count as free. It stays where it is if it can, else it goes into the tightest gap, else to the end
        of the first range that is free when others have left.

        Args:
            slab: a new one, or one that is too small.
            rows: how many it needs.
            leaving: slabs that may be removed, or cut at their end, in the order in which they should go.
        """
        gaps = self._gaps(allocation)
        for start, stop in gaps:
            if start <= allocation.start <= stop - rows:
                return allocation.start
        large_enough = [gap for gap in gaps if gap[1] - gap[0] >= rows]
        if large_enough:
            return min(large_enough, key=lambda gap: gap[1] - gap[0])[0]
        start, stop = _first_free(gaps, rows, leaving)
        if start <= allocation.start <= stop - rows:
            return allocation.start
        return stop - rows if stop else None

    def _gaps(self, without: KVAllocation) -> list[tuple[int, int]]:
        """Free ranges (start, stop) as if one slab were not there."""
        edges = [
            edge
            for allocation in self._allocations
            if allocation is not without
            for edge in (allocation.start, allocation.stop)
        ]
        edges = [0, *edges, self.size]
        return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def _first_free(gaps: list[tuple[int, int]], rows: int, leaving: Iterable[KVAllocation]) -> tuple[int, int]:
    """The first range of at least `rows` that comes about when slabs leave one after the other; (0, 0) if none does."""
    stops, starts = dict(gaps), {stop: start for start, stop in gaps}
    for allocation in leaving:
        start, stop = starts.pop(allocation.start, allocation.start), stops.pop(allocation.stop, allocation.stop)
        stops[start], starts[stop] = stop, start
        if stop - start >= rows:
            return start, stop
    return 0, 0
