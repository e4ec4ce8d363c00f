"""Logits -> the next token of each request, all rows at once; what no request of the batch asks for costs nothing.

The order is the field's (vLLM): bias and minimum length, penalties, the grammar's mask, temperature, top_k, top_p,
draw. Log-probabilities are the model's own, before all of these. Everything is a function of a row's logits, its
options, its tokens so far and its seed, never of the rows beside it; a draw inverts the cumulative distribution in the
order of token ids, so that equal logits cannot change places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from dashinfer_vlm_core.errors import DecoderFailed
from dashinfer_vlm_core.protocol.sampling import GREEDY_BELOW

from .scheduler import Outcome, SampledToken, SequenceState

Alternatives: TypeAlias = tuple[tuple[int, float], ...]

OVERFLOW = "The model's numbers left the range of its dtype. Try bfloat16 or float32 for `dtype`."

MAX_ALTERNATIVES = 20
NUCLEUS_WIDTH = 1024
"""A nucleus is looked for among so many tokens first: with eight rows that is three times as fast."""

DIGIT_BITS = 16
LOW_DIGITS = 1 << DIGIT_BITS
HIGH_DIGITS = (0x3F800000 >> DIGIT_BITS) + 1
"""The upper half of the bits of a weight, which is 1 at most."""

BLOCK = 128
"""Tokens whose weights are added up together."""

LARGEST_UNIFORM = 1 - 2.0**-52
"""So that `uniform * total` is below `total` after rounding."""


def sample(logits: Tensor, sequences: Sequence[SequenceState]) -> list[Outcome]:
    """The next token of each run.

    Args:
        logits: float32 [runs, vocab_size]; not changed.
        runs: one per row.

    Returns:
        A choice per run, or the error of a run whose logits are not finite.
    """
    masks, lost = _masks(sequences)
    scores = _bar(_penalise(_edit(logits, sequences), sequences), masks)
    best, ids = scores.max(dim=-1)
    drawn = [row for row, sequence in enumerate(sequences) if sequence.request.sampling.temperature >= GREEDY_BELOW]
    if drawn:
        index = _index(drawn, logits)
        part = scores if len(drawn) == len(sequences) else scores[index]
        ids[index] = _draw(part, [sequences[row] for row in drawn])
    chosen = torch.where(best.isfinite(), ids, -1)
    listed = _log_probabilities(logits, ids, sequences)
    return [
        lost.get(row) or (DecoderFailed(OVERFLOW) if token < 0 else SampledToken(token, *listed.get(row, ())))
        for row, token in enumerate(chosen.tolist())
    ]


def is_greedy(sequence: SequenceState) -> bool:
    """Whether `choose` would take the token of the largest logit, whatever the others are."""
    sampling = sequence.request.sampling
    edited = (
        sampling.logit_bias or sequence.matcher or (sequence.stops and sequence.too_short) or _is_penalised(sequence)
    )
    return sampling.temperature < GREEDY_BELOW and sampling.logprobs is None and not edited


def uniform(sequence: SequenceState) -> float:
    """The random number in [0, 1) of a run's next token: a function of its seed and of how many tokens came before.

    Philox is a counter-based generator (Salmon et al., SC 2011), made for this.
    """
    generator = np.random.Generator(np.random.Philox(key=sequence.seed, counter=len(sequence.output_ids)))
    return min(generator.random(), LARGEST_UNIFORM)


def _masks(sequences: Sequence[SequenceState]) -> tuple[dict[int, npt.NDArray[np.bool_]], dict[int, DecoderFailed]]:
    """By row, for rows that follow a grammar: the tokens that it allows, or why it cannot be followed on."""
    masks: dict[int, npt.NDArray[np.bool_]] = {}
    lost: dict[int, DecoderFailed] = {}
    for row, sequence in enumerate(sequences):
        if sequence.matcher:
            try:
                masks[row] = _without_early_end(sequence, sequence.matcher.allowed_tokens())
            except DecoderFailed as error:
                lost[row] = error
    return masks, lost


def _without_early_end(sequence: SequenceState, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The mask less the tokens that end the answer while it is too short, unless the grammar leaves nothing else."""
    if not sequence.too_short:
        return mask
    others = mask.copy()
    others[list(sequence.stops)] = False
    return others if others.any() else mask


