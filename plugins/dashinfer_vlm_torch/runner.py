"""Run one step: pack the tokens of all chunks, run the model once, and sample the next tokens of every sequence without
pending tokens: one, and one more for each token of its draft that equals the sampled one.

A step is launched, and its tokens are read later. On a GPU, the next step can be launched in between: its token ids are
then copied on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby, islice
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dashinfer_vlm_core.concurrency.compute import Executor
from dashinfer_vlm_core.errors import DecoderFailed
from dashinfer_vlm_core.kernels.streams import to_device
from dashinfer_vlm_core.kernels.types import Additions, KVSpan, KVSpans, LoraRows, TokenSampling
from dashinfer_vlm_core.models.lora import LoraWeights

from .decode_graphs import DecodeGraphs
from .kernel_sampler import KernelSampler
from .kv_cache import KVCache
from .kv_cache_manager import KVCopy
from .lora import HeadChange, TextLora
from .model import PackedBatch, TextModel
from .proposer import Draft
from .sampler import LaunchedArgmax, LaunchedSample, LogitsRow, is_greedy, launch_sample
from .scheduler import Outcome, SampledToken, ScheduledChunk, SequenceState

T = TypeVar("T")

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
        first_rows = [0, *accumulate(self.num_rows)]
        numbers = {
            chunk.sequence: first
            for chunk, first, count in zip(self.chunks, first_rows, self.num_rows, strict=False)
            if count == 1
        }
        rows = [numbers[sequence] for sequence in sequences]
        ids = self.sampled.ids
        return ids if rows == list(range(len(ids))) else ids[_index(rows, ids.device)]


class ModelRunner:
    """Model and KV cache on one device; used by one thread at a time.

    A step depends only on the sequences' tokens and the cache entries before them, so it can be repeated after a
    failure.

    Args:
        model: the model.
        cache: the KV cache.
        graphs: the steps that are replayed as CUDA graphs, if there are any.
    """

    def __init__(self, model: TextModel, cache: KVCache, graphs: DecodeGraphs | None = None) -> None:
        self._model = model
        self._cache = cache
        self._graphs = graphs
        kernels = model.kernels
        self._kernel_sampler = KernelSampler(kernels) if isinstance(kernels, TokenSampling) else None

    @property
    def executor(self) -> Executor:
        return self._model.executor

    def compute(self, work: Callable[[], T]) -> T:
        """Run `work`, which copies rows or runs steps, on the model's executor; returns its result. See `Executor`."""
        return self.executor.run(work)

    @property
    def computes_in_background(self) -> bool:
        """Whether `launch` returns while the device computes. With a loop over experts, it waits in each layer."""
        return self._model.device.startswith("cuda") and not self._model.loops_over_experts

    @property
    def other_work_waits(self) -> bool:
        """Whether other work waits for the executor."""
        return self.executor.waiting > 0

    def must_yield(self) -> bool:
        """Whether work that runs steps must end after this one: on a CPU, if other work waits for the executor."""
        return self.other_work_waits or not self.executor.is_shared

    @torch.inference_mode()
    def load_lora(self, lora: LoraWeights) -> TextLora:
        """Read the text model's part of an adapter; see `TextModel.load_adapter`."""
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
        ordered = chunks = _by_lora(chunks)
        token_ids = None
        if previous is not None:
            token_ids = previous.token_ids([chunk.sequence for chunk in chunks])
            chunks = [chunk._replace(stop=chunk.start, draft=NOT_READ) for chunk in chunks]
        packed, spans = _pack(chunks), _spans(chunks)
        rows = [_rows(chunk) for chunk in chunks]
        adapted = _adapted_rows(chunks, spans, rows)
        sampled = [part for part in zip(chunks, spans, rows, strict=True) if part[2]]
        last, last_spans = _last_tokens(sampled)
        x = self._replay(chunks, packed, spans, last, token_ids)
        if x is None:
            attended = KVSpans(spans, device=self._model.device)
            x = self._forward(chunks, packed, attended, last, last_spans, adapted=adapted, token_ids=token_ids)
        num_rows = [len(each) for each in rows]
        if not sampled:
            return LaunchedStep(ordered, num_rows, None)
        heads = [(tokens.last, lora.head) for lora, tokens in adapted if lora.head]
        return LaunchedStep(ordered, num_rows, self._sample(x, [row for each in rows for row in each], heads))

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

    def _forward(
        self,
        chunks: Sequence[ScheduledChunk],
        packed: npt.NDArray[np.int64],
        spans: KVSpans,
        last: Sequence[int],
        last_spans: Sequence[KVSpan],
        *,
        adapted: Sequence[tuple[TextLora, _AdaptedTokens]],
        token_ids: Tensor | None,
    ) -> Tensor:
        """Return the hidden states of the tokens `last`; `token_ids` replace those in `packed`."""
        inputs = to_device(torch.from_numpy(packed), self._model.device)
        if token_ids is not None:
            inputs[0].copy_(token_ids)
        ids, positions, slots = inputs[0], inputs[1:4], inputs[4]
        x = self._model.embed(ids)
        for lora, tokens in adapted:
            if lora.embedding:
                lora.embedding.apply(ids[tokens.start : tokens.stop], x[tokens.start : tokens.stop])
        additions = _merge_visual_tokens(x, chunks)
        batch = PackedBatch(
            positions,
            slots,
            spans,
            _index(last, x.device),
            KVSpans(last_spans, device=x.device),
            additions,
            tuple(
                LoraRows(lora.layers, tokens.start, tokens.stop, tokens.last.start, tokens.last.stop)
                for lora, tokens in adapted
                if lora.layers
            ),
        )
        self.executor.run_deferred()
        return self._model.forward(x, batch, self._cache)

    def _replay(
        self,
        chunks: Sequence[ScheduledChunk],
        packed: npt.NDArray[np.int64],
        spans: Sequence[KVSpan],
        last: Sequence[int],
        token_ids: Tensor | None,
    ) -> Tensor | None:
        """Return the hidden states of the tokens `last` from a CUDA graph; None if there is none for these chunks."""
        if self._graphs is None or any(map(_needs_forward, chunks)):
            return None
        x = self._graphs.run(packed, spans, token_ids)
        return x if x is None or len(last) == len(x) else x[_index(last, x.device)]

    def _wait(self) -> None:
        """Wait until a GPU has computed a step from which no token is read. Then the time of a step includes the GPU's,
        its errors are raised by it, and visual tokens that it has read may be freed."""
        if self._model.device.startswith("cuda"):
            torch.cuda.current_stream(self._model.device).synchronize()

    def _sample(
        self, x: Tensor, rows: Sequence[LogitsRow], heads: Sequence[tuple[slice, HeadChange]]
    ) -> LaunchedSample | LaunchedArgmax:
        """Sample a token from each row of hidden states."""
        if not heads and all(map(is_greedy, rows)) and (tokens := self._model.argmax(x)) is not None:
            return LaunchedArgmax.of(tokens)
        return launch_sample(self._model.logits(x, heads), rows, self._kernel_sampler)


