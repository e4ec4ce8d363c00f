"""Assign the slots of recurrent states to sequences, and keep some states for later sequences, without tensors.

The states of prompts are kept at multiples of `CHUNK` only, where steps of a prefill end too. Therefore a prompt's
chunks, and its bits, do not depend on how it is divided into steps, nor on what was cached. The end of an output can be
anywhere, since decoding computes other bits anyway.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from dashinfer_vlm_core.decoders import DecodeRequest
from dashinfer_vlm_core.kernels.delta_net import CHUNK

from .prefix_hash import PrefixHash

GENERATION_PROMPT_TOKENS = 8
"""The next turn of a conversation may not repeat the last tokens of a prompt, which begin the response: up to seven in
Qwen's templates, with an empty block of reasoning."""

NO_STATE = -1
"""The slot that is read before the first token: zeros."""


@dataclass(slots=True, kw_only=True, eq=False)
class StateSlots:
    """The slots of a running sequence: a step reads one and writes the other, so that it can be repeated.

    Attributes:
        prefix: the content of the sequence.
        prompt_length: tokens of its prompt.
        checkpoints: increasing positions in the prompt after which the state is kept.
        current: the slot with the state after `num_tokens` tokens. If it is cached, others may read it too.
        num_tokens: all computed tokens, or fewer if the sequence ends within a draft.
        spare: the slot that the next step writes.
        added: digests of the states that it added to the cache.
        newest: the one of them after all checkpoints; empty if there is none.
    """

    prefix: PrefixHash
    prompt_length: int
    checkpoints: tuple[int, ...]
    current: int = NO_STATE
    num_tokens: int = 0
    spare: int = NO_STATE
    added: set[bytes]
    newest: bytes = b""

    def chunk_end(self, start: int, stop: int, length: int) -> int:
        """Return where a chunk ends that begins at `start` and ends at `stop` at the latest; at most `start` if it
        would be empty.

        Args:
            start: index of its first token.
            stop: at most `length`.
            length: tokens of the sequence.
        """
        end = stop if stop == length else whole_chunks(stop)
        return min([end, *self._following_checkpoints(start)])

    def digests_to_come(self, num_tokens: int) -> list[bytes]:
        """Return the digests of the checkpoints after `num_tokens`."""
        return [self.prefix.digest(position) for position in self._following_checkpoints(num_tokens)]

    def _following_checkpoints(self, num_tokens: int) -> Iterator[int]:
        return (position for position in self.checkpoints if position > num_tokens)


class CachedState(NamedTuple):
    """A slot with the state after `num_tokens` tokens."""

    slot: int
    num_tokens: int


class StateManager:
    """Manages the slots of running sequences and the cached ones, which are evicted in least recently used order.

    A slot is free when nobody uses it: the cache, or a sequence as its current or spare slot. With at most half as many
    sequences as slots, `allocate` and `advance` always find one that is free or can be evicted: the other sequences use
    at most two slots each, and this one uses another.
    """

    def __init__(self, slots: int, *, caching: bool) -> None:
        self.max_sequences: int = slots // 2
        self._caching = caching
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

    def allocate(self, request: DecodeRequest, prefix: PrefixHash, positions: set[int], num_tokens: int) -> StateSlots:
        """Allocate slots for a sequence, which continues after `num_tokens`; see `restore`. Its checkpoints are those
        of the request, and `positions`."""
        slots = StateSlots(
            prefix=prefix,
            prompt_length=len(request.token_ids),
            checkpoints=tuple(sorted(checkpoints(request) | positions)),
            added=set(),
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

    def advance(self, slots: StateSlots, num_tokens: int) -> None:
        """Use the slot that a step has written, and cache it at a checkpoint. After all checkpoints, only the newest
        state is kept.

        Args:
            slots: the slots of its sequence.
            num_tokens: the tokens whose state it is.
        """
        self._release(slots.current)
        slots.current = slots.spare
        slots.num_tokens = num_tokens
        slots.spare = self._take()
        if num_tokens in slots.checkpoints:
            self._cache(slots)
        elif num_tokens % CHUNK == 0 and num_tokens > max(slots.checkpoints, default=0):
            self._uncache(slots.newest)
            slots.newest = self._cache(slots)

    def free(self, slots: StateSlots, *, keep: bool) -> None:
        """Free the slots of a sequence, and cache its last state: the next turn of a conversation may continue from it.

        Args:
            slots: slots that are in use.
            keep: whether its states are valid and may be cached.
        """
        if (
            keep
            and slots.num_tokens >= CHUNK
            and (slots.num_tokens % CHUNK == 0 or slots.num_tokens > slots.prompt_length)
        ):
            self._cache(slots)
        for digest in () if keep else slots.added:
            self._uncache(digest)
        self._release(slots.current)
        self._release(slots.spare)

    def _cache(self, slots: StateSlots) -> bytes:
        """Cache the current state; returns its digest, or nothing if it is cached already."""
        digest = slots.prefix.digest(slots.num_tokens)
        if not self._caching or digest in self._cached:
            return b""
        self._cached[digest] = CachedState(slots.current, slots.num_tokens)
        self._num_users[slots.current] += 1
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

    def _release(self, slot: int) -> None:
        if slot == NO_STATE:
            return
        self._num_users[slot] -= 1
        if not self._num_users[slot]:
            self._free.append(slot)


def checkpoints(request: DecodeRequest) -> set[int]:
    """Return the positions in a prompt after which later prompts may differ: after each image or video, and before the
    response begins; rounded down to a multiple of `CHUNK`."""
    spans = request.spans
    # A video may have several spans; the first row of an image or video begins a new one.
    ends = [span.stop for span, after in pairwise(spans) if after.row == 0]
    ends += [*(span.stop for span in spans[-1:]), len(request.token_ids) - GENERATION_PROMPT_TOKENS]
    return {whole_chunks(end) for end in ends if end >= CHUNK}


def whole_chunks(num_tokens: int) -> int:
    """Round down to a multiple of `CHUNK`."""
    return num_tokens - num_tokens % CHUNK


def last_state(prefix: PrefixHash, num_tokens: int, digests: Container[bytes]) -> int:
    """Return the largest multiple of `CHUNK`, at most `num_tokens`, up to which the digest of `prefix` is in
    `digests`; 0 if none is."""
    positions = range(whole_chunks(num_tokens), 0, -CHUNK)
    return next((position for position in positions if prefix.digest(position) in digests), 0)
