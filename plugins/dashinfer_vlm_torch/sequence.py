"""The state of a sequence, and the part of it that a step computes."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from dashinfer_vlm_core.decoders import DecodeRequest, FinishReason, GrammarMatcher
from dashinfer_vlm_core.protocol.sampling import Sampling

from .chunk_boundaries import ChunkBoundaries
from .kv_cache import KVAllocation
from .ngram_ban import NgramBan
from .prefix_hash import PrefixHash
from .proposer import Draft, DraftProposer
from .state_manager import NO_STATE, StateSlots

if TYPE_CHECKING:
    from .lora import TextLora

SEED_BITS = 64

INITIAL_OUTPUT_ROWS = 64
"""Rows reserved for the output of a new sequence. Later, the reserve equals the output's length."""


class SequenceState:
    """The state of one sequence, which is waiting or running.

    Args:
        request: the request to decode.
        stop: the stop tokens of the model.
        lora: the LoRA adapter of its request; None for the model itself.
        pools_tokens: whether all tokens of the prompt are pooled.

    Attributes:
        max_len: the most rows of the pool that it may need.
        stops: tokens that end the output.
        seed: the seed of its random numbers.
        first_position: M-RoPE position of the first output token, on all three axes.
        prefix: the content of prompt and output, with a digest per block.
        boundaries: where its chunks end.
        first_row: first row of its keys and values in the pool during the current step; only `Scheduler.schedule`
            changes it.
        allocation: its rows in the pool; None while it waits.
        state_slots: the slots of its recurrent state; None while it waits, or if the model has no such state.
        ids: int64 [max_len], the token ids of the prompt, and of the output so far.
        output_ids: tokens sampled so far.
        pooled: [tokens, size] of each chunk so far, if all tokens are pooled.
        matcher: the output's state in the request's grammar, if it has one.
        ngram_ban: finds tokens that would repeat an n-gram; None if they may.
        depends_on_tokens: whether its next step can be scheduled only after the last one was read: penalties, grammars
            and `ngram_ban` need its tokens on the CPU, and log-probabilities are computed when they are read.
        proposer: proposes its next tokens; None if each step adds one token.
        waiting_since: when it was added, as `time.monotonic` counts, until its first step.
        num_cached_tokens: tokens taken from the prefix cache before the first output token.
        num_preempted_tokens: tokens that it had computed itself when it was preempted. If they are found in the cache
            again, they do not count as cached.
    """

    def __init__(
        self, request: DecodeRequest, stop: Iterable[int], lora: TextLora | None = None, *, pools_tokens: bool = False
    ) -> None:
        sampling = request.sampling
        assert sampling.max_tokens is not None or request.pooling
        self.request = request
        self.lora = lora
        self.pools_tokens = pools_tokens
        self.prompt_length: int = len(request.token_ids)
        self.max_tokens: int = 0 if request.pooling else sampling.max_tokens or 0
        self.max_len: int = self.prompt_length + self.max_tokens
        self.stops: frozenset[int] = frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else stop)
        self.seed: int = secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed % (1 << SEED_BITS)
        self.first_position: int = int(request.positions.max()) + 1
        self.prefix: PrefixHash = PrefixHash(request)
        self.boundaries: ChunkBoundaries = ChunkBoundaries(request.response_boundaries)
        self.first_row: int = -1
        self.allocation: KVAllocation | None = None
        self.state_slots: StateSlots | None = None
        self.ids: npt.NDArray[np.int64] = np.empty(self.max_len, np.int64)
        self.ids[: self.prompt_length] = request.token_ids
        self.output_ids: list[int] = []
        self.pooled: list[npt.NDArray[np.float32]] = []
        self.matcher: GrammarMatcher | None = request.grammar.copy() if request.grammar else None
        self.ngram_ban: NgramBan | None = NgramBan(sampling) if sampling.no_repeat_ngram_size else None
        self.depends_on_tokens: bool = bool(
            self.matcher or self.ngram_ban or sampling.logprobs is not None or sampling.has_penalties
        )
        self.proposer: DraftProposer | None = None
        self.waiting_since: float | None = None
        self.num_cached_tokens: int = 0
        self.num_preempted_tokens: int = 0

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
    def reserved_len(self) -> int:
        """Rows to reserve, so that it does not have to grow at every step."""
        return min(self.max_len, self.length + max(INITIAL_OUTPUT_ROWS, len(self.output_ids)))

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
        self.ids[self.length] = token
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
        source: the slot with the recurrent state before the first token.
        target: the slot for the recurrent state after the last one.
        saved: further slots, each with the index of the token before which the state is written to it.
    """

    sequence: SequenceState
    start: int
    stop: int
    draft: Draft = Draft()
    source: int = NO_STATE
    target: int = NO_STATE
    saved: tuple[tuple[int, int], ...] = ()

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

    @property
    def is_decoding(self) -> bool:
        """Whether it is the newest output token."""
        return self.start >= self.sequence.prompt_length and self.stop - self.start == 1


class LogitsRow(NamedTuple):
    """One row of logits: those of the token that follows a sequence's output and a draft of its next tokens.

    Attributes:
        sequence: the sequence.
        draft: the tokens that are assumed to follow its output; none for its next token.
    """

    sequence: SequenceState
    draft: tuple[int, ...] = ()

    @property
    def sampling(self) -> Sampling:
        return self.sequence.request.sampling

    @property
    def num_output_tokens(self) -> int:
        return len(self.sequence.output_ids) + len(self.draft)

    @property
    def too_short(self) -> bool:
        """Whether the output is shorter than `min_tokens`, so that the token must not end it."""
        return self.num_output_tokens < self.sampling.min_tokens

    def banned_tokens(self) -> npt.NDArray[np.int64]:
        """Return the tokens that would repeat an n-gram."""
        sequence = self.sequence
        if sequence.ngram_ban is None:
            return np.zeros(0, np.int64)
        return sequence.ngram_ban.banned_tokens(sequence.ids[sequence.prompt_length : sequence.length], self.draft)
