"""Run one step: pack the tokens of all chunks, run the model once, and sample the next tokens of every sequence without
pending tokens: one, and one more for each token of its draft that equals the sampled one.

A step is launched, and its tokens are read later. On a GPU, the next step can be launched in between: its token ids are
then copied on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dashinfer_vlm_core.concurrency.compute import Executor
from dashinfer_vlm_core.decoders import Token
from dashinfer_vlm_core.errors import DecoderFailed
from dashinfer_vlm_core.kernels.streams import HostCopy, to_device
from dashinfer_vlm_core.kernels.types import Additions, ForwardBatch, KVSpan, KVSpans, LoraRows, TokenSampling
from dashinfer_vlm_core.models.lora import LoraWeights

from .decode_graphs import DecodeGraphs
from .kernel_sampler import sample_with_kernels
from .kv_cache import KVCache
from .kv_cache_manager import KVCopy
from .lora import HeadChange, TextLora
from .model import TextModel
from .proposer import Draft
from .sampler import LaunchedArgmax, LaunchedSample, LogitsRow, index_tensor, is_greedy, launch_sample
from .scheduler import Outcome
from .sequence import ScheduledChunk, SequenceState

NOT_READ = Draft(tokens=(0,), num_forced=1)
"""Stands for the token that the previous step samples: one that is certain, with any id, which is replaced on the
device."""


class LaunchedStep(NamedTuple):
    """A step that the device computes while the caller continues.

    Attributes:
        chunks: its chunks, in the order of their rows of logits.
        num_rows: how many rows of logits each of them has.
        sampled: the tokens of these rows; None without rows.
    """

    chunks: Sequence[ScheduledChunk]
    num_rows: Sequence[int]
    sampled: LaunchedSample | LaunchedArgmax | None

    def token_ids(self, sequences: Sequence[SequenceState]) -> Tensor:
        """Return the tokens of sequences that each have one row, int64 [sequences], on the device."""
        assert self.sampled is not None
        numbered = zip(self.chunks, accumulate(self.num_rows, initial=0), strict=False)
        first_rows = {chunk.sequence: row for chunk, row in numbered}
        rows = [first_rows[sequence] for sequence in sequences]
        ids = self.sampled.ids
        return ids if rows == list(range(len(ids))) else ids[index_tensor(rows, ids)]


class ModelRunner:
    """Model and KV cache on one device; used by one thread at a time.

    A step depends only on the sequences' tokens and the cache entries before them, so it can be repeated after a
    failure.

    Args:
        model: the model.
        cache: the KV cache.
        graphs: the steps that are replayed as CUDA graphs, if there are any.

    Attributes:
        executor: the model's executor, on which rows are copied and steps run.
        computes_in_background: whether `launch` returns while the device computes. With a loop over experts, it waits
            in each layer.
    """

    def __init__(self, model: TextModel, cache: KVCache, graphs: DecodeGraphs | None = None) -> None:
        self._model = model
        self._cache = cache
        self._graphs = graphs
        self.executor: Executor = model.executor
        self.computes_in_background: bool = model.device.startswith("cuda") and not model.loops_over_experts
        kernels = model.kernels
        self._kernel_sampler = (
            functools.partial(sample_with_kernels, kernels) if isinstance(kernels, TokenSampling) else None
        )

    def must_yield(self) -> bool:
        """Whether work that runs steps must end after this one: on a CPU, if other work waits for the executor."""
        return self.executor.waiting > 0 or not self.executor.is_shared

    @torch.inference_mode()
    def load_lora(self, lora: LoraWeights) -> TextLora:
        """Read the text model's part of an adapter; see `TextModel.load_lora`."""
        return self._model.load_lora(lora)

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

    def step(self, chunks: Sequence[ScheduledChunk]) -> dict[SequenceState, Outcome]:
        """Compute all chunks; returns the outcomes of chunks with `needs_logits`."""
        return self.read(self.launch(chunks))

    @torch.inference_mode()
    def launch(self, chunks: Sequence[ScheduledChunk], previous: LaunchedStep | None = None) -> LaunchedStep:
        """Launch the computation of all chunks.

        Args:
            chunks: the chunks; with `previous`, one token each, as `Scheduler.schedule_ahead` returns them.
            previous: the step that samples these tokens, which has not been read.
        """
        chunks = _by_lora(chunks)
        batch = _lay_out(chunks, previous)
        x = self._replay(batch)
        if x is None:
            x = self._forward(batch)
        num_rows = [len(rows) for rows in batch.rows]
        if not batch.last:
            return LaunchedStep(chunks, num_rows, None)
        heads = [(tokens.last, tokens.lora.head) for tokens in batch.adapted if tokens.lora.head]
        return LaunchedStep(chunks, num_rows, self._sample(x, [row for rows in batch.rows for row in rows], heads))

    @torch.inference_mode()
    def read(self, launched: LaunchedStep) -> dict[SequenceState, Outcome]:
        """Wait for a step; returns the outcomes of chunks with rows of logits."""
        if launched.sampled is None:
            self._wait()
            return {}
        outcomes = iter(launched.sampled.read())
        return {
            chunk.sequence: _verify(chunk, list(islice(outcomes, count)))
            for chunk, count in zip(launched.chunks, launched.num_rows, strict=True)
            if count
        }

    def _forward(self, step: _StepBatch) -> Tensor:
        inputs = to_device(torch.from_numpy(step.packed), self._model.device)
        if step.token_ids is not None:
            inputs[0].copy_(step.token_ids)
        ids = inputs[0]
        x = self._model.embed(ids)
        for lora, start, stop, _ in step.adapted:
            if lora.embedding:
                lora.embedding.apply(ids[start:stop], x[start:stop])
        cos, sin = self._model.rotary(inputs[1:4])
        batch = ForwardBatch(
            cos,
            sin,
            slots=inputs[4],
            spans=KVSpans(step.spans, device=x.device),
            last=index_tensor(step.last, x),
            last_spans=KVSpans(step.last_spans, device=x.device),
            cache=self._cache.pool,
            additions=_merge_visual_tokens(x, step.chunks),
            cache_scales=self._cache.scales,
            loras=tuple(
                LoraRows(lora.layers, start, stop, last.start, last.stop)
                for lora, start, stop, last in step.adapted
                if lora.layers
            ),
        )
        self.executor.run_deferred()
        return self._model.forward(x, batch)

    def _replay(self, step: _StepBatch) -> Tensor | None:
        if self._graphs is None or any(map(_needs_forward, step.chunks)):
            return None
        x = self._graphs.run(step.packed, step.spans, step.token_ids)
        return x if x is None or len(step.last) == len(x) else x[index_tensor(step.last, x)]

    def _wait(self) -> None:
        """Wait until a GPU has computed a step from which no token is read. Then the time of a step includes the GPU's,
        its errors are raised by it, and visual tokens that it has read may be freed."""
        if self._model.device.startswith("cuda"):
            torch.cuda.current_stream(self._model.device).synchronize()

    def _sample(
        self, x: Tensor, rows: Sequence[LogitsRow], heads: Sequence[tuple[slice, HeadChange]]
    ) -> LaunchedSample | LaunchedArgmax:
        if not heads and all(map(is_greedy, rows)) and (tokens := self._model.argmax(x)) is not None:
            return LaunchedArgmax(tokens, HostCopy(tokens))
        return launch_sample(self._model.logits(x, heads), rows, self._kernel_sampler)


