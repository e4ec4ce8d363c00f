"""Run one step: pack the tokens of all chunks, run the model once, and sample a token for every sequence without
pending tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from dashinfer_vlm_core.kernels import Additions, KVSpan, KVSpans

from .kv_cache import KVCache
from .kv_cache_manager import KVCopy
from .model import PackedBatch, TextModel
from .sampler import is_greedy, sample
from .scheduler import Outcome, SampledToken, ScheduledChunk, SequenceState

T = TypeVar("T")


class ModelRunner:
    """Model and KV cache on one device; used by one thread at a time.

    A step depends only on the sequences' tokens and the cache entries before them, so it can be repeated after a
    failure.
    """

    def __init__(self, model: TextModel, cache: KVCache) -> None:
        self._model = model
        self._cache = cache

    def compute(self, work: Callable[[], T]) -> T:
        """Run `work`, which copies rows or runs steps, on the model's executor; returns its result. See `Executor`."""
        return self._model.executor.run(work)

    def check_device(self) -> None:
        """Check with a trivial computation that the device works.

        Raises:
            RuntimeError: the device is lost. After an error such as an illegal memory access, every later call in a
                CUDA context fails.
        """
        torch.zeros(1, device=self._model.device).item()

    @torch.inference_mode()
    def copy_rows(self, copies: Iterable[KVCopy]) -> None:
        """Copy rows of the KV cache, in order."""
        for copy in copies:
            self._cache.copy_rows(*copy)

    @torch.inference_mode()
    def step(self, chunks: Sequence[ScheduledChunk]) -> dict[SequenceState, Outcome]:
        """Compute all chunks; returns the sampled tokens of chunks with `needs_logits`."""
        ids, positions, slots = self._pack(chunks)
        x = self._model.embed(ids)
        additions = _merge_visual_tokens(x, chunks)
        spans = _spans(chunks)
        sampled = [(chunk.sequence, span) for chunk, span in zip(chunks, spans, strict=True) if chunk.needs_logits]
        last = torch.tensor(
            [span.first_query + span.num_queries - 1 for _, span in sampled], dtype=torch.int64, device=x.device
        )
        last_spans = [
            KVSpan(i, 1, span.first_key, span.num_keys, span.num_keys - 1) for i, (_, span) in enumerate(sampled)
        ]
        batch = PackedBatch(
            positions, slots, KVSpans(spans, device=x.device), last, KVSpans(last_spans, device=x.device), additions
        )
        x = self._model.forward(x, batch, self._cache)
        if not sampled:
            return {}
        sequences = [sequence for sequence, _ in sampled]
        return dict(zip(sequences, self._sample(x, sequences), strict=True))

    def _sample(self, x: Tensor, sequences: Sequence[SequenceState]) -> list[Outcome]:
        """Sample the next token of each sequence from its row of hidden states."""
        if all(map(is_greedy, sequences)) and (tokens := self._model.argmax(x)) is not None:
            return list(map(SampledToken, tokens.tolist()))
        return sample(self._model.logits(x), sequences)

    def _pack(self, chunks: Sequence[ScheduledChunk]) -> tuple[Tensor, Tensor, Tensor]:
        """Pack token ids [tokens], positions [3, tokens] and cache rows [tokens] of all chunks into one transfer."""
        packed = np.empty((5, sum(stop - start for _, start, stop in chunks)), dtype=np.int64)
        offset = 0
        for sequence, start, stop in chunks:
            part = packed[:, offset : offset + stop - start]
            part[0] = sequence.token_ids(start, stop)
            part[1:4] = sequence.positions(start, stop)
            part[4] = np.arange(sequence.first_row + start, sequence.first_row + stop)
            offset += stop - start
        tensor = torch.from_numpy(packed).to(self._model.device)
        return tensor[0], tensor[1:4], tensor[4]


def _spans(chunks: Sequence[ScheduledChunk]) -> list[KVSpan]:
    """The keys that each chunk attends to: each token attends to all tokens of its sequence up to itself."""
    firsts = np.cumsum([0, *(stop - start for _, start, stop in chunks)]).tolist()
    return [
        KVSpan(first, stop - start, sequence.first_row, stop, start)
        for first, (sequence, start, stop) in zip(firsts, chunks, strict=False)
    ]


def _merge_visual_tokens(x: Tensor, chunks: Sequence[ScheduledChunk]) -> Additions | None:
    """Overwrite the embeddings of placeholders in the chunks with visual tokens; returns the additions to later
    layers."""
    offset, hidden = 0, x.shape[1]
    indices: list[int] = []
    levels: list[Tensor] = []
    for sequence, start, stop in chunks:
        for span in sequence.request.spans:
            first, end = max(start, span.start), min(stop, span.stop)
            if first < end:
                row = span.row + first - span.start
                rows = span.tokens.embedding[row : row + end - first]
                x[offset + first - start : offset + end - start].copy_(rows[:, :hidden])
                if rows.shape[1] > hidden:
                    indices += range(offset + first - start, offset + end - start)
                    levels.append(rows[:, hidden:].to(x.device, x.dtype))
        offset += stop - start
    if not levels:
        return None
    values = torch.unflatten(torch.cat(levels), 1, (-1, hidden)).transpose(0, 1)
    return Additions(torch.tensor(indices, device=x.device), values)
