"""Whose tokens go into the next step: admission, chunked prefill, preemption, cancellation. Pure Python; no tensor, no
thread, no clock."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dashinfer_vlm_core.decoders import DecodeRequest, FinishReason, GrammarMatcher, Token
from dashinfer_vlm_core.errors import DecoderFailed, QueueFull

from .kv_allocator import KVAllocation
from .kv_cache_manager import KVCacheManager, KVCopy
from .prefix_hash import BLOCK, PrefixHash

SEED_BITS = 64

ROOM = 64
"""Rows for a run's answer at its beginning; later, as many as the answer has already."""


class SampledToken(NamedTuple):
    """What the sampler chose for one request.

    Attributes:
        id: the token.
        logprob: its log-probability in the model's own distribution; None unless asked for.
        top: the most likely tokens as (id, logprob), most likely first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


Outcome: TypeAlias = SampledToken | DecoderFailed


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceState:
    """One request on its way: waiting, then running.

    Attributes:
        request: what was asked.
        stops: tokens that end the answer.
        seed: names the sequence of its random numbers.
        first_position: M-RoPE position of the first answer token, on all three axes.
        trail: what stands where in prompt and answer.
        slab: first row of its keys and values in the pool, as of the step under way: `plan` alone changes it.
        held: its rows in the pool; None while it waits.
        answer: tokens chosen so far.
        walk: the answer's way through the request's grammar, if it has one.
        cached: tokens that were found, and not read, before its first answer token.
        own: tokens that it had read itself when it was put back: to find those again is no gain.
    """

    request: DecodeRequest
    stops: frozenset[int]
    seed: int
    first_position: int
    prefix: PrefixHash
    first_row: int = -1
    held: KVAllocation | None = None
    output_ids: list[int] = field(default_factory=list)
    matcher: GrammarMatcher | None = None
    num_cached_tokens: int = 0
    own: int = 0

    @classmethod
    def of(cls, request: DecodeRequest, stop: Iterable[int]) -> SequenceState:
        """A run of `request` by a model whose own stop tokens are `stop`."""
        sampling = request.sampling
        seed = secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed % (1 << SEED_BITS)
        return cls(
            request=request,
            stops=frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else stop),
            seed=seed,
            first_position=int(request.positions.max()) + 1,
            prefix=PrefixHash(request),
            matcher=request.grammar.new_matcher() if request.grammar else None,
        )

    @property
    def prompt_length(self) -> int:
        return len(self.request.token_ids)

    @property
    def length(self) -> int:
        """Tokens known so far: prompt and answer."""
        return self.prompt_length + len(self.output_ids)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens, from the first on, whose keys and values are in the pool."""
        return self.held.num_computed_tokens if self.held else 0

    @property
    def num_pending_tokens(self) -> int:
        return self.length - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether all but the newest token of its answer is read."""
        return bool(self.output_ids) and self.num_pending_tokens == 1

    @property
    def max_tokens(self) -> int:
        assert self.request.sampling.max_tokens is not None
        return self.request.sampling.max_tokens

    @property
    def max_len(self) -> int:
        """Rows of the pool that it may come to need."""
        return self.prompt_length + self.max_tokens

    @property
    def reserved_len(self) -> int:
        """Rows with which it can go on for a while."""
        return min(self.max_len, self.length + max(ROOM, len(self.output_ids)))

    @property
    def too_short(self) -> bool:
        """Whether the next token may not end the answer."""
        return len(self.output_ids) < self.request.sampling.min_tokens

    def token_ids(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens [start, stop)."""
        prompt, first = self.request.token_ids[start:stop], max(start - self.prompt_length, 0)
        answer = self.output_ids[first : max(stop - self.prompt_length, 0)]
        return np.append(prompt, answer).astype(np.int64) if answer else prompt

    def positions(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Positions of tokens [start, stop), broadcastable to [3, stop - start]."""
        after = np.arange(max(start, self.prompt_length), stop)[None] + (self.first_position - self.prompt_length)
        if start >= self.prompt_length:
            return after
        return np.concatenate((self.request.positions[:, start:stop], np.tile(after, (3, 1))), axis=1)

    def append(self, token: int) -> None:
        """Go on by the next token of the answer."""
        self.output_ids.append(token)
        self.prefix.append(token, self.first_position + len(self.output_ids) - 1)
        if self.matcher:
            self.matcher.accept_token(token)

    def finish(self) -> FinishReason | None:
        """Why the answer ends with its last token, if it does."""
        if self.output_ids[-1] in self.stops:
            return "stop"
        return "length" if len(self.output_ids) == self.max_tokens else None


class ScheduledChunk(NamedTuple):
    """Tokens [start, stop) of a run, to be read in one step."""

    sequence: SequenceState
    start: int
    stop: int

    @property
    def last(self) -> bool:
        """Whether the step ends by choosing the run's next token."""
        return self.stop == self.sequence.length


class SchedulerOutput(NamedTuple):
    """What to do next: copy rows, in order, then read the chunks together."""

    copies: list[KVCopy]
    chunks: list[ScheduledChunk]


class SchedulerStats(NamedTuple):
    """A snapshot; the last four count from the start.

    Attributes:
        running: requests in the batch.
        waiting: requests that wait for a place in it.
        kv_used: tokens' worth of memory for keys and values that running requests hold.
        kv_cached: tokens' worth that is kept for later requests, and given up as soon as it is needed.
        kv_size: tokens' worth that there is.
        queries: prompts that were read.
        hits: prompts of which a part was found, and not read.
        cached_tokens: tokens of prompts that were found.
        preemptions: times that a running request had to wait again.
    """

    running: int
    waiting: int
    kv_used: int
    kv_cached: int
    kv_size: int
    queries: int = 0
    hits: int = 0
    cached_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Requests in the order of their arrival; not safe for threads by itself.

    A run is admitted with memory for its prompt and the beginning of its answer, and gets more as it goes on. Where
    there is no more, the youngest running request is put back to the head of the queue, and reads its prompt and its
    answer so far again later. The first in the queue is admitted first, however small those behind it are. So the
    oldest always goes on, and nobody starves.
    """

    def __init__(
        self, *, kv_tokens: int, max_batch_size: int, max_waiting: int, prefill_chunk: int, prefix_cache: bool = True
    ) -> None:
        self._memory = KVCacheManager(kv_tokens, caching=prefix_cache)
        self._prefix_cache = prefix_cache
        self._max_batch_size = max_batch_size
        self._max_waiting = max_waiting
        self._prefill_chunk = prefill_chunk
        self._waiting: deque[SequenceState] = deque()
        self._running: dict[SequenceState, KVAllocation] = {}  # oldest first
        self._queries = self._hits = self._cached_tokens = self._preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used=self._memory.used,
            kv_cached=self._memory.cached,
            kv_size=self._memory.size,
            queries=self._queries,
            hits=self._hits,
            cached_tokens=self._cached_tokens,
            preemptions=self._preemptions,
        )

    def add(self, sequence: SequenceState) -> None:
        """Take a run whose footprint is at most the pool's size.

        Raises:
            QueueFull: it would have to wait, and `max_waiting` requests do already.
        """
        self._waiting.append(sequence)
        self._admit()
        if len(self._waiting) > self._max_waiting:
            self._waiting.remove(sequence)
            raise QueueFull(f"{self._max_waiting} requests wait already. Try again in a second.")

    def remove(self, sequence: SequenceState, *, failed: bool = False) -> None:
        """Forget a run and free what it held; a run that has ended already is no error.

        A step that is under way may still write to the run's rows. That is harmless: what it writes is not booked as
        read, and the next owner of the rows writes in a later step.

        Args:
            run: one that was added.
            failed: whether its keys and values are not to be trusted.
        """
        if sequence in self._running:
            self._memory.free(self._running.pop(sequence), keep=not failed)
            sequence.held = None
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._admit()

    def clear(self) -> list[SequenceState]:
        """Remove all runs; the runs that there were."""
        sequences = [*self._running, *self._waiting]
        self._waiting.clear()
        for sequence in list(self._running):
            self.remove(sequence)
        return sequences

    def schedule(self) -> SchedulerOutput:
        """The next step: the newest token of every answer, and up to `prefill_chunk` tokens of what is not read yet;
        half as many beside answers, which each step holds up."""
        self._free_rows()
        shares = self._divide_budget([sequence for sequence in self._running if not sequence.is_decoding])
        chunks = []
        for sequence, held in self._running.items():
            sequence.first_row = held.start
            tokens = 1 if sequence.is_decoding else shares.get(sequence, 0)
            if tokens:
                chunks.append(
                    ScheduledChunk(sequence, sequence.num_computed_tokens, sequence.num_computed_tokens + tokens)
                )
        return SchedulerOutput(self._memory.take_copies(), chunks)

    def update(
        self, chunks: Sequence[ScheduledChunk], choices: Mapping[SequenceState, Outcome]
    ) -> list[tuple[SequenceState, Token | DecoderFailed]]:
        """Book what a step has done; the tokens and errors to deliver. Runs that were removed meanwhile are passed
        over."""
        replies: list[tuple[SequenceState, Token | DecoderFailed]] = []
        for sequence, _, stop in chunks:
            if sequence not in self._running:
                continue
            choice = choices.get(sequence)
            if isinstance(choice, DecoderFailed):
                self.remove(sequence, failed=True)
                replies.append((sequence, choice))
                continue
            self._memory.mark_computed(self._running[sequence], stop)
            if choice is not None:
                replies.append((sequence, self._append(sequence, choice)))
        return replies

    def _append(self, sequence: SequenceState, choice: SampledToken) -> Token:
        sequence.append(choice.id)
        first = len(sequence.output_ids) == 1
        if first:
            self._queries += 1
            self._hits += sequence.num_cached_tokens > 0
            self._cached_tokens += sequence.num_cached_tokens
        finish = sequence.finish()
        if finish:
            self.remove(sequence)
        cached = sequence.num_cached_tokens if first else 0
        return Token(
            id=choice.id, logprob=choice.logprob, top_logprobs=choice.top, finish_reason=finish, cached_tokens=cached
        )

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_batch_size:
            sequence = self._waiting[0]
            held = self._memory.allocate(sequence.prefix, sequence.reserved_len)
            if held is None:
                return
            self._waiting.popleft()
            self._running[sequence] = sequence.held = held
            if not sequence.output_ids:
                sequence.num_cached_tokens = min(held.num_computed_tokens, sequence.num_cached_tokens) + max(
                    held.num_computed_tokens - sequence.num_cached_tokens - sequence.own, 0
                )

    def _free_rows(self) -> None:
        """Rows for the next token of everybody, the oldest first, at the cost of the youngest."""
        for sequence in list(self._running):
            while sequence in self._running and not self._grow(sequence):
                self._preempt(next(reversed(self._running)))

    def _grow(self, sequence: SequenceState) -> bool:
        held = self._running[sequence]
        if sequence.length <= held.rows:
            return True
        least = min(sequence.max_len, sequence.length + BLOCK)
        return self._memory.grow(held, sequence.reserved_len) or self._memory.grow(held, least)

    def _preempt(self, sequence: SequenceState) -> None:
        sequence.own = sequence.num_computed_tokens - sequence.num_cached_tokens
        self._memory.free(self._running.pop(sequence))
        sequence.held = None
        self._waiting.appendleft(sequence)
        self._preemptions += 1

    def _divide_budget(self, sequences: Iterable[SequenceState]) -> dict[SequenceState, int]:
        """How many tokens each run may read in the next step.

        Half of the budget goes to whoever came first, so that it is read at half speed at least; the rest to those with
        the least left, so that a short prompt does not wait for a long one.
        """
        left = {sequence: sequence.num_pending_tokens for sequence in self._without_duplicate_prefills(sequences)}
        beside = any(sequence.is_decoding for sequence in self._running)
        budget = (self._prefill_chunk + 1) // 2 if beside else self._prefill_chunk
        shares = dict.fromkeys(left, 0)
        for sequence in list(left)[:1]:
            shares[sequence] = min(left[sequence], (budget + 1) // 2)
            budget -= shares[sequence]
        for sequence in sorted(left, key=left.__getitem__):
            more = min(left[sequence] - shares[sequence], budget)
            shares[sequence] += more
            budget -= more
        return shares

    def _without_duplicate_prefills(self, sequences: Iterable[SequenceState]) -> list[SequenceState]:
        """Without those that had better wait until another run has read what they have in common.

        To read takes time by the token, so that two who read the same take twice as long, both. Who has mostly
        something else to read does not wait.
        """
        if not self._prefix_cache:
            return list(sequences)
        going: list[SequenceState] = []
        ahead: set[bytes] = set()
        for sequence in sequences:
            found = self._memory.extend_from_cache(self._running[sequence])
            sequence.num_cached_tokens += 0 if sequence.output_ids else found
            blocks = sequence.prefix.digests[sequence.num_computed_tokens // BLOCK :]
            common = next((i for i, digest in enumerate(blocks) if digest not in ahead), len(blocks)) * BLOCK
            if not common or 2 * common < sequence.num_pending_tokens:
                going.append(sequence)
                ahead.update(blocks)
        return going
