"""Sample tokens from logits, all rows at once. Parameters that no sequence of the batch uses
cost nothing.

The result is the same as with vLLM's order: bias and minimum length, penalties, masks, temperature, min_p, top_k,
top_p, sampling. Log-probabilities are the model's own, before all of these. The result depends on a row's logits, its
parameters, its tokens so far and its seed, never on other rows. Sampling inverts the cumulative distribution in the
order of token ids, so the order of equal logits cannot affect the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from dashinfer_vlm_core.decoders import Token
from dashinfer_vlm_core.errors import DecoderFailed
from dashinfer_vlm_core.kernels.streams import HostCopy, to_device
from dashinfer_vlm_core.kernels.types import SampledIds
from dashinfer_vlm_core.protocol.sampling import GREEDY_BELOW

from .sequence import LogitsRow
from .token_masks import Masks, token_masks

Alternatives: TypeAlias = tuple[tuple[int, float], ...]

OVERFLOW = "The model's activations exceeded the range of its dtype. Set `dtype` to bfloat16 or float32."

MAX_ALTERNATIVES = 20
NUCLEUS_WIDTH = 1024
"""The nucleus is searched among this many of the most likely tokens first. With eight rows that is three times as
fast."""

DIGIT_BITS = 16
LOW_DIGITS = 1 << DIGIT_BITS
HIGH_DIGITS = (0x3F800000 >> DIGIT_BITS) + 1
"""The number of values of the upper 16 bits of a weight, which is at most 1."""

BLOCK = 128
"""Tokens per block of the cumulative sum."""

MAX_UNIFORM = 1 - 2.0**-52
"""Keeps `uniform * total` below `total` after rounding."""


RowSampler: TypeAlias = Callable[[Tensor, Sequence[int], Sequence[LogitsRow]], SampledIds]
"""Samples tokens from the rows of float32 [.., vocab_size] with some numbers, according to the sampling parameters of
the given rows, one for each number."""


class LaunchedSample(NamedTuple):
    """Tokens that a device samples while the caller continues.

    Attributes:
        logits: float32 [rows, vocab_size]; None if no row requests log-probabilities.
        rows: what the rows belong to.
        ids: int64 [rows], on the device; those of rows without a finite score are token ids, too.
        token_ids: the same, on their way to the CPU; -1 for rows without a finite score.
        errors: the errors of grammars, by row.
    """

    logits: Tensor | None
    rows: Sequence[LogitsRow]
    ids: Tensor
    token_ids: HostCopy
    errors: dict[int, DecoderFailed]

    def read(self) -> list[Token | DecoderFailed]:
        """Wait for the tokens; returns one per row, or the error of a row whose logits are not finite or whose grammar
        failed."""
        token_ids: list[int] = self.token_ids.wait().tolist()
        logprobs = {} if self.logits is None else _log_probabilities(self.logits, self.ids, self.rows)
        outcomes: list[Token | DecoderFailed] = []
        for row, token in enumerate(token_ids):
            if error := self.errors.get(row):
                outcomes.append(error)
            elif token < 0:
                outcomes.append(DecoderFailed(OVERFLOW))
            else:
                logprob, alternatives = logprobs.get(row, (None, ()))
                outcomes.append(Token(id=token, logprob=logprob, top_logprobs=alternatives))
        return outcomes


class LaunchedArgmax(NamedTuple):
    """Greedy tokens that a device computes while the caller continues; attributes as in `LaunchedSample`."""

    ids: Tensor
    token_ids: HostCopy

    def read(self) -> list[Token | DecoderFailed]:
        """Wait for the tokens; returns one per row."""
        return [Token(id=token) for token in self.token_ids.wait().tolist()]


def launch_sample(
    logits: Tensor, rows: Sequence[LogitsRow], kernel_sampler: RowSampler | None = None
) -> LaunchedSample:
    """Sample a token from each row, without waiting for the device.

    Args:
        logits: float32 [rows, vocab_size]; not modified.
        rows: what the rows belong to; those of one sequence are adjacent, with increasingly long drafts.
        kernel_sampler: samples the tokens of rows with a temperature and without `top_p`; by default, PyTorch's
            operators do.
    """
    masks, errors = token_masks(rows, logits.shape[-1])
    ids, is_finite = _choose(logits, rows, masks, kernel_sampler)
    with_logprobs = any(row.sampling.logprobs is not None for row in rows)
    token_ids = HostCopy(torch.where(is_finite, ids, -1))
    return LaunchedSample(logits if with_logprobs else None, rows, ids, token_ids, errors)


def _choose(
    logits: Tensor, rows: Sequence[LogitsRow], masks: Masks, kernel_sampler: RowSampler | None = None
) -> tuple[Tensor, Tensor]:
    """Return the token of each row, int64 [rows], and whether its largest score is finite, bool [rows]. On a GPU, this
    does not wait for it."""
    scores = _mask_disallowed(_apply_penalties(_apply_bias_and_min_tokens(logits, rows), rows), masks)
    random_rows = [index for index, row in enumerate(rows) if row.sampling.temperature >= GREEDY_BELOW]
    kernel_rows = [index for index in random_rows if kernel_sampler is not None and rows[index].sampling.top_p >= 1]
    if kernel_sampler is not None and len(kernel_rows) == len(rows):
        sampled = kernel_sampler(scores, kernel_rows, rows)
        return sampled.ids, sampled.totals.isfinite()
    best, ids = scores.max(dim=-1)
    if kernel_sampler is not None and kernel_rows:
        ids[kernel_rows] = kernel_sampler(scores, kernel_rows, [rows[number] for number in kernel_rows]).ids
    other_rows = sorted(set(random_rows).difference(kernel_rows))
    if other_rows:
        index = index_tensor(other_rows, logits)
        part = scores if len(other_rows) == len(rows) else scores[index]
        ids[index] = _sample_rows(part, [rows[number] for number in other_rows])
    return ids, best.isfinite()


def is_greedy(row: LogitsRow) -> bool:
    """Whether `launch_sample` would return the token of the largest logit, without log-probabilities."""
    sampling = row.sampling
    is_modified = (
        sampling.logit_bias
        or row.sequence.matcher
        or row.sequence.ngram_ban
        or (row.sequence.stops and row.too_short)
        or sampling.has_penalties
    )
    return sampling.temperature < GREEDY_BELOW and sampling.logprobs is None and not is_modified


def uniform(row: LogitsRow) -> float:
    """The random number in [0, 1) for a token, a function of the sequence's seed and the length of its output.

    Philox is a counter-based generator (Salmon et al., SC 2011).
    """
    generator = np.random.Generator(np.random.Philox(key=row.sequence.seed, counter=row.num_output_tokens))
    return min(generator.random(), MAX_UNIFORM)


def _mask_disallowed(scores: Tensor, masks: Masks) -> Tensor:
    if not masks:
        return scores
    scores = scores.clone()
    disallowed = to_device(torch.from_numpy(~np.stack(list(masks.values()))), scores.device)
    index = index_tensor(list(masks), scores)
    scores[index] = scores[index].masked_fill(disallowed, -torch.inf)
    return scores


def _apply_bias_and_min_tokens(scores: Tensor, rows: Sequence[LogitsRow]) -> Tensor:
    biased = [(index, row.sampling.logit_bias) for index, row in enumerate(rows) if row.sampling.logit_bias]
    below_min = [
        (index, row.sequence.stops)
        for index, row in enumerate(rows)
        if row.sequence.stops and row.too_short and not row.sequence.matcher
    ]
    if not biased and not below_min:
        return scores
    scores = scores.clone()
    if biased:
        numbers, ids = _flat_index(biased, scores)
        bias = [value for _, values in biased for value in values.values()]
        scores[numbers, ids] += to_device(torch.tensor(bias), scores.device)
    if below_min:
        # A number would be copied from the CPU, which waits for a GPU.
        scores.index_put_(_flat_index(below_min, scores), scores.new_full((), -torch.inf))
    return scores


def _flat_index(tokens_by_row: Iterable[tuple[int, Iterable[int]]], like: Tensor) -> tuple[Tensor, Tensor]:
    pairs = [(row, token) for row, tokens in tokens_by_row for token in tokens]
    return index_tensor([row for row, _ in pairs], like), index_tensor([token for _, token in pairs], like)


def _apply_penalties(scores: Tensor, rows: Sequence[LogitsRow]) -> Tensor:
    penalized = [(index, row) for index, row in enumerate(rows) if row.sampling.has_penalties]
    if not penalized:
        return scores
    columns = zip(*(_penalties(index, row) for index, row in penalized), strict=True)
    numbers, tokens, factors, terms = (
        to_device(torch.from_numpy(np.concatenate(parts)), scores.device) for parts in columns
    )
    scores = scores.clone()
    values = scores[numbers, tokens]
    scores[numbers, tokens] = torch.where(values > 0, values / factors, values * factors) - terms
    return scores


def _penalties(index: int, row: LogitsRow) -> tuple[npt.NDArray[np.generic], ...]:
    sampling = row.sampling
    output_ids = np.array([*row.sequence.output_ids, *row.draft], dtype=np.int64)
    output, counts = np.unique(output_ids, return_counts=True)
    tokens = output if sampling.repetition_penalty == 1 else np.union1d(row.sequence.request.token_ids, output)
    terms = np.zeros(len(tokens), np.float32)
    terms[np.searchsorted(tokens, output)] = sampling.presence_penalty + sampling.frequency_penalty * counts
    return np.full_like(tokens, index), tokens, np.full_like(terms, sampling.repetition_penalty), terms


def _sample_rows(scores: Tensor, rows: Sequence[LogitsRow]) -> Tensor:
    options = [row.sampling for row in rows]
    scores = scores / _column([option.temperature for option in options], scores)
    _keep_min_p(scores, [option.min_p for option in options])
    _keep_top_k(scores, [option.top_k for option in options])
    weights = scores.softmax(dim=-1)
    _keep_top_p(weights, [option.top_p for option in options])
    return _invert_cdf(weights, _column([uniform(row) for row in rows], scores, torch.float64))


def _invert_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return int64 [rows], the tokens at which the cumulative sums exceed the totals times `uniforms`, float64
    [rows, 1].

    Blocks are summed first, so that the cumulative sum of only one block per row is computed token by token. For the
    whole row in float64, this takes five times as long.
    """
    rows, count = weights.shape
    padding = -count % BLOCK
    blocks = (F.pad(weights, (0, padding)) if padding else weights).view(rows, -1, BLOCK)
    ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    points = ends[:, -1:] * uniforms
    # Beyond the last block and token only if the logits are not finite, which is an error of these rows.
    block = torch.searchsorted(ends, points, right=True).clamp(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(rows, device=block.device), block[:, 0]].double().cumsum(dim=-1)
    # Rounding differs from that of the block's sum: if the cumulative sum ends below the point, the last token with a
    # nonzero weight is meant.
    limit = torch.nextafter(inside[:, -1:], torch.zeros_like(points))
    token = torch.searchsorted(inside, torch.minimum(points - before, limit), right=True)
    return (block * BLOCK + token)[:, 0].clamp(max=count - 1)


