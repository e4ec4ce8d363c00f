"""Assign the slots of recurrent states to sequences, and keep some states for later sequences, without tensors.

The states of prompts are kept between chunks only, where steps of a prefill end too. Therefore a prompt's chunks, and
its bits, do not depend on how it is divided into steps, nor on what was cached. The end of an output can be anywhere,
since decoding computes other bits anyway.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from dashinfer_vlm_core.decoders import DecodeRequest
from dashinfer_vlm_core.kernels.delta_net import CHUNK

from .chunk_boundaries import ChunkBoundaries
from .prefix_hash import PrefixHash

NO_STATE = -1
"""The slot that is read before the first token: zeros."""


@dataclass(slots=True, kw_only=True, eq=False)
class StateSlots:
    """The slots of a running sequence: a step reads one and writes the other, so that it can be repeated.

    Attributes:
        prefix: the content of the sequence.
        boundaries: where its chunks end.
        prompt_length: tokens of its prompt.
        checkpoints: increasing positions in the prompt after which the state is kept.
        current: the slot with the state after `num_tokens` tokens. If it is cached, others may read it too.
        num_tokens: all computed tokens, or fewer if the sequence ends within a draft.
        spare: the slot that the next step writes.
        saved: the slots that the next step writes too, by the number of tokens whose state it is.
        added: digests of the states that it added to the cache.
        newest: the one of them after all checkpoints; empty if there is none.
    """

    prefix: PrefixHash
    boundaries: ChunkBoundaries
    prompt_length: int
    checkpoints: tuple[int, ...]
    current: int = NO_STATE
    num_tokens: int = 0
    spare: int = NO_STATE
    saved: dict[int, int] = field(default_factory=dict)
    added: set[bytes] = field(default_factory=set)
    newest: bytes = b""

    def digests_to_come(self, num_tokens: int) -> list[bytes]:
        """Return the digests of the checkpoints after `num_tokens`."""
        return [self.prefix.digest(position) for position in self.checkpoints if position > num_tokens]


class CachedState(NamedTuple):
    """A slot with the state after `num_tokens` tokens."""

    slot: int
    num_tokens: int


class StateManager:
    """Manages the slots of running sequences and the cached ones, which are evicted in least recently used order.

    A slot is free when nobody uses it: the cache, or a sequence. Each sequence has a current and a spare slot. Only the
    other slots are reserved for states within a step, so that there is always one that is free or can be evicted.

    Args:
        slots: number of slots, at least two.
        max_sequences: maximum number of running sequences.
        caching: whether states are kept.

    Attributes:
        max_sequences: as above, or fewer if there are not enough slots.
    """

    def __init__(self, slots: int, max_sequences: int, *, caching: bool) -> None:
        self.max_sequences: int = count_sequences(slots, max_sequences)
        self._caching = caching
        self._num_reservable = slots - 2 * self.max_sequences if caching else 0
        self._free = list(range(slots))
        self._num_users = [0] * slots
        self._cached: OrderedDict[bytes, CachedState] = OrderedDict()  # by the digest of the prefix

    @property
    def used(self) -> int:
        """Slots that only running sequences use."""
        return len(self._num_users) - len(self._free) - len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def usable_tokens(self, prefix: PrefixHash, num_tokens: int) -> int:
        """Return the number of leading tokens, at most `num_tokens`, after which the state is cached; 0 if none is."""
        lengths = {state.num_tokens for state in self._cached.values() if state.num_tokens <= num_tokens}
        return next((length for length in sorted(lengths, reverse=True) if prefix.digest(length) in self._cached), 0)

    def allocate(
        self,
        request: DecodeRequest,
        prefix: PrefixHash,
        boundaries: ChunkBoundaries,
        positions: set[int],
        num_tokens: int,
    ) -> StateSlots:
        """Allocate slots for a sequence, which continues after `num_tokens`; see `restore`. Its checkpoints are those
        of the request, and `positions`."""
        slots = StateSlots(
            prefix=prefix,
            boundaries=boundaries,
            prompt_length=len(request.token_ids),
            checkpoints=tuple(sorted(checkpoints(request, boundaries) | positions)),
        )
        if num_tokens:
            self.restore(slots, num_tokens)
        slots.spare = self._take()
        return slots

    def restore(self, slots: StateSlots, num_tokens: int) -> None:
        """Continue from the cached state after `num_tokens`, a number that `usable_tokens` returned."""
        digest = slots.prefix.digest(num_tokens)
        self._release(slots.current)
        slots.current, slots.num_tokens = self._cached[digest]
        self._num_users[slots.current] += 1
        self._cached.move_to_end(digest)

    def reserve(self, slots: StateSlots, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Reserve slots for the states at the checkpoints within a step, for the last ones if there are too few;
        returns their positions and slots.

        Args:
            slots: the slots of its sequence.
            start: index of the first token of the step.
            stop: index after its last token.
        """
        within = [
            position
            for position in reversed(slots.checkpoints)
            if start < position < stop and slots.prefix.digest(position) not in self._cached
        ]
        slots.saved = {position: self._take() for position in within[: self._num_reservable]}
        self._num_reservable -= len(slots.saved)
        return tuple(slots.saved.items())

    def advance(self, slots: StateSlots, num_tokens: int) -> None:
        """Use the slots that a step has written, and cache them at checkpoints. After all checkpoints, only the newest
        state is kept.

        Args:
            slots: the slots of its sequence.
            num_tokens: the tokens whose state it is.
        """
        for position, slot in slots.saved.items():
            self._cache(slots, CachedState(slot, position))
        self._release_saved(slots)
        self._release(slots.current)
        slots.current = slots.spare
        slots.num_tokens = num_tokens
        slots.spare = self._take()
        if num_tokens in slots.checkpoints:
            self._cache_current(slots)
        elif _is_boundary(slots) and num_tokens > max(slots.checkpoints, default=0):
            self._uncache(slots.newest)
            slots.newest = self._cache_current(slots)

    def free(self, slots: StateSlots, *, keep: bool) -> None:
        """Free the slots of a sequence, and cache its last state: the next turn of a conversation may continue from it.

        Args:
            slots: slots that are in use.
            keep: whether its states are valid and may be cached.
        """
        if keep and slots.num_tokens >= CHUNK and (_is_boundary(slots) or slots.num_tokens > slots.prompt_length):
            self._cache_current(slots)
        for digest in () if keep else slots.added:
            self._uncache(digest)
        self._release_saved(slots)
        self._release(slots.current)
        self._release(slots.spare)

    def _cache_current(self, slots: StateSlots) -> bytes:
        return self._cache(slots, CachedState(slots.current, slots.num_tokens))

    def _cache(self, slots: StateSlots, state: CachedState) -> bytes:
        """Cache a state of a sequence; returns its digest, or nothing if it is cached already."""
        digest = slots.prefix.digest(state.num_tokens)
        if not self._caching or digest in self._cached:
            return b""
        self._cached[digest] = state
        self._num_users[state.slot] += 1
        slots.added.add(digest)
        return digest

    def _uncache(self, digest: bytes) -> None:
        if digest in self._cached:
            self._release(self._cached.pop(digest).slot)

    def _take(self) -> int:
        if not self._free:
            self._uncache(next(digest for digest, state in self._cached.items() if self._num_users[state.slot] == 1))
        slot = self._free.pop()
        self._num_users[slot] += 1
        return slot

    def _release_saved(self, slots: StateSlots) -> None:
        for slot in slots.saved.values():
            self._release(slot)
        self._num_reservable += len(slots.saved)
        slots.saved = {}

    def _release(self, slot: int) -> None:
        if slot == NO_STATE:
            return
        self._num_users[slot] -= 1
        if not self._num_users[slot]:
            self._free.append(slot)


def count_sequences(slots: int, limit: int) -> int:
    """Return how many sequences may run at the same time, at most `limit`: each has two slots, and one is left for
    states within a step, unless there are only two."""
    return min(limit, max((slots - 1) // 2, 1))


def checkpoints(request: DecodeRequest, boundaries: ChunkBoundaries) -> set[int]:
    """Return the positions in a prompt after which later prompts may differ: where the response begins, and the last
    boundaries before the end of each image or video and before the last token, which is never taken from the cache."""
    spans = request.spans
    # A video may have several spans; the first row of an image or video begins a new one.
    ends = [span.stop for span, after in pairwise(spans) if after.row == 0]
    ends += [*(span.stop for span in spans[-1:]), *request.response_boundaries[-1:], len(request.token_ids) - 1]
    return {boundaries.at_or_before(end) for end in ends if end >= CHUNK}


def _is_boundary(slots: StateSlots) -> bool:
    return slots.boundaries.at_or_before(slots.num_tokens) == slots.num_tokens
