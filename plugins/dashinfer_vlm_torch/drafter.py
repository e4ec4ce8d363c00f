"""Predict the next tokens of sequences with weights, between two steps.

Predictions never change the output, see `proposer.py`. They are sampled like the model's own tokens, with the same
parameters and random numbers: if a drafter has the same distribution as the model, all its tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dashinfer_vlm_core.kernels.streams import to_device
from dashinfer_vlm_core.kernels.types import ForwardBatch, KVSpan, KVSpans

from .kv_cache import KVCache
from .model import TextModel
from .mtp_head import MtpHead
from .proposer import Draft
from .sampler import RowSampler, index_tensor, is_greedy, launch_sample
from .sequence import LogitsRow, ScheduledChunk, SequenceState
from .step_batch import key_spans, merge_visual_tokens, pack


class Drafter(Protocol):
    """Predicts tokens with weights of a draft model, or of a head of the model."""

    def draft(
        self, chunks: Sequence[ScheduledChunk], hidden: Tensor, counts: Mapping[SequenceState, int]
    ) -> dict[SequenceState, tuple[int, ...]]:
        """Process the tokens that a step has computed, and predict the next tokens of some sequences.

        Called after each step, after its tokens were appended, and before rows of the KV cache are assigned again.

        Args:
            chunks: the chunks of the step. Of their drafts, only tokens that were accepted are processed.
            hidden: [tokens, hidden_size], the normalized hidden states of the tokens of the chunks.
            counts: the numbers of tokens to predict, at least one, for sequences of the step whose next token is the
                newest one of their output.

        Returns:
            At most the requested numbers of tokens.
        """


class MtpDrafter:
    """Predicts tokens with the checkpoint's head for multi-token prediction; implements `Drafter`.

    The keys and values of the head for a token depend on the next token, and are in the token's row of the KV cache. If
    a prompt is continued from the prefix cache, the last cached row may be that of another next token. This costs
    nothing but a worse prediction.

    Further tokens are predicted from the head's own hidden states. Their rows are overwritten after the next step. LoRA
    adapters change the hidden states that the head reads, but not the head.

    Args:
        model: the model.
        head: its head.
        cache: the KV cache, whose last layer belongs to the head.
        kernel_sampler: see `launch_sample`.
    """

    def __init__(self, model: TextModel, head: MtpHead, cache: KVCache, kernel_sampler: RowSampler | None) -> None:
        self._model = model
        self._head = head
        self._pool = cache.pool[-1:]
        self._scales = None if cache.scales is None else cache.scales[-1:]
        self._kernel_sampler = kernel_sampler

    def draft(
        self, chunks: Sequence[ScheduledChunk], hidden: Tensor, counts: Mapping[SequenceState, int]
    ) -> dict[SequenceState, tuple[int, ...]]:
        firsts = accumulate((chunk.end - chunk.start for chunk in chunks), initial=0)
        numbered = [(first, _computed(chunk)) for first, chunk in zip(firsts, chunks, strict=False)]
        numbered = [(first, chunk) for first, chunk in numbered if chunk.stop > chunk.start]
        if not numbered:
            return {}
        computed = [chunk for _, chunk in numbered]
        rows = torch.cat([hidden[first : first + chunk.stop - chunk.start] for first, chunk in numbered])
        ids = np.concatenate([chunk.sequence.ids[chunk.start + 1 : chunk.stop + 1] for chunk in computed])
        x = self._forward(computed, ids, rows, [chunk.sequence in counts for chunk in computed])
        return self._continue(x, {chunk.sequence: chunk for chunk in computed if chunk.sequence in counts}, counts)

    def _continue(
        self, x: Tensor, chunks: Mapping[SequenceState, ScheduledChunk], counts: Mapping[SequenceState, int]
    ) -> dict[SequenceState, tuple[int, ...]]:
        """Sample the tokens after hidden states x [sequences, hidden_size], and predict more of them."""
        drafts: dict[SequenceState, tuple[int, ...]] = dict.fromkeys(chunks, ())
        sequences = list(chunks)
        while sequences:
            sampled = self._sample(x, [LogitsRow(sequence, drafts[sequence]) for sequence in sequences])
            indices: list[int] = []
            for index, token in enumerate(sampled):
                sequence = sequences[index]
                if token >= 0:  # otherwise, its scores are not finite
                    drafts[sequence] += (token,)
                    if len(drafts[sequence]) < counts[sequence]:
                        indices.append(index)
            if not indices:
                break
            sequences = [sequences[index] for index in indices]
            following = [_following(chunks[sequence], drafts[sequence]) for sequence in sequences]
            ids = np.array([drafts[sequence][-1] for sequence in sequences])
            x = self._forward(following, ids, x[index_tensor(indices, x)], [True] * len(following))
        return drafts

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
        embeddings = self._model.embed(inputs[0])
        shifted = [chunk._replace(start=chunk.start + 1, stop=chunk.stop + 1) for chunk in chunks]
        merge_visual_tokens(embeddings, shifted)
        spans = key_spans(chunks)
        last, last_spans = _last_tokens([span for span, is_last in zip(spans, predicts, strict=True) if is_last])
        cos, sin = self._model.rotary(inputs[1:4])
        batch = ForwardBatch(
            cos,
            sin,
            slots=inputs[4],
            spans=KVSpans(spans, device=hidden.device),
            last=index_tensor(last, hidden),
            last_spans=KVSpans(last_spans, device=hidden.device),
            cache=self._pool,
            cache_scales=self._scales,
        )
        return self._head.forward(embeddings, hidden, batch)

    def _sample(self, x: Tensor, rows: Sequence[LogitsRow]) -> list[int]:
        """Return a token per row, or -1."""
        lm_head = self._head.lm_head
        if all(map(is_greedy, rows)) and (tokens := lm_head.argmax(x)) is not None:
            ids = tokens
        else:
            ids = launch_sample(lm_head(x), rows, self._kernel_sampler).token_ids.wait()
        sampled: list[int] = ids.tolist()
        return sampled


def _computed(chunk: ScheduledChunk) -> ScheduledChunk:
    """Return the computed tokens of a chunk, for each of which the next token is known."""
    return chunk._replace(stop=min(chunk.end, chunk.sequence.length - 1), draft=Draft())


def _following(chunk: ScheduledChunk, drafted: Sequence[int]) -> ScheduledChunk:
    """Return the token before the last one of those that were drafted after a chunk."""
    start = chunk.stop + len(drafted) - 1
    return chunk._replace(start=start, stop=start, draft=Draft((drafted[-1],)))


def _last_tokens(spans: Sequence[KVSpan]) -> tuple[list[int], list[KVSpan]]:
    """Return the last tokens of spans, and the keys that they attend to."""
    last = [span.first_query + span.num_queries - 1 for span in spans]
    return last, [
        KVSpan(number, 1, span.first_key, span.num_keys, span.num_keys - 1) for number, span in enumerate(spans)
    ]
