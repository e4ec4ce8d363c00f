"""Decide for a batch which sequences get drafts, and how long these are: where measured costs and acceptance rates say
that a draft makes the batch faster."""

from __future__ import annotations

from collections.abc import Sequence

from .drafter import Drafted
from .proposer import MAX_DRAFT_TOKENS, Draft, DraftProposer
from .sequence import ScheduledChunk, SequenceState
from .step_cost import DRAFTER_MARGIN, USUAL_SHARE, DrafterCost, StepCost

DRAFTER_INTERVAL = 16
MAX_DRAFTER_INTERVAL = 128
"""In one of this many steps, a drafter predicts a token for every sequence, to see whether it would be accepted now.
The weights of a head are read once for all of them. The number doubles while predictions pay for no sequence."""


class Speculator:
    """Proposes drafts for the running sequences of a scheduler."""

    def __init__(self) -> None:
        self._step_cost = StepCost()
        self._drafter_cost = DrafterCost()
        self._interval = DRAFTER_INTERVAL
        self._steps_since_interval = 0

    def start(self, sequence: SequenceState) -> None:
        """Give a new sequence a proposer."""
        sequence.proposer = DraftProposer(sequence.prompt_length, sequence.matcher, sequence.stops)

    def add_drafts(self, chunks: list[ScheduledChunk]) -> None:
        """Add drafts to the chunks of a step, in place."""
        rows = sum(chunk.stop - chunk.start for chunk in chunks)
        tokens: float = sum(chunk.needs_logits for chunk in chunks)
        for number, chunk in enumerate(chunks):
            if chunk.needs_logits:
                draft = _draft(chunk.sequence, self._step_cost.threshold(tokens=tokens, rows=rows))
                rows += len(draft.tokens)
                tokens += draft.expected_accepted
                chunks[number] = chunk._replace(draft=draft)

    def wants_drafts(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Whether any of these sequences, which are decoding, would get a draft."""
        threshold = self._step_cost.threshold(tokens=len(chunks), rows=len(chunks))
        # All of them propose, since proposals are compared with the next tokens: acceptance rates remain known.
        drafts = [_draft(chunk.sequence, threshold) for chunk in chunks]
        return any(draft.tokens for draft in drafts)

    def draft_counts(self, chunks: Sequence[ScheduledChunk]) -> dict[SequenceState, int]:
        """Return how many tokens a drafter should predict for each sequence, after the tokens of a step were appended.
        Sequences without predictions are left out."""
        decoding = [chunk.sequence for chunk in chunks if chunk.sequence.allocation and chunk.sequence.is_decoding]
        drafting: Sequence[SequenceState] = decoding
        while len(counts := self._counts(drafting, len(decoding))) < len(drafting):
            drafting = list(counts)
        return self._tried(decoding) | counts if self._count_step(is_paying=bool(counts)) else counts

    def _count_step(self, *, is_paying: bool) -> bool:
        """Return whether a drafter predicts a token for every sequence after this step."""
        self._steps_since_interval += 1
        if is_paying:
            self._interval = DRAFTER_INTERVAL
        if self._steps_since_interval < self._interval:
            return False
        self._steps_since_interval = 0
        if not is_paying:
            self._interval = min(2 * self._interval, MAX_DRAFTER_INTERVAL)
        return True

    def _tried(self, decoding: Sequence[SequenceState]) -> dict[SequenceState, int]:
        """Return one token for each sequence that can use it."""
        counts = {sequence: _num_to_draft(sequence, 1.0, least=1) for sequence in decoding}
        return {sequence: number for sequence, number in counts.items() if number}

    def _counts(self, drafting: Sequence[SequenceState], waiting: int) -> dict[SequenceState, int]:
        """Return how many tokens to predict if `waiting` sequences wait for predictions for these: the fewer these are,
        the more each of them has to gain. Sequences without predictions are left out."""
        if not drafting:
            return {}
        seconds = self._drafter_cost.seconds
        share = USUAL_SHARE if seconds is None else self._step_cost.share(seconds)
        passed = self._step_cost.threshold(tokens=waiting, rows=waiting)
        threshold = min(passed + DRAFTER_MARGIN * share * waiting / len(drafting), 1.0)
        counts = {sequence: _num_to_draft(sequence, threshold) for sequence in drafting}
        return {sequence: number for sequence, number in counts.items() if number}

    def record_drafts(self, drafted: Drafted, seconds: float) -> None:
        """Record what a drafter has predicted after a step, and how long that took."""
        for sequence, tokens in drafted.tokens.items():
            if sequence.proposer:
                sequence.proposer.set_drafted(tokens)
        if predicted := [len(tokens) for tokens in drafted.tokens.values() if tokens]:
            # It may also have processed prompts, or tokens that it had left out before.
            has_others = drafted.num_rows > len(predicted) * (MAX_DRAFT_TOKENS + 1)
            self._drafter_cost.record(max(predicted), seconds, is_limit=has_others)

    def record_seconds(self, chunks: Sequence[ScheduledChunk], seconds: float) -> None:
        """Record how long the forward pass of a step took."""
        if all(chunk.sequence.output_ids and chunk.stop - chunk.start == 1 for chunk in chunks):
            self._step_cost.record(sum(chunk.end - chunk.start for chunk in chunks), seconds)


def _draft(sequence: SequenceState, threshold: float) -> Draft:
    assert sequence.proposer
    return sequence.proposer.propose(sequence.ids[: sequence.length], _limit(sequence), threshold)


def _num_to_draft(sequence: SequenceState, threshold: float, *, least: int = 0) -> int:
    assert sequence.proposer
    return sequence.proposer.num_to_draft(sequence.ids[: sequence.length], _limit(sequence), threshold, least=least)


def _limit(sequence: SequenceState) -> int:
    """Return the maximum length of a draft: one more token is sampled after it."""
    assert sequence.allocation
    free_rows = sequence.allocation.rows - sequence.length
    return max(min(free_rows, sequence.max_tokens - len(sequence.output_ids) - 1), 0)