def _keep_min_p(scores: Tensor, min_p: Sequence[float]) -> None:
    """Set scores to -inf whose weight is below that of the row's largest one times p (Nguyen et al., arXiv
    2407.01082)."""
    rows = [row for row, p in enumerate(min_p) if p > 0]
    if rows:
        index = index_tensor(rows, scores)
        part = scores[index]
        thresholds = part.amax(dim=-1, keepdim=True) + _column([math.log(min_p[row]) for row in rows], scores)
        scores[index] = part.masked_fill(part < thresholds, -torch.inf)


def _keep_top_k(scores: Tensor, top_k: Sequence[int]) -> None:
    """Set scores below the k-th largest of each row to -inf. Scores equal to it are all kept."""
    rows = [row for row, k in enumerate(top_k) if 0 < k < scores.shape[-1]]
    if rows:
        index = index_tensor(rows, scores)
        ranks = index_tensor([top_k[row] - 1 for row in rows], scores)[:, None]
        thresholds = scores[index].topk(max(top_k[row] for row in rows)).values.gather(1, ranks)
        scores[index] = scores[index].masked_fill(scores[index] < thresholds, -torch.inf)


def _keep_top_p(weights: Tensor, top_p: Sequence[float]) -> None:
    """Set weights outside the nucleus, the fewest tokens whose weights reach p, to 0. Weights equal to the smallest in
    the nucleus are all kept."""
    rows = [row for row, p in enumerate(top_p) if p < 1]
    if rows:
        index = index_tensor(rows, weights)
        part = weights[index]
        thresholds = _nucleus_thresholds(part, _column([top_p[row] for row in rows], weights, torch.float64))
        weights[index] = part.masked_fill(part < thresholds, 0)


