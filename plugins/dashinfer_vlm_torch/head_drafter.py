"""Predict tokens with a small head that reads the hidden states of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dashinfer_vlm_core.kernels.streams import to_device
from dashinfer_vlm_core.kernels.types import ForwardBatch

from .drafter import Drafted, DraftOutput, HiddenStates, continue_drafts, draft_batch, sample_drafts
from .kv_cache import KVCache
from .model import Rotary, TextModel
from .proposer import Draft
from .sampler import RowSampler
from .sequence import LogitsRow, ScheduledChunk, SequenceState
from .step_batch import key_spans, merge_visual_tokens, pack

MAX_PENDING_TOKENS = 128
"""Maximum number of tokens of an output that the head has not processed."""


class DraftHead(DraftOutput, Protocol):
    """Predicts the token after the next one from a token's hidden state and the next token."""

    def project(self, hidden: Tensor) -> Tensor:
        """Return what `forward` reads [tokens, hidden_size], from hidden states of the model [tokens, width]."""

    def embed(self, token_ids: Tensor) -> Tensor | None:
        """Look up int64 [tokens] in its own table; None if it uses the model's."""

    def forward(self, embeddings: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute hidden states [len(batch.last), hidden_size], and write keys and values to the cache.

        Args:
            embeddings: [tokens, hidden_size], those of the next tokens.
            hidden: [tokens, hidden_size], what `project` or this method returned.
            batch: the positions of the tokens themselves, and the layer of the cache that belongs to the head.
        """


class Pending(NamedTuple):
    """Tokens of an output, from index `start` on, that the head has not processed, and their hidden states."""

    start: int
    hidden: Tensor


class Part(NamedTuple):
    """Consecutive tokens of a sequence to process, and their hidden states."""

    chunk: ScheduledChunk
    hidden: Tensor


class HeadDrafter:
    """Predicts tokens with a head; implements `Drafter`.

    The keys and values of the head for a token depend on the next token, and are in a row of the same number as the
    token's in the KV cache. If a prompt is continued from the prefix cache, the last cached row may be that of another
    next token. This costs nothing but a worse prediction, and so do rows that were not computed before a preemption.

    Output tokens after which nothing is predicted are processed together with later ones, in one pass over the weights.

    Further tokens are predicted from the head's own hidden states. Their rows are overwritten after the next step. LoRA
    adapters change the hidden states that the head reads, but not the head.

    Args:
        model: the model.
        head: its head.
        cache: the cache with the head's layer, which is the last one: the model's if the head reads final states.
        reads: the hidden states of the model that the head reads.
        rotary: the head's rotary embedding.
        kernel_sampler: see `launch_sample`.
    """

    def __init__(
        self,
        model: TextModel,
        head: DraftHead,
        cache: KVCache,
        *,
        reads: HiddenStates,
        rotary: Rotary,
        kernel_sampler: RowSampler | None,
    ) -> None:
        self.reads: HiddenStates = reads
        self.caches: Sequence[KVCache] = () if reads == "final" else (cache,)
        self._model = model
        self._head = head
        self._rotary = rotary
        self._pool = cache.pool[-1:]
        self._scales = None if cache.scales is None else cache.scales[-1:]
        self._kernel_sampler = kernel_sampler
        self._pending: WeakKeyDictionary[SequenceState, Pending] = WeakKeyDictionary()

    def draft(
        self, chunks: Sequence[ScheduledChunk], hidden: Tensor | None, counts: Mapping[SequenceState, int]
    ) -> Drafted:
        assert hidden is not None
        firsts = accumulate((chunk.end - chunk.start for chunk in chunks), initial=0)
        parts = []
        for first, chunk in zip(firsts, map(_computed, chunks), strict=False):
            part = self._with_pending(Part(chunk, hidden[first : first + chunk.stop - chunk.start]))
            if chunk.sequence not in counts and _may_wait(part.chunk):
                self._pending[chunk.sequence] = Pending(part.chunk.start, part.hidden.clone())
            elif part.chunk.stop > part.chunk.start:
                parts.append(part)
        if not parts:
            return Drafted({}, 0)
        computed = [part.chunk for part in parts]
        ids = np.concatenate([chunk.sequence.ids[chunk.start + 1 : chunk.stop + 1] for chunk in computed])
        projected = self._head.project(torch.cat([part.hidden for part in parts]))
        x = self._forward(computed, ids, projected, [chunk.sequence in counts for chunk in computed])
        return Drafted(self._continue(x, [chunk for chunk in computed if chunk.sequence in counts], counts), len(ids))

    def _with_pending(self, part: Part) -> Part:
        """Return a part with the tokens before it that were not processed."""
        pending = self._pending.pop(part.chunk.sequence, None)
        if pending is None or pending.start + len(pending.hidden) != part.chunk.start:  # preempted in between
            return part
        return Part(part.chunk._replace(start=pending.start), torch.cat([pending.hidden, part.hidden]))

    def _continue(
        self, x: Tensor, chunks: Sequence[ScheduledChunk], counts: Mapping[SequenceState, int]
    ) -> dict[SequenceState, tuple[int, ...]]:
        by_sequence = {chunk.sequence: chunk for chunk in chunks}

        def advance(
            x: Tensor, sequences: Sequence[SequenceState], drafts: Mapping[SequenceState, tuple[int, ...]]
        ) -> Tensor:
            following = [_following(by_sequence[sequence], drafts[sequence]) for sequence in sequences]
            ids = np.array([drafts[sequence][-1] for sequence in sequences])
            return self._forward(following, ids, x, [True] * len(following))

        return continue_drafts(x, list(by_sequence), counts, sample=self._sample, advance=advance)

    def _forward(
        self, chunks: Sequence[ScheduledChunk], ids: npt.NDArray[np.int64], hidden: Tensor, predicts: Sequence[bool]
    ) -> Tensor:
        """Process the tokens of chunks, and return the hidden states of the last tokens of those that predict.

        Args:
            chunks: the chunks.
            ids: int64 [tokens], the tokens after them.
            hidden: [tokens, hidden_size].
            predicts: for each chunk, whether its hidden state is returned.
        """
        packed = pack(chunks)
        packed[0] = ids
        inputs = to_device(torch.from_numpy(packed), self._model.device)
        own = self._head.embed(inputs[0])
        embeddings = self._model.embed(inputs[0]) if own is None else own
        shifted = [chunk._replace(start=chunk.start + 1, stop=chunk.stop + 1) for chunk in chunks]
        merge_visual_tokens(embeddings, shifted)
        batch = draft_batch(inputs, key_spans(chunks), predicts, self._rotary, pool=self._pool, scales=self._scales)
        return self._head.forward(embeddings, hidden, batch)

    def _sample(self, x: Tensor, rows: Sequence[LogitsRow]) -> list[int]:
        return sample_drafts(
            self._head, x, rows, vocab_size=self._model.config.vocab_size, kernel_sampler=self._kernel_sampler
        )


def _computed(chunk: ScheduledChunk) -> ScheduledChunk:
    """Return the computed tokens of a chunk, for each of which the next token is known."""
    return chunk._replace(stop=min(chunk.end, chunk.sequence.length - 1), draft=Draft())


def _may_wait(chunk: ScheduledChunk) -> bool:
    """Whether its tokens can be processed later. Of a sequence that has ended, rows may be cached now."""
    sequence = chunk.sequence
    is_output = chunk.start >= sequence.prompt_length
    return is_output and sequence.allocation is not None and chunk.stop - chunk.start < MAX_PENDING_TOKENS


def _following(chunk: ScheduledChunk, drafted: Sequence[int]) -> ScheduledChunk:
    """Return the token before the last one of those that were drafted after a chunk."""
    start = chunk.stop + len(drafted) - 1
    return chunk._replace(start=start, stop=start, draft=Draft((drafted[-1],)))
