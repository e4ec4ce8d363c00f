"""Pack the tokens of a step: what each of them attends to, and which hidden states and logits are needed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dashinfer_vlm_core.kernels.types import Additions, KVSpan, StateSpan, StateSpans

from .lora import TextLora
from .proposer import Draft
from .sampler import index_tensor
from .sequence import LogitsRow, ScheduledChunk

NOT_READ = Draft(tokens=(0,), num_forced=1)
"""Stands for the token that the previous step samples: one that is certain, with any id, which is replaced on the
device."""


class StepBatch(NamedTuple):
    """The packed tokens of a step.

    Attributes:
        chunks: the chunks.
        packed: int64 [5, tokens]: token ids, positions on three axes, and rows of the cache.
        spans: the keys that each chunk attends to.
        rows: the rows of logits that each chunk needs.
        last: the tokens whose hidden states are needed.
        last_spans: the keys that they attend to.
        adapted: the tokens that each adapter applies to.
        token_ids: int64 [tokens] on the device, which replace those in `packed`.
    """

    chunks: Sequence[ScheduledChunk]
    packed: npt.NDArray[np.int64]
    spans: Sequence[KVSpan]
    rows: Sequence[Sequence[LogitsRow]]
    last: Sequence[int]
    last_spans: Sequence[KVSpan]
    adapted: Sequence[AdaptedTokens]
    token_ids: Tensor | None


def lay_out(chunks: Sequence[ScheduledChunk], token_ids: Tensor | None) -> StepBatch:
    """Pack the tokens of a step.

    Args:
        chunks: the chunks, in the order of `by_lora`.
        token_ids: int64 [chunks] on the device: the tokens that these consist of, if they are not known here.
    """
    if token_ids is not None:
        chunks = [chunk._replace(stop=chunk.start, draft=NOT_READ) for chunk in chunks]
    spans = key_spans(chunks)
    rows = [_rows(chunk) for chunk in chunks]
    last, last_spans = _last_tokens(chunks, spans, rows)
    adapted = _adapted_tokens(chunks, spans, rows)
    return StepBatch(chunks, pack(chunks), spans, rows, last, last_spans, adapted, token_ids)


def pack(chunks: Sequence[ScheduledChunk]) -> npt.NDArray[np.int64]:
    """Return int64 [5, tokens]: token ids, positions on three axes, and rows of the cache."""
    packed = np.empty((5, sum(chunk.end - chunk.start for chunk in chunks)), dtype=np.int64)
    offset = 0
    for chunk in chunks:
        sequence = chunk.sequence
        start = chunk.start
        num_known = chunk.stop - start
        part = packed[:, offset : offset + chunk.end - start]
        part[0, :num_known] = sequence.ids[start : chunk.stop]
        part[0, num_known:] = chunk.draft.tokens
        part[1:4] = sequence.positions(start, chunk.end)
        part[4] = np.arange(sequence.first_row + start, sequence.first_row + chunk.end)
        offset += chunk.end - start
    return packed


class AdaptedTokens(NamedTuple):
    """The tokens of a batch that an adapter applies to.

    Attributes:
        lora: the adapter.
        start: index of the first token.
        stop: index after the last token.
        last: their part of `ForwardBatch.last`.
    """

    lora: TextLora
    start: int
    stop: int
    last: slice


def by_lora(chunks: Sequence[ScheduledChunk]) -> Sequence[ScheduledChunk]:
    """Sort chunks: those without an adapter are first, and those of each adapter are adjacent."""
    order: dict[int, int] = {id(None): 0}
    for chunk in chunks:
        order.setdefault(id(chunk.sequence.lora), len(order))
    return chunks if len(order) == 1 else sorted(chunks, key=lambda chunk: order[id(chunk.sequence.lora)])


def _adapted_tokens(
    chunks: Sequence[ScheduledChunk], spans: Sequence[KVSpan], rows: Sequence[Sequence[LogitsRow]]
) -> list[AdaptedTokens]:
    adapted: list[AdaptedTokens] = []
    stop_last = 0
    for chunk, span, chunk_rows in zip(chunks, spans, rows, strict=True):
        start_last = stop_last
        stop_last += len(chunk_rows)
        lora = chunk.sequence.lora
        if lora is None:
            continue
        start = span.first_query
        if adapted and adapted[-1].lora is lora:  # the chunks of an adapter are adjacent
            _, start, _, last = adapted.pop()
            start_last = last.start
        stop = span.first_query + span.num_queries
        adapted.append(AdaptedTokens(lora, start, stop, slice(start_last, stop_last)))
    return adapted


def key_spans(chunks: Sequence[ScheduledChunk]) -> list[KVSpan]:
    """Return the keys of each chunk: each token attends to all tokens of its sequence up to itself."""
    firsts = accumulate((chunk.end - chunk.start for chunk in chunks), initial=0)
    return [
        KVSpan(first, chunk.end - chunk.start, chunk.sequence.first_row, chunk.end, chunk.start)
        for first, chunk in zip(firsts, chunks, strict=False)
    ]


def state_spans(chunks: Sequence[ScheduledChunk]) -> StateSpans:
    """Return the tokens of each chunk with the slots of its recurrent state."""
    firsts = accumulate((chunk.end - chunk.start for chunk in chunks), initial=0)
    return StateSpans([_state_span(first, chunk) for first, chunk in zip(firsts, chunks, strict=False)])


def _state_span(first: int, chunk: ScheduledChunk) -> StateSpan:
    return StateSpan(
        first_token=first,
        num_tokens=chunk.end - chunk.start,
        num_drafts=len(chunk.draft.tokens),
        source=chunk.source,
        target=chunk.target,
        chunks=() if chunk.is_decoding else tuple(chunk.sequence.boundaries.chunks(chunk.start, chunk.stop)),
        saved=tuple((position - chunk.start, slot) for position, slot in chunk.saved),
    )


def _rows(chunk: ScheduledChunk) -> list[LogitsRow]:
    # One after the last token, and one after each token of the draft. If all tokens are pooled, one for each of them.
    if chunk.sequence.pools_tokens:
        return [LogitsRow(chunk.sequence)] * (chunk.stop - chunk.start)
    if not chunk.needs_logits:
        return []
    tokens = chunk.draft.tokens
    return [LogitsRow(chunk.sequence, tokens[:count]) for count in range(chunk.num_unsampled, len(tokens) + 1)]


def _last_tokens(
    chunks: Sequence[ScheduledChunk], spans: Sequence[KVSpan], rows: Sequence[Sequence[LogitsRow]]
) -> tuple[list[int], list[KVSpan]]:
    last: list[int] = []
    last_spans: list[KVSpan] = []
    for chunk, span, chunk_rows in zip(chunks, spans, rows, strict=True):
        if chunk.sequence.pools_tokens:
            last_spans.append(span._replace(first_query=len(last)))
            last += range(span.first_query, span.first_query + span.num_queries)
            continue
        for row in chunk_rows:
            stop = chunk.stop + len(row.draft)
            last_spans.append(KVSpan(len(last), 1, span.first_key, stop, stop - 1))
            last.append(span.first_query + stop - chunk.start - 1)
    return last, last_spans


def merge_visual_tokens(x: Tensor, chunks: Sequence[ScheduledChunk]) -> Additions | None:
    """Write the embeddings of visual tokens into x [tokens, hidden_size]; returns what layers add to them."""
    hidden = x.shape[1]
    offset = 0
    indices: list[int] = []
    levels: list[Tensor] = []
    for chunk in chunks:
        start = chunk.start
        for span in chunk.sequence.request.spans:
            first = max(start, span.start)
            end = min(chunk.stop, span.stop)
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
    return Additions(index_tensor(indices, x), values)
