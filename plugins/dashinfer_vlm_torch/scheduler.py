"""Schedule the tokens of each step: admission, chunked prefill, preemption, cancellation. Pure Python, without tensors,
threads or clocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np

from dashinfer_vlm_core.decoders import DecoderStats, Pooled, Token
from dashinfer_vlm_core.errors import DecoderFailed, QueueFull
from dashinfer_vlm_core.kernels.delta_net import CHUNK

from .kv_cache import KVAllocation
from .kv_cache_manager import KVCacheManager, KVCopy
from .prefill_budget import PrefillBudget
from .prefix_hash import BLOCK_SIZE
from .proposer import count_equal
from .sequence import ScheduledChunk, SequenceState
from .speculator import Speculator
from .state_manager import StateManager

Outcome: TypeAlias = tuple[Token, ...] | Pooled | DecoderFailed
"""The tokens that a step adds to a sequence, at least one, or what is computed from its prompt or from a chunk of it,
or why it failed."""

Output: TypeAlias = Token | Pooled | DecoderFailed


class SchedulerOutput(NamedTuple):
    """The next step: copy rows, in order, then compute the chunks in one forward pass."""

    copies: list[KVCopy]
    chunks: list[ScheduledChunk]


class Scheduler:
    """Schedules sequences first come, first served; not thread-safe.

    A sequence is admitted with memory for its prompt and the beginning of its output, and gets more as the output
    grows. If there is none left, the youngest running sequence is preempted: it returns to the head of the queue, and
    its prompt and output are recomputed later. The queue is strictly in order, even if a later sequence would fit.
    Therefore the oldest sequence always progresses, and no sequence starves.

    With `speculative`, a step may add several tokens to a sequence. The keys and values of rejected drafts remain in
    its rows, but are not marked as computed: later tokens overwrite them.

    With `state_slots`, each running sequence also has two slots of recurrent state; see `StateManager`.

    Attributes:
        counters: what has been counted so far; the caller counts what depends on a clock.
        speculator: proposes drafts; None if each step adds one token to a sequence.
    """

    def __init__(
        self,
        *,
        kv_tokens: int,
        max_batch_size: int,
        max_waiting: int,
        prefill_chunk: int,
        prefix_cache: bool = True,
        speculative: bool = False,
        state_slots: int = 0,
    ) -> None:
        self._states = StateManager(state_slots, max_batch_size, caching=prefix_cache) if state_slots else None
        usable_tokens = self._states.usable_tokens if self._states else None
        self._kv_cache_manager = KVCacheManager(kv_tokens, caching=prefix_cache, usable_tokens=usable_tokens)
        self._prefix_cache = prefix_cache
        self._max_batch_size = self._states.max_sequences if self._states else max_batch_size
        self._max_waiting = max_waiting
        self._prefill_budget = PrefillBudget(prefill_chunk)
        self.speculator: Speculator | None = Speculator() if speculative else None
        self._waiting: deque[SequenceState] = deque()
        self._running: dict[SequenceState, KVAllocation] = {}  # oldest first
        self.counters: DecoderStats = DecoderStats(kv_size=kv_tokens, states_size=state_slots)

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def stats(self) -> DecoderStats:
        return replace(
            self.counters,
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used=self._kv_cache_manager.used,
            kv_cached=self._kv_cache_manager.cached,
            states_used=self._states.used if self._states else 0,
            states_cached=self._states.cached if self._states else 0,
        )

    def add(self, sequence: SequenceState) -> None:
        """Add a sequence whose `max_len` is at most the pool's size.

        Raises:
            QueueFull: it would have to wait, and `max_waiting` requests are already waiting.
        """
        if self.speculator:
            self.speculator.start(sequence)
        self._waiting.append(sequence)
        self._admit()
        if len(self._waiting) > self._max_waiting:
            self._waiting.remove(sequence)
            raise QueueFull(f"{self._max_waiting} requests are already waiting. Try again in a second.")

    def remove(self, sequence: SequenceState, *, failed: bool = False) -> None:
        """Remove a sequence and free its memory; does nothing if it has already ended.

        Steps that were launched may still write to the sequence's rows and its spare slot. That is harmless: these
        tokens are not marked as computed, and the next owner writes to them in a later step before it reads them.

        Args:
            sequence: a sequence that was added.
            failed: whether its keys, values and states may be wrong, so that they must not be cached.
        """
        if sequence in self._running:
            self._free(sequence, keep=not failed)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._admit()

    def forget(self, cache_salt: str) -> None:
        """Free the keys and values that are cached of prompts with this salt. Recurrent states are evicted when their
        slots are needed."""
        self._kv_cache_manager.forget(cache_salt)

    def clear(self) -> list[SequenceState]:
        """Remove and return all sequences."""
        sequences = [*self._running, *self._waiting]
        self._waiting.clear()
        for sequence in list(self._running):
            self.remove(sequence)
        return sequences

    def schedule(self) -> SchedulerOutput:
        """Schedule the next step: one token of every decoding sequence, and up to `prefill_chunk` tokens of the others.

        There are fewer of them if they take long, and if any sequence is decoding, since each one delays the next
        output tokens: see `PrefillBudget`.
        """
        self._reserve_rows()
        num_scheduled_tokens = self._divide_budget([sequence for sequence in self._running if not sequence.is_decoding])
        chunks = []
        for sequence, allocation in self._running.items():
            sequence.first_row = allocation.start
            num_tokens = 1 if sequence.is_decoding else num_scheduled_tokens.get(sequence, 0)
            if num_tokens:
                start = sequence.num_computed_tokens
                chunks.append(self._with_slots(ScheduledChunk(sequence, start, start + num_tokens)))
        if self.speculator:
            self.speculator.add_drafts(chunks)
        return SchedulerOutput(self._kv_cache_manager.take_copies(), chunks)

    def _with_slots(self, chunk: ScheduledChunk) -> ScheduledChunk:
        slots = chunk.sequence.state_slots
        if self._states is None or slots is None:
            return chunk
        saved = self._states.reserve(slots, chunk.start, chunk.stop)
        return chunk._replace(source=slots.current, target=slots.spare, saved=saved)

    def schedule_ahead(self, chunks: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
        """Schedule the step after one whose tokens are not known yet: the newest token of each sequence that goes on.

        A sequence may end with the token that is not known; `update` then skips its outcome. Its rows stay valid until
        the next call of `schedule`, because a step never writes to rows of computed tokens.

        Args:
            chunks: the step, for which `update` has not been called; that of all earlier ones has.

        Returns:
            One chunk per sequence, with `start` at the token that is not known; none if the next step has other
            sequences, more tokens or drafts, needs rows, or depends on that token in another way.
        """
        if any(not chunk.needs_logits or chunk.draft.tokens for chunk in chunks):
            return []
        sequences = {chunk.sequence for chunk in chunks}
        ahead = []
        for sequence, allocation in self._running.items():
            if sequence not in sequences or sequence.depends_on_tokens:
                return []
            length = sequence.length + 1
            if length == sequence.max_len:
                continue  # ends with the token that is not known
            if length > allocation.rows:
                return []
            ahead.append(ScheduledChunk(sequence, length - 1, length))
        return [] if self.speculator and self.speculator.wants_drafts(ahead) else ahead

    def update(
        self, chunks: Sequence[ScheduledChunk], outcomes: Mapping[SequenceState, Outcome]
    ) -> list[tuple[SequenceState, Output]]:
        """Record the results of a step and return the tokens and errors to deliver. Sequences that were removed during
        the step are skipped, and so are tokens after the end of a sequence."""
        outputs: list[tuple[SequenceState, Output]] = []
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence not in self._running:
                continue
            outcome = outcomes.get(sequence)
            if isinstance(outcome, DecoderFailed):
                self.remove(sequence, failed=True)
                outputs.append((sequence, outcome))
            elif outcome is None:
                self._kv_cache_manager.mark_computed(self._running[sequence], chunk.stop)
                self._advance_state(sequence)
            elif isinstance(outcome, Pooled):
                outputs += [(sequence, pooled) for pooled in self._add_pooled(chunk, outcome)]
            else:
                outputs += [(sequence, token) for token in self._append_all(chunk, outcome)]
        return outputs

    def record_seconds(self, chunks: Sequence[ScheduledChunk], seconds: float) -> None:
        """Record how long the forward pass of a step took. The cost of drafts and the prefill budget follow from it."""
        rows = sum(chunk.end - chunk.start for chunk in chunks)
        self._prefill_budget.record(rows, seconds)
        if self.speculator:
            self.speculator.record_seconds(chunks, seconds)

    def _append_all(self, chunk: ScheduledChunk, sampled: Sequence[Token]) -> list[Token]:
        sequence = chunk.sequence
        tokens: list[Token] = []
        if sequence.proposer:
            sequence.proposer.observe([token.id for token in sampled])
        for count, token in enumerate(sampled):  # all but the last one were computed, as drafts
            self._kv_cache_manager.mark_computed(self._running[sequence], chunk.stop + count)
            if count == len(sampled) - 1:
                self._advance_state(sequence)
            tokens.append(self._append(sequence, token))
            if tokens[-1].finish_reason:
                break
        accepted = count_equal(chunk.draft.tokens, [token.id for token in tokens])
        if chunk.draft.num_forced:
            self.counters.forced_tokens += accepted
        else:
            self.counters.draft_tokens += len(chunk.draft.tokens)
            self.counters.accepted_tokens += accepted
        return tokens

    def _add_pooled(self, chunk: ScheduledChunk, pooled: Pooled) -> list[Pooled]:
        """Record what was computed from a chunk; returns the result of the sequence, if it ends here."""
        sequence = chunk.sequence
        self._kv_cache_manager.mark_computed(self._running[sequence], chunk.stop)
        self._advance_state(sequence)
        if sequence.pools_tokens:
            sequence.pooled.append(pooled.vector)
        if not chunk.needs_logits:
            return []
        self._count_prompt(sequence)
        vector = np.concatenate(sequence.pooled) if sequence.pools_tokens else pooled.vector
        self.remove(sequence)
        return [Pooled(vector=vector, cached_tokens=sequence.num_cached_tokens)]

    def _count_prompt(self, sequence: SequenceState) -> None:
        if sequence.request.is_background:
            return
        self.counters.queries += 1
        self.counters.hits += sequence.num_cached_tokens > 0
        self.counters.cached_tokens += sequence.num_cached_tokens

    def _advance_state(self, sequence: SequenceState) -> None:
        if self._states and sequence.state_slots:
            self._states.advance(sequence.state_slots, sequence.num_computed_tokens)

    def _append(self, sequence: SequenceState, token: Token) -> Token:
        sequence.append(token.id)
        if len(sequence.output_ids) == 1:
            token = replace(token, cached_tokens=sequence.num_cached_tokens)
            self._count_prompt(sequence)
        if finish_reason := sequence.finish_reason():
            self.remove(sequence)
            token = replace(token, finish_reason=finish_reason)
        return token

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_batch_size:
            sequence = self._waiting[0]
            allocation = self._kv_cache_manager.allocate(sequence.prefix, sequence.reserved_len)
            if allocation is None:
                return
            self._waiting.popleft()
            self._running[sequence] = sequence.allocation = allocation
            if self._states:
                # Where an earlier prompt differed, later ones may differ too.
                positions = {sequence.boundaries.at_or_before(allocation.num_matched_tokens)}
                sequence.state_slots = self._states.allocate(
                    sequence.request, sequence.prefix, sequence.boundaries, positions, allocation.num_computed_tokens
                )
            if not sequence.output_ids:
                # After a preemption, what it had computed itself follows what it had taken from the cache. If that is
                # in the cache now, it does not count, but what is found after it does.
                sequence.num_cached_tokens = min(allocation.num_computed_tokens, sequence.num_cached_tokens) + max(
                    allocation.num_computed_tokens - sequence.num_cached_tokens - sequence.num_preempted_tokens, 0
                )

    def _reserve_rows(self) -> None:
        for sequence in list(self._running):
            while sequence in self._running and not self._grow(sequence):
                self._preempt(next(reversed(self._running)))

    def _grow(self, sequence: SequenceState) -> bool:
        allocation = self._running[sequence]
        if sequence.length <= allocation.rows:
            return True
        lengths = (sequence.reserved_len, min(sequence.max_len, sequence.length + BLOCK_SIZE))
        return any(self._kv_cache_manager.grow(allocation, length) for length in lengths)

    def _preempt(self, sequence: SequenceState) -> None:
        sequence.num_preempted_tokens = sequence.num_computed_tokens - sequence.num_cached_tokens
        self._free(sequence, keep=True)
        self._waiting.appendleft(sequence)
        self.counters.preemptions += 1

    def _free(self, sequence: SequenceState, *, keep: bool) -> None:
        if self._states and sequence.state_slots:
            self._states.free(sequence.state_slots, keep=keep)
            sequence.state_slots = None
        self._kv_cache_manager.free(self._running.pop(sequence), keep=keep)
        sequence.allocation = None

    def _divide_budget(self, sequences: Iterable[SequenceState]) -> dict[SequenceState, int]:
        """Divide the prefill budget of the next step.

        Half of the budget goes to the oldest sequence, so that it is prefilled at half speed at least. The rest goes to
        the sequences with the fewest pending tokens, so that a short prompt does not wait for a long one.
        """
        waiting = self._without_duplicate_prefills(sequences)
        has_decodes = any(sequence.is_decoding for sequence in self._running)
        budget = self._prefill_budget.tokens(has_decodes=has_decodes)
        if self._states:  # a whole chunk for the oldest and for the shortest
            budget = max(budget, CHUNK * min(len(waiting), 2))
        num_scheduled = dict.fromkeys(waiting, 0)
        for sequence in waiting[:1]:
            num_scheduled[sequence] = _chunk_length(sequence, (budget + 1) // 2)
            budget -= num_scheduled[sequence]
        for sequence in sorted(waiting, key=attrgetter("num_pending_tokens")):
            before = num_scheduled[sequence]
            num_scheduled[sequence] = _chunk_length(sequence, before + budget)
            budget -= num_scheduled[sequence] - before
        return num_scheduled

    def _without_duplicate_prefills(self, sequences: Iterable[SequenceState]) -> list[SequenceState]:
        """Filter out the sequences that should wait until another one has computed their common prefix.

        The time of a prefill is proportional to its tokens, so two sequences that compute the same prefix would both
        take twice as long. A sequence does not wait if most of its pending tokens are not shared.
        """
        if not self._prefix_cache:
            return list(sequences)
        scheduled: list[SequenceState] = []
        expected: set[bytes] = set()
        for sequence in sequences:
            self._extend_from_cache(sequence)
            if 2 * _count_shared(sequence, expected) < sequence.num_pending_tokens:
                scheduled.append(sequence)
                expected.update(_digests_to_come(sequence))
        return scheduled

    def _extend_from_cache(self, sequence: SequenceState) -> None:
        num_cached = self._kv_cache_manager.extend_from_cache(self._running[sequence])
        if num_cached and self._states and sequence.state_slots:
            self._states.restore(sequence.state_slots, sequence.num_computed_tokens)
        sequence.num_cached_tokens += 0 if sequence.output_ids else num_cached


def _chunk_length(sequence: SequenceState, limit: int) -> int:
    num_tokens = min(sequence.num_pending_tokens, limit)
    if sequence.state_slots is None or num_tokens == sequence.num_pending_tokens:
        return num_tokens
    start = sequence.num_computed_tokens
    return max(sequence.boundaries.at_or_before(start + num_tokens) - start, 0)


def _digests_to_come(sequence: SequenceState) -> list[bytes]:
    """The digests of the prefixes that other sequences can take from this one after its prefill."""
    if sequence.state_slots:
        return sequence.state_slots.digests_to_come(sequence.num_computed_tokens)
    return sequence.prefix.digests[sequence.num_computed_tokens // BLOCK_SIZE :]


def _count_shared(sequence: SequenceState, expected: set[bytes]) -> int:
    """The number of pending tokens that it can take from sequences with these digests to come."""
    start = sequence.num_computed_tokens
    if sequence.state_slots:
        return max(_last_shared_boundary(sequence, expected) - start, 0)
    blocks = sequence.prefix.digests[start // BLOCK_SIZE :]
    return BLOCK_SIZE * next((i for i, digest in enumerate(blocks) if digest not in expected), len(blocks))


def _last_shared_boundary(sequence: SequenceState, expected: set[bytes]) -> int:
    position = sequence.boundaries.at_or_before(sequence.length - 1)
    while position and sequence.prefix.digest(position) not in expected:
        position = sequence.boundaries.at_or_before(position - 1)
    return position
