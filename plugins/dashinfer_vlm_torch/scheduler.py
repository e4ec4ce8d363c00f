"""Schedule the tokens of each step: admission, chunked prefill, preemption, cancellation. Pure Python, without tensors,
threads or clocks."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dashinfer_vlm_core.decoders import DecodeRequest, FinishReason, GrammarMatcher, Token
from dashinfer_vlm_core.errors import DecoderFailed, QueueFull

from .kv_allocator import KVAllocation
from .kv_cache_manager import KVCacheManager, KVCopy
from .prefill_budget import PrefillBudget
from .prefix_hash import BLOCK_SIZE, PrefixHash
from .proposer import Draft, DraftProposer, StepCost, count_equal

if TYPE_CHECKING:
    from .lora import TextLora

SEED_BITS = 64

INITIAL_OUTPUT_ROWS = 64
"""Rows reserved for the output of a new sequence. Later, the reserve equals the output's length."""


class SampledToken(NamedTuple):
    """The token sampled for one sequence.

    Attributes:
        id: the token id.
        logprob: its log-probability in the model's own distribution; None unless requested.
        top_logprobs: the most likely tokens as (id, logprob), most likely first.
    """

    id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


Outcome: TypeAlias = tuple[SampledToken, ...] | DecoderFailed
"""The tokens that a step adds to a sequence, at least one, or why it failed."""


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceState:
    """The state of one sequence, which is waiting or running.

    Attributes:
        request: the request to decode.
        stops: tokens that end the output.
        seed: the seed of its random numbers.
        first_position: M-RoPE position of the first output token, on all three axes.
        prefix: the content of prompt and output, with a digest per block.
        first_row: first row of its keys and values in the pool during the current step; only `Scheduler.schedule`
            changes it.
        allocation: its rows in the pool; None while it waits.
        output_ids: tokens sampled so far.
        matcher: the output's state in the request's grammar, if it has one.
        proposer: proposes its next tokens; None if each step adds one token.
        num_cached_tokens: tokens taken from the prefix cache before the first output token.
        lora: the LoRA adapter of its request; None for the model itself.
        num_preempted_tokens: tokens that it had computed itself when it was preempted. If they are found in the cache
            again, they do not count as cached.
    """

    request: DecodeRequest
    stops: frozenset[int]
    seed: int
    first_position: int
    prefix: PrefixHash
    first_row: int = -1
    allocation: KVAllocation | None = None
    output_ids: list[int] = field(default_factory=list)
    matcher: GrammarMatcher | None = None
    proposer: DraftProposer | None = None
    num_cached_tokens: int = 0
    num_preempted_tokens: int = 0
    lora: TextLora | None = None

    @classmethod
    def of(cls, request: DecodeRequest, stop: Iterable[int], lora: TextLora | None = None) -> SequenceState:
        """Create the state of `request` for a model with the stop tokens `stop`; `lora` is that of the request."""
        sampling = request.sampling
        seed = secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed % (1 << SEED_BITS)
        return cls(
            request=request,
            stops=frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else stop),
            seed=seed,
            first_position=int(request.positions.max()) + 1,
            prefix=PrefixHash(request),
            matcher=request.grammar.copy() if request.grammar else None,
            lora=lora,
        )

    @property
    def prompt_length(self) -> int:
        return len(self.request.token_ids)

    @property
    def length(self) -> int:
        """Tokens of prompt and output so far."""
        return self.prompt_length + len(self.output_ids)

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose keys and values are in the pool."""
        return self.allocation.num_computed_tokens if self.allocation else 0

    @property
    def num_pending_tokens(self) -> int:
        return self.length - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest output token is left to compute."""
        return bool(self.output_ids) and self.num_pending_tokens == 1

    @property
    def depends_on_tokens(self) -> bool:
        """Whether its next step can be scheduled only after the last one was read: penalties and grammars need its
        tokens on the CPU, and log-probabilities are computed when they are read."""
        sampling = self.request.sampling
        return self.matcher is not None or sampling.logprobs is not None or sampling.has_penalties

    @property
    def max_tokens(self) -> int:
        assert self.request.sampling.max_tokens is not None
        return self.request.sampling.max_tokens

    @property
    def max_len(self) -> int:
        """The most rows of the pool that it may need."""
        return self.prompt_length + self.max_tokens

    @property
    def reserved_len(self) -> int:
        """Rows to reserve, so that it does not have to grow at every step."""
        return min(self.max_len, self.length + max(INITIAL_OUTPUT_ROWS, len(self.output_ids)))

    @property
    def too_short(self) -> bool:
        """Whether the output is shorter than `min_tokens`, so that the next token must not end it."""
        return len(self.output_ids) < self.request.sampling.min_tokens

    def token_ids(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Token ids [start, stop)."""
        prompt, first = self.request.token_ids[start:stop], max(start - self.prompt_length, 0)
        output = self.output_ids[first : max(stop - self.prompt_length, 0)]
        if not len(prompt):
            return np.array(output, dtype=np.int64)
        return np.append(prompt, output).astype(np.int64) if output else prompt

    def positions(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Positions of tokens [start, stop), broadcastable to [3, stop - start]."""
        output_positions = np.arange(max(start, self.prompt_length), stop)[None] + (
            self.first_position - self.prompt_length
        )
        if start >= self.prompt_length:
            return output_positions
        return np.concatenate((self.request.positions[:, start:stop], np.tile(output_positions, (3, 1))), axis=1)

    def append(self, token: int) -> None:
        """Append the next output token."""
        self.output_ids.append(token)
        self.prefix.append(token, self.first_position + len(self.output_ids) - 1)
        if self.matcher:
            self.matcher.accept_token(token)

    def finish_reason(self) -> FinishReason | None:
        """Why the output ends with its last token; None if it continues."""
        if self.output_ids[-1] in self.stops:
            return "stop"
        return "length" if len(self.output_ids) == self.max_tokens else None


class ScheduledChunk(NamedTuple):
    """Tokens [start, stop) of a sequence, to be computed in one step, followed by a draft of the next tokens.

    Attributes:
        sequence: the sequence.
        start: index of the first token.
        stop: index after the last token of its prompt and output.
        draft: the proposed tokens; none unless `needs_logits`.
    """

    sequence: SequenceState
    start: int
    stop: int
    draft: Draft = Draft()

    @property
    def end(self) -> int:
        """Index after the last proposed token."""
        return self.stop + len(self.draft.tokens)

    @property
    def num_unsampled(self) -> int:
        """Leading proposed tokens that need no logits: forced ones, unless their log-probabilities are requested."""
        return 0 if self.sequence.request.sampling.logprobs is not None else self.draft.num_forced

    @property
    def needs_logits(self) -> bool:
        """Whether the step samples the sequence's next token."""
        return self.stop == self.sequence.length


class SchedulerOutput(NamedTuple):
    """The next step: copy rows, in order, then compute the chunks in one forward pass."""

    copies: list[KVCopy]
    chunks: list[ScheduledChunk]


class SchedulerStats(NamedTuple):
    """A snapshot; the fields from `queries` on are totals since the start. `DecoderStats` describes the fields."""

    running: int
    waiting: int
    kv_used: int
    kv_cached: int
    kv_size: int
    queries: int = 0
    hits: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    forced_tokens: int = 0


class Scheduler:
    """Schedules sequences first come, first served; not thread-safe.

    A sequence is admitted with memory for its prompt and the beginning of its output, and gets more as the output
    grows. If there is none left, the youngest running sequence is preempted: it returns to the head of the queue, and
    its prompt and output are recomputed later. The queue is strictly in order, even if a later sequence would fit.
    Therefore the oldest sequence always progresses, and no sequence starves.

    With `speculative`, a step may add several tokens to a sequence. The keys and values of rejected drafts remain in
    its rows, but are not marked as computed: later tokens overwrite them.
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
    ) -> None:
        self._kv_cache_manager = KVCacheManager(kv_tokens, caching=prefix_cache)
        self._prefix_cache = prefix_cache
        self._max_batch_size = max_batch_size
        self._max_waiting = max_waiting
        self._prefill_budget = PrefillBudget(prefill_chunk)
        self._speculative = speculative
        self._step_cost = StepCost()
        self._waiting: deque[SequenceState] = deque()
        self._running: dict[SequenceState, KVAllocation] = {}  # oldest first
        self._queries = self._hits = self._cached_tokens = self._preemptions = 0
        self._draft_tokens = self._accepted_tokens = self._forced_tokens = 0

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used=self._kv_cache_manager.used,
            kv_cached=self._kv_cache_manager.cached,
            kv_size=self._kv_cache_manager.size,
            queries=self._queries,
            hits=self._hits,
            cached_tokens=self._cached_tokens,
            preemptions=self._preemptions,
            draft_tokens=self._draft_tokens,
            accepted_tokens=self._accepted_tokens,
            forced_tokens=self._forced_tokens,
        )

    def add(self, sequence: SequenceState) -> None:
        """Add a sequence whose `max_len` is at most the pool's size.

        Raises:
            QueueFull: it would have to wait, and `max_waiting` requests are already waiting.
        """
        if self._speculative:
            sequence.proposer = DraftProposer(sequence.request.token_ids, sequence.matcher, sequence.stops)
        self._waiting.append(sequence)
        self._admit()
        if len(self._waiting) > self._max_waiting:
            self._waiting.remove(sequence)
            raise QueueFull(f"{self._max_waiting} requests are already waiting. Try again in a second.")

    def remove(self, sequence: SequenceState, *, failed: bool = False) -> None:
        """Remove a sequence and free its memory; does nothing if it has already ended.

        Steps that were launched may still write to the sequence's rows. That is harmless: these tokens are not marked
        as computed, and the next owner of the rows writes to them in a later step.

        Args:
            sequence: a sequence that was added.
            failed: whether its keys and values may be wrong, so that they must not be cached.
        """
        if sequence in self._running:
            self._kv_cache_manager.free(self._running.pop(sequence), keep=not failed)
            sequence.allocation = None
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self._admit()

    def clear(self) -> list[SequenceState]:
        """Remove and return all sequences."""
        sequences = [*self._running, *self._waiting]
        self._waiting.clear()
        for sequence in list(self._running):
            self.remove(sequence)
        return sequences

    def schedule(self) -> SchedulerOutput:
        """Schedule the next step: one token of every decoding sequence, and up to `prefill_chunk` tokens of the others.

        If any sequence is decoding, there are fewer of them, since each one delays the next output tokens: see
        `PrefillBudget`.
        """
        self._reserve_rows()
        num_scheduled_tokens = self._divide_budget([sequence for sequence in self._running if not sequence.is_decoding])
        chunks = []
        for sequence, allocation in self._running.items():
            sequence.first_row = allocation.start
            num_tokens = 1 if sequence.is_decoding else num_scheduled_tokens.get(sequence, 0)
            if num_tokens:
                chunks.append(
                    ScheduledChunk(sequence, sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens)
                )
        return SchedulerOutput(self._kv_cache_manager.take_copies(), self._with_drafts(chunks))

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
        sequences, ahead = {chunk.sequence for chunk in chunks}, []
        for sequence, allocation in self._running.items():
            if sequence not in sequences or sequence.depends_on_tokens:
                return []
            length = sequence.length + 1
            if length == sequence.max_len:
                continue  # ends with the token that is not known
            if length > allocation.rows:
                return []
            ahead.append(ScheduledChunk(sequence, length - 1, length))
        return [] if self._speculative and self._wants_drafts(ahead) else ahead

    def _wants_drafts(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Whether a draft would be proposed for any of the sequences now. The proposals are also compared with the next
        tokens, so that acceptance rates remain known."""
        threshold = self._step_cost.threshold(tokens=len(chunks), rows=len(chunks))
        drafts = [self._draft(chunk.sequence, threshold) for chunk in chunks]
        return any(draft.tokens for draft in drafts)

    def update(
        self, chunks: Sequence[ScheduledChunk], outcomes: Mapping[SequenceState, Outcome]
    ) -> list[tuple[SequenceState, Token | DecoderFailed]]:
        """Record the results of a step and return the tokens and errors to deliver. Sequences that were removed during
        the step are skipped, and so are tokens after the end of a sequence."""
        outputs: list[tuple[SequenceState, Token | DecoderFailed]] = []
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence not in self._running:
                continue
            outcome = outcomes.get(sequence)
            if isinstance(outcome, DecoderFailed):
                self.remove(sequence, failed=True)
                outputs.append((sequence, outcome))
                continue
            if outcome is None:
                self._kv_cache_manager.mark_computed(self._running[sequence], chunk.stop)
            else:
                outputs += [(sequence, token) for token in self._append_all(chunk, outcome)]
        return outputs

    def record_seconds(self, chunks: Sequence[ScheduledChunk], seconds: float) -> None:
        """Record how long the forward pass of a step took. The cost of drafts and the prefill budget follow from it."""
        self._prefill_budget.record(sum(chunk.end - chunk.start for chunk in chunks), seconds)
        if all(chunk.sequence.output_ids and chunk.stop - chunk.start == 1 for chunk in chunks):
            self._step_cost.record(sum(chunk.end - chunk.start for chunk in chunks), seconds)

    def _with_drafts(self, chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """Add drafts to the chunks after which a token is sampled."""
        if not self._speculative:
            return chunks
        drafted = []
        rows = sum(chunk.stop - chunk.start for chunk in chunks)
        tokens: float = sum(chunk.needs_logits for chunk in chunks)
        for chunk in chunks:
            if chunk.needs_logits:
                draft = self._draft(chunk.sequence, self._step_cost.threshold(tokens=tokens, rows=rows))
                rows += len(draft.tokens)
                tokens += draft.expected_accepted
                drafted.append(chunk._replace(draft=draft))
            else:
                drafted.append(chunk)
        return drafted

    def _draft(self, sequence: SequenceState, threshold: float) -> Draft:
        """Propose tokens for a sequence: at most as many as fit its rows and, with one that is sampled after them,
        `max_tokens`."""
        assert sequence.proposer
        free_rows = self._running[sequence].rows - sequence.length
        limit = min(free_rows, sequence.max_tokens - len(sequence.output_ids) - 1)
        return sequence.proposer.propose(sequence.output_ids, max(limit, 0), threshold)

    def _append_all(self, chunk: ScheduledChunk, sampled: Sequence[SampledToken]) -> list[Token]:
        """Append the tokens of a step. The keys and values of all but the last one were computed, as drafts."""
        sequence, tokens = chunk.sequence, list[Token]()
        if sequence.proposer:
            sequence.proposer.observe([token.id for token in sampled])
        for count, token in enumerate(sampled):
            self._kv_cache_manager.mark_computed(self._running[sequence], chunk.stop + count)
            tokens.append(self._append(sequence, token))
            if tokens[-1].finish_reason:
                break
        self._count_drafts(chunk.draft, [token.id for token in tokens])
        return tokens

    def _count_drafts(self, draft: Draft, token_ids: Sequence[int]) -> None:
        """Count the drafted tokens of a step, and those that are among the appended `token_ids`."""
        accepted = count_equal(draft.tokens, token_ids)
        if draft.num_forced:
            self._forced_tokens += accepted
        else:
            self._draft_tokens += len(draft.tokens)
            self._accepted_tokens += accepted

    def _append(self, sequence: SequenceState, sampled: SampledToken) -> Token:
        sequence.append(sampled.id)
        is_first = len(sequence.output_ids) == 1
        if is_first:
            self._queries += 1
            self._hits += sequence.num_cached_tokens > 0
            self._cached_tokens += sequence.num_cached_tokens
        finish_reason = sequence.finish_reason()
        if finish_reason:
            self.remove(sequence)
        cached_tokens = sequence.num_cached_tokens if is_first else 0
        return Token(
            id=sampled.id,
            logprob=sampled.logprob,
            top_logprobs=sampled.top_logprobs,
            finish_reason=finish_reason,
            cached_tokens=cached_tokens,
        )

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_batch_size:
            sequence = self._waiting[0]
            allocation = self._kv_cache_manager.allocate(sequence.prefix, sequence.reserved_len)
            if allocation is None:
                return
            self._waiting.popleft()
            self._running[sequence] = sequence.allocation = allocation
            if not sequence.output_ids:
                sequence.num_cached_tokens = min(allocation.num_computed_tokens, sequence.num_cached_tokens) + max(
                    allocation.num_computed_tokens - sequence.num_cached_tokens - sequence.num_preempted_tokens, 0
                )

    def _reserve_rows(self) -> None:
        """Reserve rows for the next token of every running sequence, oldest first, and preempt the youngest if
        necessary."""
        for sequence in list(self._running):
            while sequence in self._running and not self._grow(sequence):
                self._preempt(next(reversed(self._running)))

    def _grow(self, sequence: SequenceState) -> bool:
        allocation = self._running[sequence]
        if sequence.length <= allocation.rows:
            return True
        min_len = min(sequence.max_len, sequence.length + BLOCK_SIZE)
        return self._kv_cache_manager.grow(allocation, sequence.reserved_len) or self._kv_cache_manager.grow(
            allocation, min_len
        )

    def _preempt(self, sequence: SequenceState) -> None:
        sequence.num_preempted_tokens = sequence.num_computed_tokens - sequence.num_cached_tokens
        self._kv_cache_manager.free(self._running.pop(sequence))
        sequence.allocation = None
        self._waiting.appendleft(sequence)
        self._preemptions += 1

    def _divide_budget(self, sequences: Iterable[SequenceState]) -> dict[SequenceState, int]:
        """Divide the prefill budget of the next step; returns the number of tokens per sequence.

        Half of the budget goes to the oldest sequence, so that it is prefilled at half speed at least. The rest goes to
        the sequences with the fewest pending tokens, so that a short prompt does not wait for a long one.
        """
        num_pending = {
            sequence: sequence.num_pending_tokens for sequence in self._without_duplicate_prefills(sequences)
        }
        has_decodes = any(sequence.is_decoding for sequence in self._running)
        budget = self._prefill_budget.tokens(has_decodes=has_decodes)
        num_scheduled = dict.fromkeys(num_pending, 0)
        for sequence in list(num_pending)[:1]:
            num_scheduled[sequence] = min(num_pending[sequence], (budget + 1) // 2)
            budget -= num_scheduled[sequence]
        for sequence in sorted(num_pending, key=num_pending.__getitem__):
            num_tokens = min(num_pending[sequence] - num_scheduled[sequence], budget)
            num_scheduled[sequence] += num_tokens
            budget -= num_tokens
        return num_scheduled

    def _without_duplicate_prefills(self, sequences: Iterable[SequenceState]) -> list[SequenceState]:
        """Filter out the sequences that should wait until another one has computed their common prefix.

        The time of a prefill is proportional to its tokens, so two sequences that compute the same prefix would both
        take twice as long. A sequence does not wait if most of its pending tokens are not shared.
        """
        if not self._prefix_cache:
            return list(sequences)
        scheduled: list[SequenceState] = []
        scheduled_blocks: set[bytes] = set()
        for sequence in sequences:
            num_cached = self._kv_cache_manager.extend_from_cache(self._running[sequence])
            sequence.num_cached_tokens += 0 if sequence.output_ids else num_cached
            blocks = sequence.prefix.digests[sequence.num_computed_tokens // BLOCK_SIZE :]
            num_duplicate = (
                next((i for i, digest in enumerate(blocks) if digest not in scheduled_blocks), len(blocks)) * BLOCK_SIZE
            )
            if not num_duplicate or 2 * num_duplicate < sequence.num_pending_tokens:
                scheduled.append(sequence)
                scheduled_blocks.update(blocks)
        return scheduled
