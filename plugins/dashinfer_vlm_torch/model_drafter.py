"""Predict tokens with a smaller model."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dashinfer_vlm_core.kernels.streams import to_device
from dashinfer_vlm_core.kernels.types import KVSpan

from .drafter import Drafted, HiddenStates, continue_drafts, draft_batch, sample_drafts
from .kv_cache import KVAllocation, KVCache
from .model import TextModel
from .prefill_budget import PrefillBudget
from .proposer import MAX_FORCED_TOKENS
from .sampler import RowSampler
from .sequence import LogitsRow, ScheduledChunk, SequenceState

MAX_ROWS = 256
"""Maximum number of tokens that are processed between two steps: a longer prompt takes several."""

MAX_ROWS_PER_TOKEN = 8
"""Of a sequence, at most so many tokens are processed for each one that it may still get: with `small` for
Qwen2-VL-2B on two cores, they take 14 ms, a third of a step."""


class TextTokens(NamedTuple):
    """The tokens of a sequence without visual tokens.

    Attributes:
        prompt: int64, the tokens of its prompt.
        counts: int64 [prompt length + 1], how many of them are before each index.
    """

    prompt: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, sequence: SequenceState) -> TextTokens:
        is_text = np.ones(sequence.prompt_length, dtype=np.bool_)
        for span in sequence.request.spans:
            is_text[span.start : span.stop] = False
        counts = np.concatenate(([0], np.cumsum(is_text)))
        return cls(sequence.ids[: sequence.prompt_length][is_text], counts)

    def count(self, length: int) -> int:
        """Return how many of the first `length` tokens of the sequence are text."""
        output = max(length - len(self.counts) + 1, 0)
        return int(self.counts[length - output]) + output

    def length(self, count: int) -> int:
        """Return the number of leading tokens of the sequence of which `count` are text."""
        output = max(count - len(self.prompt), 0)
        return int(np.searchsorted(self.counts, count - output, side="right")) - 1 + output

    def ids(self, sequence: SequenceState, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return text tokens [start, stop) of the sequence."""
        output = sequence.ids[sequence.prompt_length : sequence.length]
        first = max(start - len(self.prompt), 0)
        return np.concatenate((self.prompt[start:stop], output[first : max(stop - len(self.prompt), 0)]))


class Missing(NamedTuple):
    """Text tokens [start, end) of a sequence, which are not in the cache."""

    sequence: SequenceState
    allocation: KVAllocation
    start: int
    end: int


class Text(NamedTuple):
    """Consecutive text tokens of a sequence, from text token `start` on."""

    sequence: SequenceState
    start: int
    ids: npt.NDArray[np.int64]

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


