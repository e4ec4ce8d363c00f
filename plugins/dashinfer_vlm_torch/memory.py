"""Who holds which rows of the pool of keys and values, and what ended runs have left in the others."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from itertools import islice
from typing import NamedTuple

from .arena import Arena, Slab
from .prefix import BLOCK, Trail

CANDIDATES = 8
"""Of many sequences with equal blocks, so many are compared token by token where they part: those listed last."""


class Move(NamedTuple):
    """Rows to copy within the pool; the two ranges may overlap."""

    source: int
    target: int
    rows: int


class Match(NamedTuple):
    """A slab that begins with the same `tokens` tokens."""

    slab: Slab
    tokens: int


class Memory:
    """Slabs of runs, and idle ones: what they hold is found by later runs, until somebody needs the room.

    Idle slabs leave when they were not used for longest, and lose their ends first. None is kept whose blocks another
    idle one has too.

    Rows are booked here and copied later: whoever uses the pool next carries out `take_moves` first, in order. A slab's
    `read` counts on that.
    """

    def __init__(self, rows: int, *, caching: bool) -> None:
        self._arena = Arena(rows)
        self._caching = caching
        self._index: dict[bytes, dict[Slab, None]] = {}  # an ordered set for each block's digest
        self._idle: OrderedDict[bytes, Slab] = OrderedDict()  # by their last block; the first was not used for longest
        self._moves: list[Move] = []

    @property
    def size(self) -> int:
        return self._arena.size

    @property
    def used(self) -> int:
        """Rows that runs hold."""
        return sum(slab.rows for slab in self._arena.slabs if not slab.idle)

    @property
    def cached(self) -> int:
        """Rows that are kept for later runs."""
        return sum(slab.rows for slab in self._idle.values())

    def take_moves(self) -> list[Move]:
        """What has to be copied before the pool is used next."""
        moves, self._moves = self._moves, []
        return moves

    def hold(self, trail: Trail, rows: int) -> Slab | None:
        """A slab of at least `rows` rows, in which the longest known beginning of `trail` is read; None if there is no
        room.

        The last token of `trail` is never among what is read: somebody wants its logits.
        """
        match = self._find(trail)
        if match and match.slab.idle and match.slab.read - match.tokens < BLOCK:
            return self._take_over(match, trail, rows)
        slab = Slab(trail=trail)
        if self._place(slab, rows, spare=match and match.slab):
            self._copy(match, slab)
            return slab
        return self._take_over(match, trail, rows) if match and match.slab.idle else None

    def grow(self, slab: Slab, rows: int) -> bool:
        """Let a run's slab have `rows` rows at least, here or elsewhere; whether there is room."""
        return rows <= slab.rows or self._place(slab, rows)

    def advance(self, slab: Slab, read: int) -> None:
        """The keys and values of the first `read` tokens of a slab are there."""
        slab.read = read
        if self._caching:
            for digest in slab.trail.digests[slab.listed : read // BLOCK]:
                self._index.setdefault(digest, {})[slab] = None
            slab.listed = read // BLOCK

    def catch_up(self, slab: Slab) -> int:
        """Copy what other slabs have of the tokens that are to be read next; how many tokens that are."""
        before = slab.read
        self._copy(self._find(slab.trail, besides=slab), slab)
        return slab.read - before

    def release(self, slab: Slab, *, keep: bool = True) -> None:
        """Its run has ended.

        Args:
            slab: a run's.
            keep: whether what it holds is right, so that later runs may have it.
        """
        if keep:
            self._rest(slab)
        else:
            self._drop(slab)

    def _find(self, trail: Trail, *, besides: Slab | None = None) -> Match | None:
        """The slab that begins as `trail` does for longest. A slab is listed with each of its blocks, so that the last
        known one can be found by bisection."""
        blocks = bisect_left(trail.digests, True, key=lambda digest: digest not in self._index)
        if not blocks:
            return None
        start = blocks * BLOCK
        found = islice(reversed(self._index[trail.digests[blocks - 1]]), CANDIDATES)
        matches = [
            Match(slab, min(start + trail.common(slab.trail, start), slab.read, len(trail) - 1))
            for slab in found
            if slab is not besides
        ]
        return max(matches, key=lambda match: match.tokens, default=None)

    def _copy(self, match: Match | None, slab: Slab) -> None:
        """Let `slab` have what it lacks of a match."""
        if match is None or match.tokens <= slab.read:
            return
        source, read = match.slab, slab.read
        self._moves.append(Move(source.start + read, slab.start + read, match.tokens - read))
        self.advance(slab, match.tokens)
        if source.idle:
            self._idle.move_to_end(_key(source))

    def _take_over(self, match: Match, trail: Trail, rows: int) -> Slab | None:
        """The idle slab itself, without what follows the match: there is nothing to copy unless it has to move."""
        slab, read = match.slab, match.slab.read
        self._wake(slab)
        slab.read = match.tokens
        if not self._place(slab, rows):
            slab.read = read
            self._lay(slab)
            return None
        self._unlist(slab, slab.read // BLOCK)
        slab.trail = trail
        return slab

    def _place(self, slab: Slab, rows: int, *, spare: Slab | None = None) -> bool:
        """Find `rows` rows for a slab, at the cost of idle ones other than `spare`, and move it there."""
        start = self._arena.fit(slab, rows, (idle for idle in self._idle.values() if idle is not spare))
        if start is None:
            return False
        for other in self._arena.overlapping(start, start + rows):
            if other is not slab:
                self._cut(other, start - other.start)
        if slab.read and start != slab.start:
            self._moves.append(Move(slab.start, start, slab.read))
        self._arena.put(slab, start, rows)
        return True

    def _cut(self, slab: Slab, rows: int) -> None:
        """Leave an idle slab its first rows, if they are worth it; it stays the next to go."""
        self._wake(slab)
        self._unlist(slab, max(rows, 0) // BLOCK)
        slab.read = max(rows, 0)
        self._rest(slab)
        if slab.idle:
            self._idle.move_to_end(_key(slab), last=False)

    def _rest(self, slab: Slab) -> None:
        """Let a slab go idle, unless its blocks are kept already; those that it makes superfluous go."""
        others = self._index[_key(slab)] if slab.listed else {}
        longer = next((other for other in others if other.idle and other.read >= slab.read), None)
        if longer:
            self._idle.move_to_end(_key(longer))
        if longer or not slab.listed:
            self._drop(slab)
            return
        for digest in slab.trail.digests[: slab.listed]:
            if shorter := self._idle.get(digest):
                self._drop(shorter)
        slab.trail = slab.trail.first(slab.read)
        slab.rows = slab.read
        self._lay(slab)

    def _lay(self, slab: Slab) -> None:
        slab.idle = True
        self._idle[_key(slab)] = slab

    def _wake(self, slab: Slab) -> None:
        slab.idle = False
        del self._idle[_key(slab)]

    def _drop(self, slab: Slab) -> None:
        if slab.idle:
            self._wake(slab)
        self._unlist(slab, 0)
        self._arena.remove(slab)

    def _unlist(self, slab: Slab, blocks: int) -> None:
        """Let a slab be found by its first `blocks` blocks alone."""
        for digest in slab.trail.digests[blocks : slab.listed]:
            holders = self._index[digest]
            del holders[slab]
            if not holders:
                del self._index[digest]
        slab.listed = min(slab.listed, blocks)


def _key(slab: Slab) -> bytes:
    """The digest of a slab's last block, which covers all of them."""
    return slab.trail.digests[slab.listed - 1]
