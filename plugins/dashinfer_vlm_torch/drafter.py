"""Predict the next tokens of sequences with weights, between two steps.

Predictions never change the output, see `proposer.py`. They are sampled like the model's own tokens, with the same
parameters and random numbers: if a drafter has the same distribution as the model, all its tokens are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from dashinfer_vlm_core.kernels.types import ForwardBatch, KVSpan, KVSpans

from .kv_cache import KVCache
from .model import Rotary
from .sampler import RowSampler, index_tensor, is_greedy, launch_sample
from .sequence import LogitsRow, ScheduledChunk, SequenceState

HiddenStates: TypeAlias = Literal["none", "final", "captured"]
"""Which hidden states of a step's tokens a drafter reads: those after the final norm, or those of some layers."""


class Drafted(NamedTuple):
    """What a drafter has predicted after a step.

    Attributes:
        tokens: at most the requested numbers of tokens, for some of the sequences.
        num_rows: how many tokens were processed before the first prediction.
    """

    tokens: Mapping[SequenceState, tuple[int, ...]]
    num_rows: int


class Drafter(Protocol):
    """Predicts tokens with weights of a draft model, or of a head of the model.

    Attributes:
        reads: which hidden states `draft` needs.
        caches: its own keys and values, if they are not in the model's cache. Their rows are copied with the model's.
    """

    reads: HiddenStates
    caches: Sequence[KVCache]

    def draft(
        self, chunks: Sequence[ScheduledChunk], hidden: Tensor | None, counts: Mapping[SequenceState, int]
    ) -> Drafted:
        """Predict the next tokens of some sequences.

        Called after each step, after its tokens were appended, and before rows of the KV cache are assigned again.

        Args:
            chunks: the chunks of the step. Of their drafts, only tokens that were accepted are processed.
            hidden: [tokens, width], the hidden states of the tokens of the chunks that it reads.
            counts: the numbers of tokens to predict, at least one, for sequences of the step whose next token is the
                newest one of their output.
        """


def continue_drafts(
    x: Tensor,
    sequences: Sequence[SequenceState],
    counts: Mapping[SequenceState, int],
    *,
    sample: Callable[[Tensor, Sequence[LogitsRow]], Sequence[int]],
    advance: Callable[[Tensor, Sequence[SequenceState], Mapping[SequenceState, tuple[int, ...]]], Tensor],
) -> dict[SequenceState, tuple[int, ...]]:
    """Predict tokens one after the other.

    Args:
        x: [sequences, hidden_size], the hidden states of the last known token of each sequence.
        sequences: the sequences.
        counts: how many tokens to predict.
        sample: returns a token per row, or -1 where there is none.
        advance: returns the hidden states of the last tokens of drafts, from those of the tokens before.
    """
    drafts: dict[SequenceState, tuple[int, ...]] = dict.fromkeys(sequences, ())
    remaining = list(sequences)
    while remaining:
        sampled = sample(x, [LogitsRow(sequence, drafts[sequence]) for sequence in remaining])
        indices: list[int] = []
        for index, token in enumerate(sampled):
            sequence = remaining[index]
            if token >= 0:
                drafts[sequence] += (token,)
                if len(drafts[sequence]) < counts[sequence] and token not in sequence.stops:
                    indices.append(index)
        if not indices:
            break
        remaining = [remaining[index] for index in indices]
        x = advance(x[index_tensor(indices, x)], remaining, drafts)
    return drafts


class DraftOutput(Protocol):
    """Computes scores of the tokens of the model's vocabulary from hidden states of a drafter."""

    def argmax(self, x: Tensor) -> Tensor | None:
        """Return int64 [rows], the token of each row's largest logit; None if the caller has to use `logits`."""

    def logits(self, x: Tensor) -> Tensor:
        """Return float32 [rows, vocabulary of the drafter]."""


def sample_drafts(
    output: DraftOutput, x: Tensor, rows: Sequence[LogitsRow], *, vocab_size: int, kernel_sampler: RowSampler | None
) -> list[int]:
    """Sample a token per row of hidden states; -1 if its scores are not finite, or if the model does not have it.

    Args:
        output: the output layer of the drafter, with the tokens of the model in the same order.
        x: [rows, hidden_size].
        rows: what the rows belong to.
        vocab_size: that of the model.
        kernel_sampler: see `launch_sample`.
    """
    if all(map(is_greedy, rows)) and (tokens := output.argmax(x)) is not None:
        ids = torch.where(tokens < vocab_size, tokens, -1)
    else:
        logits = output.logits(x)
        missing = vocab_size - logits.shape[1]
        fitted = F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, :vocab_size]
        ids = launch_sample(fitted, rows, kernel_sampler).token_ids.wait()
    sampled: list[int] = ids.tolist()
    return sampled


def draft_batch(
    inputs: Tensor,
    spans: Sequence[KVSpan],
    predicts: Sequence[bool],
    rotary: Rotary,
    *,
    pool: Tensor,
    scales: Tensor | None,
) -> ForwardBatch:
    """Return the batch of a drafter's layers.

    Args:
        inputs: int64 [5, tokens]: tokens, three positions and cache slots of each.
        spans: the keys that the tokens attend to, for each sequence.
        predicts: for each of them, whether the hidden states of its last token are returned.
        rotary: that of the layers.
        pool: the layers' keys and values.
        scales: the scales of an int8 `pool`.
    """
    cos, sin = rotary(inputs[1:4])
    predicting = [span for span, is_last in zip(spans, predicts, strict=True) if is_last]
    last_spans = [
        KVSpan(number, 1, span.first_key, span.num_keys, span.num_keys - 1) for number, span in enumerate(predicting)
    ]
    return ForwardBatch(
        cos,
        sin,
        slots=inputs[4],
        spans=KVSpans(spans, device=inputs.device),
        last=index_tensor([span.first_query + span.num_queries - 1 for span in predicting], inputs),
        last_spans=KVSpans(last_spans, device=inputs.device),
        cache=pool,
        cache_scales=scales,
    )