def _nucleus_thresholds(weights: Tensor, top_p: Tensor) -> Tensor:
    """[rows, 1], the smallest weight in each row's nucleus (Holtzman et al., arXiv 1904.09751): the smallest weight
    for which the sum of the larger ones is below p."""
    if weights.device.type != "cpu":  # a GPU sorts fast, and the CPU need not wait for it
        largest = weights.sort(dim=-1, descending=True).values
        return _last_inside(largest, largest.cumsum(dim=-1, dtype=torch.float64), top_p)
    largest = weights.topk(min(NUCLEUS_WIDTH, weights.shape[-1])).values
    cumulative = largest.cumsum(dim=-1, dtype=torch.float64)
    if bool((cumulative[:, -1:] < top_p).any()):
        return _wide_nucleus_thresholds(weights, top_p)
    return _last_inside(largest, cumulative, top_p)


def _last_inside(largest: Tensor, cumulative: Tensor, top_p: Tensor) -> Tensor:
    """Return the last of the `largest` weights, in descending order, for which the sum of those before it is below
    p."""
    inside = (cumulative - largest < top_p).sum(dim=-1, keepdim=True)
    return largest.gather(1, inside.clamp(min=1) - 1)  # no token is inside if weights are NaN


def _wide_nucleus_thresholds(weights: Tensor, top_p: Tensor) -> Tensor:
    """Compute the same for nuclei of any size without sorting: digit by digit, as in a radix sort, since nonnegative
    floats are ordered like their bits."""
    bits = weights.view(torch.int32)
    high, above = _last_within(weights, (bits >> DIGIT_BITS).clamp(0, HIGH_DIGITS - 1), HIGH_DIGITS, top_p)
    inside = weights.masked_fill(bits >> DIGIT_BITS != high, 0)
    low, _ = _last_within(inside, bits & (LOW_DIGITS - 1), LOW_DIGITS, top_p - above)
    return (high << DIGIT_BITS | low).to(torch.int32).view(torch.float32)


