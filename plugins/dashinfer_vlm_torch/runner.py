"""Run one step: pack the tokens of all chunks, run the model once, and sample the next tokens of every sequence without
pending tokens: one, and one more for each token of its draft that equals the sampled one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from dashinfer_vlm_core.errors import DecoderFailed
from dashinfer_vlm_core.kernels import Additions, KVSpan, KVSpans

from .kv_cache import KVCache
from .kv_cache_manager import KVCopy
from .model import PackedBatch, TextModel
from .sampler import LogitsRow, is_greedy, sample
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
        """Compute all chunks; returns the outcomes of chunks with `needs_logits`."""
        ids, positions, slots = self._pack(chunks)
        x = self._model.embed(ids)
        additions = _merge_visual_tokens(x, chunks)
        spans = _spans(chunks)
        sampled = [(chunk, span, rows) for chunk, span in zip(chunks, spans, strict=True) if (rows := _rows(chunk))]
        last, last_spans = _last_tokens(sampled)
        batch = PackedBatch(
            positions,
            slots,
            KVSpans(spans, device=x.device),
            torch.tensor(last, dtype=torch.int64, device=x.device),
            KVSpans(last_spans, device=x.device),
            additions,
        )
        x = self._model.forward(x, batch, self._cache)
        if not sampled:
            return {}
        outcomes = iter(self._sample(x, [row for _, _, rows in sampled for row in rows]))
        return {chunk.sequence: _verify(chunk, list(islice(outcomes, len(rows)))) for chunk, _, rows in sampled}

    def _sample(self, x: Tensor, rows: Sequence[LogitsRow]) -> list[SampledToken | DecoderFailed]:
        """Sample a token from each row of hidden states."""
        if all(map(is_greedy, rows)) and (tokens := self._model.argmax(x)) is not None:
            return list(map(SampledToken, tokens.tolist()))
        return sample(self._model.logits(x), rows)

    def _pack(self, chunks: Sequence[ScheduledChunk]) -> tuple[Tensor, Tensor, Tensor]:
        """Pack token ids [tokens], positions [3, tokens] and cache rows [tokens] of all chunks into one transfer."""
        packed = np.empty((5, sum(chunk.end - chunk.start for chunk in chunks)), dtype=np.int64)
        offset = 0
        for chunk in chunks:
            sequence, start, stop, draft = chunk
            part = packed[:, offset : offset + chunk.end - start]
            part[0, : stop - start] = sequence.token_ids(start, stop)
            part[0, stop - start :] = draft.tokens
            part[1:4] = sequence.positions(start, chunk.end)
            part[4] = np.arange(sequence.first_row + start, sequence.first_row + chunk.end)
            offset += chunk.end - start
        tensor = torch.from_numpy(packed).to(self._model.device)
        return tensor[0], tensor[1:4], tensor[4]


def _spans(chunks: Sequence[ScheduledChunk]) -> list[KVSpan]:
    """The keys that each chunk attends to: each token attends to all tokens of its sequence up to itself."""
    firsts = np.cumsum([0, *(chunk.end - chunk.start for chunk in chunks)]).tolist()
    return [
        KVSpan(first, chunk.end - chunk.start, chunk.sequence.first_row, chunk.end, chunk.start)
        for first, chunk in zip(firsts, chunks, strict=False)
    ]


def _rows(chunk: ScheduledChunk) -> list[LogitsRow]:
    """The rows of logits that a chunk needs: after its last token, and after each token of its draft."""
    if not chunk.needs_logits:
        return []
    tokens = chunk.draft.tokens
    return [LogitsRow(chunk.sequence, tokens[:count]) for count in range(chunk.num_unsampled, len(tokens) + 1)]


def _last_tokens(
    sampled: Iterable[tuple[ScheduledChunk, KVSpan, Sequence[LogitsRow]]],
) -> tuple[list[int], list[KVSpan]]:
    """The tokens of the batch whose hidden states are needed, and the keys that each of them attends to."""
    last: list[int] = []
    spans: list[KVSpan] = []
    for chunk, span, rows in sampled:
        for row in rows:
            stop = chunk.stop + len(row.draft)
            spans.append(KVSpan(len(last), 1, span.first_key, stop, stop - 1))
            last.append(span.first_query + stop - chunk.start - 1)
    return last, spans


def _verify(chunk: ScheduledChunk, sampled: Sequence[SampledToken | DecoderFailed]) -> Outcome:
    """Return the next tokens of a sequence: up to the first one that differs from its draft, whose row was computed
    from other tokens than those after it.

    A failure after the first token is left to the next step, which samples the same row again: until then, the output
    is the same as without a draft.
    """
    tokens = [SampledToken(token) for token in chunk.draft.tokens[: chunk.num_unsampled]]
    for outcome in sampled:
        if isinstance(outcome, DecoderFailed):
            return tuple(tokens) or outcome
        tokens.append(outcome)
        if tokens[-1].id not in chunk.draft.tokens[len(tokens) - 1 : len(tokens)]:
            break
    return tuple(tokens)


def _merge_visual_tokens(x: Tensor, chunks: Sequence[ScheduledChunk]) -> Additions | None:
    """Overwrite the embeddings of placeholders in the chunks with visual tokens; returns the additions to later
    layers."""
    offset, hidden = 0, x.shape[1]
    indices: list[int] = []
    levels: list[Tensor] = []
    for chunk in chunks:
        sequence, start, stop, _ = chunk
        for span in sequence.request.spans:
            first, end = max(start, span.start), min(stop, span.stop)
            if first < end:
                row = span.row + first - span.start
                rows = span.tokens.embedding[row : row + end - first]
                x[offset + first - start : offset + end - start].copy_(rows[:, :hidden])
                if rows.shape[1] > hidden:
                    indices += range(offset + first - start, offset + end - start)
                    levels.append(rows[:, hidden:].to(x.device, x.dtype))
        offset += chunk.end - start
    if not levels:
        return None
    values = torch.unflatten(torch.cat(levels), 1, (-1, hidden)).transpose(0, 1)
    return Additions(torch.tensor(indices, device=x.device), values)
