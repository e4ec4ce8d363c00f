"""Who owns which rows of the pool of keys and values: a best-fit allocator of contiguous ranges."""

from __future__ import annotations


class Arena:
    """Hands out contiguous ranges of `size` rows.

    Contiguous, because attention then reads a request's keys as a view: gathering pages would copy them once per layer
    and step.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]  # (start, length), by start, never adjacent
        self._taken: dict[int, int] = {}

    @property
    def used(self) -> int:
        return sum(self._taken.values())

    def allocate(self, length: int) -> int | None:
        """The first row of a range of `length` rows (at least 1), or None if no gap is that long."""
        fitting = [gap for gap in self._free if gap[1] >= length]
        if not fitting:
            return None
        start, space = min(fitting, key=lambda gap: gap[1])
        self._free.remove((start, space))
        if space > length:
            self._free.append((start + length, space - length))
        self._taken[start] = length
        return start

    def free(self, start: int) -> None:
        """Give back the range that begins at `start`."""
        merged: list[tuple[int, int]] = []
        for gap in sorted([*self._free, (start, self._taken.pop(start))]):
            if merged and sum(merged[-1]) == gap[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + gap[1])
            else:
                merged.append(gap)
        self._free = merged