def _pack(chunks: Sequence[ScheduledChunk]) -> npt.NDArray[np.int64]:
    """Return the token ids, the positions on three axes, and the rows of the cache of all tokens, int64 [5, tokens]."""
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
    return packed


def _index(tokens: Sequence[int], device: torch.device | str) -> Tensor:
    """Return the indices of tokens as a tensor."""
    return to_device(torch.tensor(tokens, dtype=torch.int64), device)


class _AdaptedTokens(NamedTuple):
    """The tokens of a batch that an adapter applies to.

    Attributes:
        start: index of the first token.
        stop: index after the last token.
        last: their part of `ForwardBatch.last`.
    """

    start: int
    stop: int
    last: slice


def _by_lora(chunks: Sequence[ScheduledChunk]) -> Sequence[ScheduledChunk]:
    """Order chunks so that those without an adapter are first, and those of each adapter are adjacent."""
    order: dict[int, int] = {id(None): 0}
    for chunk in chunks:
        order.setdefault(id(chunk.sequence.lora), len(order))
    return chunks if len(order) == 1 else sorted(chunks, key=lambda chunk: order[id(chunk.sequence.lora)])


def _adapted_rows(
    chunks: Sequence[ScheduledChunk], spans: Sequence[KVSpan], rows: Sequence[Sequence[LogitsRow]]
) -> list[tuple[TextLora, _AdaptedTokens]]:
    """Return the adapters of ordered chunks, and the tokens that each applies to."""
    adapted = []
    first_last = 0
    parts = zip(chunks, spans, rows, strict=True)
    for _, group in groupby(parts, key=lambda part: id(part[0].sequence.lora)):
        members = list(group)
        lora = members[0][0].sequence.lora
        stop_last = first_last + sum(len(rows) for _, _, rows in members)
        if lora is not None:
            start, last_span = members[0][1].first_query, members[-1][1]
            stop = last_span.first_query + last_span.num_queries
            adapted.append((lora, _AdaptedTokens(start, stop, slice(first_last, stop_last))))
        first_last = stop_last
    return adapted


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


def _needs_forward(chunk: ScheduledChunk) -> bool:
    """Whether the hidden states of a chunk depend on more than its token ids."""
    has_visual_tokens = any(
        max(chunk.start, span.start) < min(chunk.stop, span.stop) for span in chunk.sequence.request.spans
    )
    return has_visual_tokens or chunk.sequence.lora is not None


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
    return Additions(_index(indices, x.device), values)