class _StepBatch(NamedTuple):
    """The packed tokens of a step.

    Attributes:
        chunks: the chunks.
        packed: int64 [5, tokens]: token ids, positions on three axes, and rows of the cache.
        spans: the keys that each chunk attends to.
        rows: the rows of logits that each chunk needs.
        last: the tokens whose hidden states are needed.
        last_spans: the keys that each of them attends to.
        adapted: the tokens that each adapter applies to.
        token_ids: int64 [tokens] on the device, which replace those in `packed`.
    """

    chunks: Sequence[ScheduledChunk]
    packed: npt.NDArray[np.int64]
    spans: Sequence[KVSpan]
    rows: Sequence[Sequence[LogitsRow]]
    last: Sequence[int]
    last_spans: Sequence[KVSpan]
    adapted: Sequence[_AdaptedTokens]
    token_ids: Tensor | None


def _lay_out(chunks: Sequence[ScheduledChunk], previous: LaunchedStep | None) -> _StepBatch:
    token_ids = None
    if previous is not None:
        token_ids = previous.token_ids([chunk.sequence for chunk in chunks])
        chunks = [chunk._replace(stop=chunk.start, draft=NOT_READ) for chunk in chunks]
    spans = _spans(chunks)
    rows = [_rows(chunk) for chunk in chunks]
    last, last_spans = _last_tokens(chunks, spans, rows)
    adapted = _adapted_tokens(chunks, spans, rows)
    return _StepBatch(chunks, _pack(chunks), spans, rows, last, last_spans, adapted, token_ids)


