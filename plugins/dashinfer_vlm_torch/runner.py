"""Run one step: pack the tokens of all chunks, run the model once, and sample the next tokens of every sequence without
pending tokens: one, and one more for each token of its draft that equals the sampled one.

A step is launched, and its tokens are read later. On a GPU, the next step can be launched in between: its token ids are
then copied on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor

from dashinfer_vlm_core.concurrency.compute import Executor
from dashinfer_vlm_core.decoders import Pooled, Token
from dashinfer_vlm_core.errors import DecoderFailed
from dashinfer_vlm_core.kernels.streams import HostCopy, to_device
from dashinfer_vlm_core.kernels.types import (
    ForwardBatch,
    KVSpans,
    LoraRows,
    RecurrentBatch,
    RecurrentStates,
)
from dashinfer_vlm_core.models.lora import LoraWeights

from .decode_graphs import DecodeGraphs
from .drafter import Drafted, Drafter
from .kernel_sampler import create_sampler
from .kv_cache import KVCache
from .kv_cache_manager import KVCopy
from .lora import TextLora
from .model import TextModel
from .sampler import OVERFLOW, LaunchedArgmax, LaunchedSample, index_tensor, is_greedy, launch_sample
from .scheduler import Outcome
from .sequence import ScheduledChunk, SequenceState
from .step_batch import StepBatch, by_lora, lay_out, merge_visual_tokens, state_spans


class LaunchedStep(NamedTuple):
    """A step that the device computes while the caller continues.

    Attributes:
        chunks: its chunks, in the order of their rows of logits.
        num_rows: how many rows of logits each of them has.
        sampled: the tokens of these rows, or their results if the model pools; None without rows.
        recurrent: what was computed from recurrent states; None for models without them.
        hidden: [tokens, width], the hidden states of all its tokens that a drafter reads; None if none does.
    """

    chunks: Sequence[ScheduledChunk]
    num_rows: Sequence[int]
    sampled: LaunchedSample | LaunchedArgmax | LaunchedPooling | None
    recurrent: RecurrentBatch | None = None
    hidden: Tensor | None = None

    def token_ids(self, sequences: Sequence[SequenceState]) -> Tensor:
        """Return the tokens of sequences that each have one row, int64 [sequences], on the device."""
        assert isinstance(self.sampled, LaunchedSample | LaunchedArgmax)
        numbered = zip(self.chunks, accumulate(self.num_rows, initial=0), strict=False)
        first_rows = {chunk.sequence: row for chunk, row in numbered}
        rows = [first_rows[sequence] for sequence in sequences]
        ids = self.sampled.ids
        return ids if rows == list(range(len(ids))) else ids[index_tensor(rows, ids)]


class LaunchedPooling(NamedTuple):
    """What a device computes from the last token of each prompt, or from all of them, while the caller continues.

    Attributes:
        vectors: float32 [rows, width].
    """

    vectors: HostCopy

    def read(self, chunks: Sequence[ScheduledChunk], num_rows: Sequence[int]) -> dict[SequenceState, Outcome]:
        """Wait for the results of the chunks that have rows; an error where they are not finite."""
        parts = torch.split(self.vectors.wait(), list(num_rows))
        return {
            chunk.sequence: _pooled(chunk.sequence, rows)
            for chunk, rows in zip(chunks, parts, strict=True)
            if len(rows)
        }


def _pooled(sequence: SequenceState, rows: Tensor) -> Pooled | DecoderFailed:
    if not rows.isfinite().all():
        return DecoderFailed(OVERFLOW)
    return Pooled(vector=(rows if sequence.pools_tokens else rows[0]).numpy())


class ModelRunner:
    """Model and KV cache on one device; used by one thread at a time.

    A step depends only on the sequences' tokens and the cache entries before them, and changes no recurrent state that
    it reads, so it can be repeated after a failure.

    Args:
        model: the model.
        cache: the KV cache.
        graphs: the steps that are replayed as CUDA graphs, if there are any.
        states: the recurrent states, if the model has any.
        drafter: predicts tokens between the steps, if there is one.

    Attributes:
        executor: the model's executor, on which rows are copied and steps run.
        computes_in_background: whether `launch` returns while the device computes. With a loop over experts, it waits
            in each layer. The slots of recurrent states are assigned after the previous step was read, and a drafter
            needs its tokens.
        drafts: whether there is a drafter, for which `draft` has to be called after each step.
    """

    def __init__(
        self,
        model: TextModel,
        cache: KVCache,
        graphs: DecodeGraphs | None = None,
        states: RecurrentStates | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._draft_caches = drafter.caches if drafter else ()
        self._states = states
        self._graphs = graphs
        self.executor: Executor = model.executor
        self._drafter = drafter
        self._returns_all = drafter is not None and drafter.reads == "final"
        self.drafts: bool = drafter is not None
        self.computes_in_background: bool = (
            model.device.startswith("cuda") and not model.loops_over_experts and states is None and not self.drafts
        )
        self._kernel_sampler = create_sampler(model.kernels)

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
        """Copy rows of the KV cache, and of a drafter's, in order."""
        for copy in copies:
            for cache in (self._cache, *self._draft_caches):
                cache.copy_rows(*copy)

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
        chunks = by_lora(chunks)
        batch = lay_out(chunks, previous.token_ids([chunk.sequence for chunk in chunks]) if previous else None)
        recurrent = RecurrentBatch(self._states, state_spans(chunks), []) if self._states else None
        x = self._replay(batch)
        hidden = None
        if x is None:
            x, hidden = self._forward(batch, recurrent)
        if self._returns_all:
            hidden = x
        if len(x) != len(batch.last):
            x = x[index_tensor(batch.last, x)]
        sampled = None
        if batch.last:
            sampled = self._pool(x, batch) if self._model.pools else self._sample(x, batch)
        return LaunchedStep(chunks, [len(rows) for rows in batch.rows], sampled, recurrent, hidden)

    @torch.inference_mode()
    def read(self, launched: LaunchedStep) -> dict[SequenceState, Outcome]:
        """Wait for a step; returns the outcomes of chunks with rows of logits."""
        if launched.sampled is None:
            self._wait()
            return {}
        if isinstance(launched.sampled, LaunchedPooling):
            return launched.sampled.read(launched.chunks, launched.num_rows)
        sampled = iter(launched.sampled.read())
        outcomes: dict[SequenceState, Outcome] = {
            chunk.sequence: _verify(chunk, list(islice(sampled, count)))
            for chunk, count in zip(launched.chunks, launched.num_rows, strict=True)
            if count
        }
        if launched.recurrent:
            self._rewind(launched.recurrent, launched.chunks, outcomes)
        return outcomes

    @torch.inference_mode()
    def draft(self, launched: LaunchedStep, counts: Mapping[SequenceState, int]) -> Drafted:
        """Predict the next tokens of sequences after a step was read and its tokens were appended.

        Args:
            launched: the step.
            counts: the numbers of tokens to predict.
        """
        assert self._drafter
        self.executor.run_deferred()
        return self._drafter.draft(launched.chunks, launched.hidden, counts)

    def _rewind(
        self, recurrent: RecurrentBatch, chunks: Sequence[ScheduledChunk], outcomes: Mapping[SequenceState, Outcome]
    ) -> None:
        """Compute the states again that contain rejected drafts. The last token of an outcome is not computed yet."""
        counts: dict[int, int] = {}
        for number, chunk in enumerate(chunks):
            outcome = outcomes.get(chunk.sequence)
            if chunk.draft.tokens and isinstance(outcome, tuple):
                stop = chunk.stop + len(outcome) - 1
                if stop < chunk.end:
                    counts[number] = stop - chunk.start
        if counts:
            self._model.rewind(recurrent, counts)

    def _forward(self, step: StepBatch, recurrent: RecurrentBatch | None) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states of the tokens of `step.last`, or of all tokens if a drafter reads them, and those
        of some layers."""
        inputs = to_device(torch.from_numpy(step.packed), self._model.device)
        if step.token_ids is not None:
            inputs[0].copy_(step.token_ids)
        x = self._embed(inputs[0], step)
        cos, sin = self._model.rotary(inputs[1:4])
        spans = KVSpans(step.spans, device=x.device)
        batch = ForwardBatch(
            cos,
            sin,
            slots=inputs[4],
            spans=spans,
            last=torch.arange(len(x), device=x.device) if self._returns_all else index_tensor(step.last, x),
            last_spans=spans if self._returns_all else KVSpans(step.last_spans, device=x.device),
            cache=self._cache.pool,
            additions=merge_visual_tokens(x, step.chunks),
            cache_scales=self._cache.scales,
            loras=tuple(
                LoraRows(lora.layers, start, stop, *((start, stop) if self._returns_all else (last.start, last.stop)))
                for lora, start, stop, last in step.adapted
                if lora.layers
            ),
            recurrent=recurrent,
        )
        self.executor.run_deferred()
        if self._drafter and self._drafter.reads == "captured":
            return self._model.forward_and_capture(x, batch)
        return self._model.forward(x, batch), None

    def _embed(self, ids: Tensor, step: StepBatch) -> Tensor:
        x = self._model.embed(ids)
        for lora, start, stop, _ in step.adapted:
            if lora.embedding:
                lora.embedding.apply(ids[start:stop], x[start:stop])
        return x

    def _replay(self, step: StepBatch) -> Tensor | None:
        if self._graphs is None or any(map(_needs_forward, step.chunks)):
            return None
        return self._graphs.run(step.packed, step.spans, step.token_ids)

    def _wait(self) -> None:
        """Wait until a GPU has computed a step from which no token is read. Then the time of a step includes the GPU's,
        its errors are raised by it, and visual tokens that it has read may be freed."""
        if self._model.device.startswith("cuda"):
            torch.cuda.current_stream(self._model.device).synchronize()

    def _pool(self, x: Tensor, batch: StepBatch) -> LaunchedPooling:
        changes = [(tokens.last, tokens.lora.projection) for tokens in batch.adapted if tokens.lora.projection]
        return LaunchedPooling(HostCopy(self._model.pool(x, changes)))

    def _sample(self, x: Tensor, batch: StepBatch) -> LaunchedSample | LaunchedArgmax:
        rows = [row for rows in batch.rows for row in rows]
        heads = [(tokens.last, tokens.lora.head) for tokens in batch.adapted if tokens.lora.head]
        if not heads and all(map(is_greedy, rows)) and (tokens := self._model.argmax(x)) is not None:
            return LaunchedArgmax(tokens, HostCopy(tokens))
        return launch_sample(self._model.logits(x, heads), rows, self._kernel_sampler)


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