class ModelDrafter:
    """Predicts tokens with a smaller text model; implements `Drafter`.

    It reads the text only: visual tokens are left out, and text has the positions of text without them. The keys and
    values of the n-th text token are in the n-th row of the sequence's rows, in a cache of its own. So they are
    moved and kept in the prefix cache with the model's. They are computed when tokens are to be predicted, for all
    tokens since the last time.

    Args:
        model: the model.
        draft: the smaller model. Tokens that it does not have are replaced by its last one.
        cache: the smaller model's cache, with as many rows as the model's.
        kernel_sampler: see `launch_sample`.
    """

    def __init__(
        self, model: TextModel, draft: TextModel, cache: KVCache, *, kernel_sampler: RowSampler | None
    ) -> None:
        self.reads: HiddenStates = "none"
        self.caches: Sequence[KVCache] = (cache,)
        self._vocab_size = model.config.vocab_size
        self._draft = draft
        self._cache = cache
        self._kernel_sampler = kernel_sampler
        self._texts: WeakKeyDictionary[SequenceState, TextTokens] = WeakKeyDictionary()
        self._budget = PrefillBudget(2 * MAX_ROWS)  # half of it next to running sequences
        self._num_calls = 0
        # Of each sequence, the first call, or the last one that processed all its tokens.
        self._last_calls: WeakKeyDictionary[SequenceState, int] = WeakKeyDictionary()

    def draft(
        self, chunks: Sequence[ScheduledChunk], hidden: Tensor | None, counts: Mapping[SequenceState, int]
    ) -> Drafted:
        parts: list[Text] = []
        complete: list[bool] = []
        budget = self._budget.tokens(has_decodes=True)
        self._num_calls += 1
        missing, refused = self._missing(counts)
        for sequence, allocation, start, end in sorted(missing, key=self._turn):
            if not budget:
                break
            text = self._text(sequence)
            stop = min(end, start + budget)
            budget -= stop - start
            parts.append(Text(sequence, start, text.ids(sequence, start, stop)))
            complete.append(stop == end)
            # Without a lock: if it is canceled now, at worst later drafts are wrong.
            allocation.num_drafted_tokens = text.length(stop)
        if not parts:
            return Drafted(refused, 0)
        rows = sum(len(part.ids) for part in parts)
        started = time.perf_counter()
        x = self._forward(parts, complete)
        self._budget.record(rows, time.perf_counter() - started)
        ready = [part for part, is_complete in zip(parts, complete, strict=True) if is_complete]
        self._last_calls.update(dict.fromkeys((part.sequence for part in ready), self._num_calls))
        return Drafted(refused | self._continue(x, ready, counts), rows)

    def _missing(
        self, sequences: Iterable[SequenceState]
    ) -> tuple[list[Missing], dict[SequenceState, tuple[int, ...]]]:
        """Return which tokens of sequences were not processed, and no predictions for sequences where these are too
        many for the few tokens that they may still get."""
        found: list[Missing] = []
        refused: dict[SequenceState, tuple[int, ...]] = {}
        for sequence in sequences:
            allocation = sequence.allocation
            if allocation is None:  # it was canceled
                continue
            text = self._text(sequence)
            start = text.count(min(allocation.num_drafted_tokens, sequence.length - 1))
            end = text.count(sequence.length)
            if end - start <= MAX_ROWS_PER_TOKEN * (sequence.max_tokens - len(sequence.output_ids)):
                found.append(Missing(sequence, allocation, start, end))
            else:
                refused[sequence] = ()
        return found, refused

    def _turn(self, missing: Missing) -> tuple[bool, int]:
        """Sort sequences: first those that lack the tokens of one step, then those that have waited longest."""
        has_waited = missing.end - missing.start > MAX_FORCED_TOKENS + 1
        return has_waited, self._last_calls.setdefault(missing.sequence, self._num_calls)

    def _text(self, sequence: SequenceState) -> TextTokens:
        if sequence not in self._texts:
            self._texts[sequence] = TextTokens.of(sequence)
        return self._texts[sequence]

    def _continue(
        self, x: Tensor, parts: Sequence[Text], counts: Mapping[SequenceState, int]
    ) -> dict[SequenceState, tuple[int, ...]]:
        stops = {part.sequence: part.stop for part in parts}

        def advance(
            x: Tensor, sequences: Sequence[SequenceState], drafts: Mapping[SequenceState, tuple[int, ...]]
        ) -> Tensor:
            following = [
                Text(sequence, stops[sequence] + len(drafts[sequence]) - 1, np.array(drafts[sequence][-1:]))
                for sequence in sequences
            ]
            return self._forward(following, [True] * len(following))

        return continue_drafts(x, list(stops), counts, sample=self._sample, advance=advance)

    def _forward(self, parts: Sequence[Text], predicts: Sequence[bool]) -> Tensor:
        """Process tokens, and return the hidden states of the last tokens of the parts that predict."""
        positions = np.concatenate([np.arange(part.start, part.stop) for part in parts])
        rows = np.concatenate([part.sequence.first_row + np.arange(part.start, part.stop) for part in parts])
        ids = np.minimum(np.concatenate([part.ids for part in parts]), self._draft.config.vocab_size - 1)
        inputs = to_device(torch.from_numpy(np.stack((ids, positions, positions, positions, rows))), self._draft.device)
        spans = []
        first = 0
        for part in parts:
            spans.append(KVSpan(first, len(part.ids), part.sequence.first_row, part.stop, part.start))
            first += len(part.ids)
        rotary, cache = self._draft.rotary, self._cache
        batch = draft_batch(inputs, spans, predicts, rotary, pool=cache.pool, scales=cache.scales)
        return self._draft.forward(self._draft.embed(inputs[0]), batch)

    def _sample(self, x: Tensor, rows: Sequence[LogitsRow]) -> list[int]:
        return sample_drafts(self._draft, x, rows, vocab_size=self._vocab_size, kernel_sampler=self._kernel_sampler)