def _bar(scores: Tensor, masks: dict[int, npt.NDArray[np.bool_]]) -> Tensor:
    """Put -inf at what a grammar does not allow."""
    if not masks:
        return scores
    scores = scores.clone()
    barred = torch.from_numpy(~np.stack(list(masks.values()))).to(scores.device)
    index = _index(list(masks), scores)
    scores[index] = scores[index].masked_fill(barred, -torch.inf)
    return scores


def _edit(scores: Tensor, sequences: Sequence[SequenceState]) -> Tensor:
    """logit_bias, and no end before min_tokens."""
    biased = [
        (row, sequence.request.sampling.logit_bias)
        for row, sequence in enumerate(sequences)
        if sequence.request.sampling.logit_bias
    ]
    young = [
        (row, sequence.stops)
        for row, sequence in enumerate(sequences)
        if sequence.stops and sequence.too_short and not sequence.matcher
    ]
    if not biased and not young:
        return scores
    scores = scores.clone()
    if biased:
        rows, ids = _cells(biased)
        bias = [value for _, values in biased for value in values.values()]
        scores[rows, ids] += torch.tensor(bias, device=scores.device)
    if young:
        scores[_cells(young)] = -torch.inf
    return scores


def _cells(cells: Iterable[tuple[int, Iterable[int]]]) -> tuple[list[int], list[int]]:
    """(row, ids) pairs as an index."""
    pairs = [(row, token) for row, tokens in cells for token in tokens]
    return [row for row, _ in pairs], [token for _, token in pairs]


def _penalise(scores: Tensor, sequences: Sequence[SequenceState]) -> Tensor:
    """Repetition, presence and frequency penalties, at the few tokens that they concern."""
    penalised = [(row, sequence) for row, sequence in enumerate(sequences) if _is_penalised(sequence)]
    if not penalised:
        return scores
    columns = zip(*(_penalties(row, sequence) for row, sequence in penalised), strict=True)
    rows, tokens, factors, terms = (torch.from_numpy(np.concatenate(parts)).to(scores.device) for parts in columns)
    scores = scores.clone()
    values = scores[rows, tokens]
    scores[rows, tokens] = torch.where(values > 0, values / factors, values * factors) - terms
    return scores


def _is_penalised(sequence: SequenceState) -> bool:
    sampling = sequence.request.sampling
    return sampling.repetition_penalty != 1 or bool(sampling.presence_penalty or sampling.frequency_penalty)


def _penalties(row: int, sequence: SequenceState) -> tuple[npt.NDArray[np.generic], ...]:
    """Rows and tokens of the logits to penalise, and for each of them the factor and the term."""
    sampling = sequence.request.sampling
    answer, counts = np.unique(np.array(sequence.output_ids, dtype=np.int64), return_counts=True)
    tokens = answer if sampling.repetition_penalty == 1 else np.union1d(sequence.request.token_ids, answer)
    terms = np.zeros(len(tokens), np.float32)
    terms[np.searchsorted(tokens, answer)] = sampling.presence_penalty + sampling.frequency_penalty * counts
    return np.full_like(tokens, row), tokens, np.full_like(terms, sampling.repetition_penalty), terms


def _draw(scores: Tensor, sequences: Sequence[SequenceState]) -> Tensor:
    """int64 [rows], drawn from float32 [rows, vocab_size]."""
    options = [sequence.request.sampling for sequence in sequences]
    scores = scores / _column([option.temperature for option in options], scores)
    _keep_top_k(scores, [option.top_k for option in options])
    weights = scores.softmax(dim=-1)
    _keep_top_p(weights, [option.top_p for option in options])
    return _pick(weights, _column([uniform(sequence) for sequence in sequences], scores, torch.float64))


def _pick(weights: Tensor, shares: Tensor) -> Tensor:
    """int64 [rows], the token at which the running sum of a row exceeds its share, float64 [rows, 1], of the whole.

    Sums of blocks are added up first, so that only one block of a row is added up number by number: the whole row in
    float64 takes five times as long.
    """
    rows, count = weights.shape
    padding = -count % BLOCK
    blocks = (F.pad(weights, (0, padding)) if padding else weights).view(rows, -1, BLOCK)
    ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    points = ends[:, -1:] * shares
    # Beyond the last block and token only where the logits are not finite, for which `choose` reports an error.
    block = torch.searchsorted(ends, points, right=True).clamp(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(rows, device=block.device), block[:, 0]].double().cumsum(dim=-1)
    # Rounded otherwise than the block's sum, they may end below the point, which means the last token with a weight.
    least = torch.nextafter(inside[:, -1:], torch.zeros_like(points))
    token = torch.searchsorted(inside, torch.minimum(points - before, least), right=True)
    return (block * BLOCK + token)[:, 0].clamp(max=count - 1)