def _last_within(weights: Tensor, digits: Tensor, count: int, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest digit for which the total weight of larger digits is below `target`, and that total; both
    [rows, 1]."""
    totals = torch.zeros(len(weights), count, dtype=torch.float64, device=weights.device)
    totals.scatter_add_(1, digits.long(), weights.double())
    # Of each digit, without its own weight: sums from the largest digit on, each moved to the next smaller digit.
    larger = totals.flip(1).cumsum(1).roll(1, dims=1)
    larger[:, 0] = 0
    larger = larger.flip(1)
    digit = (larger >= target).sum(dim=1, keepdim=True).clamp(max=count - 1)
    return digit, larger.gather(1, digit)


def _log_probabilities(logits: Tensor, ids: Tensor, rows: Sequence[LogitsRow]) -> dict[int, tuple[float, Alternatives]]:
    requested = {index: count for index, row in enumerate(rows) if (count := row.sampling.logprobs) is not None}
    if not requested:
        return {}
    index = index_tensor(list(requested), logits)
    logprobs = logits[index].log_softmax(dim=-1)
    # Always the same number, so that the order of equal values does not depend on the requests of other rows.
    top = logprobs.topk(min(MAX_ALTERNATIVES, logits.shape[-1]))
    sampled = logprobs.gather(1, ids[index, None])[:, 0].tolist()
    alternatives = [
        tuple(zip(*row, strict=True)) for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    return {row: (sampled[i], alternatives[i][:count]) for i, (row, count) in enumerate(requested.items())}


def index_tensor(rows: Sequence[int], like: Tensor) -> Tensor:
    """Return int64 [rows] on the device of `like`."""
    return to_device(torch.tensor(rows, dtype=torch.int64), like.device)


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return to_device(torch.tensor(values, dtype=dtype), like.device)[:, None]