def _pack(chunks: Sequence[ScheduledChunk]) -> npt.NDArray[np.int64]:
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


class _AdaptedTokens(NamedTuple):
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


def _by_lora(chunks: Sequence[ScheduledChunk]) -> Sequence[ScheduledChunk]:
    # Chunks without an adapter are first, and those of each adapter are adjacent.
    order: dict[int, int] = {id(None): 0}
    for chunk in chunks:
        order.setdefault(id(chunk.sequence.lora), len(order))
    return chunks if len(order) == 1 else sorted(chunks, key=lambda chunk: order[id(chunk.sequence.lora)])


def _adapted_tokens(
    chunks: Sequence[ScheduledChunk], spans: Sequence[KVSpan], rows: Sequence[Sequence[LogitsRow]]
) -> list[_AdaptedTokens]:
    adapted: list[_AdaptedTokens] = []
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
        adapted.append(_AdaptedTokens(lora, start, stop, slice(start_last, stop_last)))
    return adapted


def _spans(chunks: Sequence[ScheduledChunk]) -> list[KVSpan]:
    # Each token attends to all tokens of its sequence up to itself.
    firsts = np.cumsum([0, *(chunk.end - chunk.start for chunk in chunks)]).tolist()
    return [
        KVSpan(first, chunk.end - chunk.start, chunk.sequence.first_row, chunk.end, chunk.start)
        for first, chunk in zip(firsts, chunks, strict=False)
    ]


def _rows(chunk: ScheduledChunk) -> list[LogitsRow]:
    # One after the last token, and one after each token of the draft.
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
        for row in chunk_rows:
            stop = chunk.stop + len(row.draft)
            last_spans.append(KVSpan(len(last), 1, span.first_key, stop, stop - 1))
            last.append(span.first_query + stop - chunk.start - 1)
    return last, last_spans


def _verify(chunk: ScheduledChunk, sampled: Sequence[Token | DecoderFailed]) -> Outcome:
    """Return the next tokens of a sequence: up to the first one that differs from its draft, whose row was computed
    from other tokens than those after it.

    A failure after the first token is left to the next step, which samples the same row again: until then, the output
    is the same as without a draft.
    """
    tokens = [Token(id=token) for token in chunk.draft.tokens[: chunk.num_unsampled]]
    for outcome in sampled:
        if isinstance(outcome, DecoderFailed):
            return tuple(tokens) or outcome
        tokens.append(outcome)
        if tokens[-1].id not in chunk.draft.tokens[len(tokens) - 1 : len(tokens)]:
            break
    return tuple(tokens)


def _needs_forward(chunk: ScheduledChunk) -> bool:
    has_visual_tokens = any(
        max(chunk.start, span.start) < min(chunk.stop, span.stop) for span in chunk.sequence.request.spans
    )
    return has_visual_tokens or chunk.sequence.lora is not None


def _merge_visual_tokens(x: Tensor, chunks: Sequence[ScheduledChunk]) -> Additions | None:
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