def _keep_top_k(scores: Tensor, top_k: Sequence[int]) -> None:
    """Put -inf below the k-th largest score of each row; scores equal to it all stay."""
    rows = [row for row, k in enumerate(top_k) if 0 < k < scores.shape[-1]]
    if rows:
        index = _index(rows, scores)
        ranks = torch.tensor([[top_k[row] - 1] for row in rows], device=scores.device)
        floors = scores[index].topk(max(top_k[row] for row in rows)).values.gather(1, ranks)
        scores[index] = scores[index].masked_fill(scores[index] < floors, -torch.inf)


def _keep_top_p(weights: Tensor, top_p: Sequence[float]) -> None:
    """Put 0 outside the nucleus: the fewest tokens whose weights reach p; weights equal to its least all stay."""
    rows = [row for row, p in enumerate(top_p) if p < 1]
    if rows:
        index = _index(rows, weights)
        part = weights[index]
        floors = _nucleus_floors(part, _column([top_p[row] for row in rows], weights, torch.float64))
        weights[index] = part.masked_fill(part < floors, 0)


def _nucleus_floors(weights: Tensor, top_p: Tensor) -> Tensor:
    """[rows, 1], the least weight within each row's nucleus (Holtzman et al., arXiv 1904.09751): the least of which the
    larger ones do not reach p."""
    largest = weights.topk(min(NUCLEUS_WIDTH, weights.shape[-1])).values
    cumulative = largest.cumsum(dim=-1, dtype=torch.float64)
    if bool((cumulative[:, -1:] < top_p).any()):
        return _wide_nucleus_floors(weights, top_p)
    inside = (cumulative - largest < top_p).sum(dim=-1, keepdim=True)
    return largest.gather(1, inside.clamp(min=1) - 1)  # none is inside where weights are NaN


def _wide_nucleus_floors(weights: Tensor, top_p: Tensor) -> Tensor:
    """The same of nuclei of any width, without sorting: digit by digit, as a radix sort would, since floats without a
    sign are ordered as their bits are."""
    bits = weights.view(torch.int32)
    high, above = _last_within(weights, (bits >> DIGIT_BITS).clamp(0, HIGH_DIGITS - 1), HIGH_DIGITS, top_p)
    inside = weights.masked_fill(bits >> DIGIT_BITS != high, 0)
    low, _ = _last_within(inside, bits & (LOW_DIGITS - 1), LOW_DIGITS, top_p - above)
    return (high << DIGIT_BITS | low).to(torch.int32).view(torch.float32)


def _last_within(weights: Tensor, digits: Tensor, count: int, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The least digit whose larger ones hold less weight than is wanted, and how much they hold; both [rows, 1]."""
    held = torch.zeros(len(weights), count, dtype=torch.float64, device=weights.device)
    held.scatter_add_(1, digits.long(), weights.double())
    larger = held.flip(1).cumsum(1).roll(1, dims=1)
    larger[:, 0] = 0
    larger = larger.flip(1)
    digit = (larger >= wanted).sum(dim=1, keepdim=True).clamp(max=count - 1)
    return digit, larger.gather(1, digit)


def _log_probabilities(
    logits: Tensor, ids: Tensor, sequences: Sequence[SequenceState]
) -> dict[int, tuple[float, Alternatives]]:
    """By row, for rows that ask: the chosen token's log-probability, and the most likely tokens with theirs."""
    asked = {
        row: count
        for row, sequence in enumerate(sequences)
        if (count := sequence.request.sampling.logprobs) is not None
    }
    if not asked:
        return {}
    index = _index(list(asked), logits)
    logprobs = logits[index].log_softmax(dim=-1)
    # Always the same width, so that the order of equal ones does not depend on what other rows ask for.
    top = logprobs.topk(min(MAX_ALTERNATIVES, logits.shape[-1]))
    chosen = logprobs.gather(1, ids[index, None])[:, 0].tolist()
    alternatives = [
        tuple(zip(*row, strict=True)) for row in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    return {row: (chosen[i], alternatives[i][:count]) for i, (row, count) in enumerate(asked.items())}


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, device=like.device)


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]
