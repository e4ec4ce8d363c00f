"""Keys and values of all sequences, and which rows each of them has."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

import torch

from dashinfer_vlm_core.text_spec import TextModelSpec

from .prefix_hash import PrefixHash


class KVCache:
    """One pool for all sequences; `KVCacheManager` assigns each a contiguous range of rows.

    On a CPU, the operating system allocates memory when a row is first written, so a new pool costs almost nothing.

    Attributes:
        pool: [attention layers, 2 * kv heads, tokens, head_dim], keys first. The last layer is that of the head for
            multi-token prediction, if there is one.
        scales: float32 [attention layers, 2 * kv heads, tokens], the scale of each row of an int8 pool; None for other
            dtypes. They are a separate tensor, so that the rows keep their alignment, and attention reads the scales
            of consecutive keys as a vector.
    """

    def __init__(self, config: TextModelSpec, tokens: int, *, device: str, dtype: torch.dtype) -> None:
        attention = config.attention
        shape = (config.num_cache_layers, 2 * attention.num_kv_heads, tokens)
        self.pool: torch.Tensor = torch.empty((*shape, attention.head_dim), device=device, dtype=dtype)
        self.scales: torch.Tensor | None = None
        if dtype == torch.int8:
            self.scales = torch.empty(shape, device=device, dtype=torch.float32)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy rows; the ranges may overlap."""
        overlap = abs(source - target) < rows
        for tensor in (self.pool,) if self.scales is None else (self.pool, self.scales):
            for layer in tensor:
                moved = layer[:, source : source + rows]
                layer[:, target : target + rows].copy_(moved.clone() if overlap else moved)


@dataclass(slots=True, kw_only=True, eq=False)
class KVAllocation:
    """Contiguous rows of the pool with the keys and values of one sequence.

    The rows are contiguous because attention then reads a sequence's keys as a view. Gathering pages would copy them
    once per layer and step.

    Attributes:
        prefix: the content of the sequence.
        start: the first row; -1 before rows are assigned.
        rows: number of rows.
        num_computed_tokens: leading tokens whose keys and values are computed.
        num_indexed_blocks: leading blocks by which the prefix cache finds it.
        num_drafted_tokens: leading tokens whose keys and values a draft model has computed in its cache, in the rows of
            this allocation.
        num_matched_tokens: leading tokens that another one had computed when it was allocated.
        is_cached: whether its sequence has left it to the prefix cache; a running sequence uses it otherwise.
    """

    prefix: PrefixHash
    start: int = -1
    rows: int = 0
    num_computed_tokens: int = 0
    num_drafted_tokens: int = 0
    num_indexed_blocks: int = 0
    num_matched_tokens: int = 0
    is_cached: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.rows

    @property
    def last_digest(self) -> bytes:
        """The digest of the last indexed block, which covers all preceding blocks."""
        return self.prefix.digests[self.num_indexed_blocks - 1]


class KVAllocator:
    """Disjoint allocations within `size` rows. Every operation takes time linear in the number of allocations.

    Attributes:
        size: number of rows.
        allocations: all of them, in the order of their rows.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.allocations: list[KVAllocation] = []

    def assign(self, allocation: KVAllocation, start: int, rows: int) -> None:
        """Assign rows, which must be free, to a new or existing allocation."""
        if allocation.rows:
            self.remove(allocation)
        allocation.start = start
        allocation.rows = rows
        insort(self.allocations, allocation, key=attrgetter("start"))

    def remove(self, allocation: KVAllocation) -> None:
        self.allocations.remove(allocation)

    def overlapping(self, start: int, stop: int) -> list[KVAllocation]:
        return [allocation for allocation in self.allocations if allocation.start < stop and start < allocation.stop]

    def find_start(self, allocation: KVAllocation, rows: int, evictable: Iterable[KVAllocation]) -> int | None:
        """Find the first row of `rows` contiguous rows for `allocation`; None if that is impossible.

        Its own rows count as free. In order of preference: its current start, the smallest gap that is large enough,
        the end of the first range that becomes free by eviction.

        Args:
            allocation: a new allocation, or one that is too small.
            rows: the required number of rows.
            evictable: allocations that may be removed or truncated, in order of eviction.
        """
        gaps = self._gaps(allocation)
        for start, stop in gaps:
            if start <= allocation.start <= stop - rows:
                return allocation.start
        large_enough = [gap for gap in gaps if gap[1] - gap[0] >= rows]
        if large_enough:
            return min(large_enough, key=lambda gap: gap[1] - gap[0])[0]
        start, stop = _first_free(gaps, rows, evictable)
        if start <= allocation.start <= stop - rows:
            return allocation.start
        return stop - rows if stop else None

    def _gaps(self, without: KVAllocation) -> list[tuple[int, int]]:
        others = [allocation for allocation in self.allocations if allocation is not without]
        starts = [0, *(other.stop for other in others)]
        stops = [*(other.start for other in others), self.size]
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]


def _first_free(gaps: list[tuple[int, int]], rows: int, evictable: Iterable[KVAllocation]) -> tuple[int, int]:
    """The first range of at least `rows` rows that evicting allocations one by one frees; (0, 0) if none."""
    stops = dict(gaps)
    starts = {stop: start for start, stop in gaps}
    for allocation in evictable:
        start = starts.pop(allocation.start, allocation.start)
        stop = stops.pop(allocation.stop, allocation.stop)
        stops[start] = stop
        starts[stop] = start
        if stop - start >= rows:
            return start, stop
    return 0, 0
