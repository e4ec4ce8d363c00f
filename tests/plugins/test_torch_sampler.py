"""The vectorized sampler compared with a simple one, row by row."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from dashinfer_vlm_core.decoders import Token
from dashinfer_vlm_core.errors import DecoderFailed
from dashinfer_vlm_torch import sampler
from dashinfer_vlm_torch.kernel_sampler import sample_with_kernels
from dashinfer_vlm_torch.sampler import (
    MAX_UNIFORM,
    _invert_cdf,
    _nucleus_thresholds,
    _wide_nucleus_thresholds,
)
from dashinfer_vlm_torch.sequence import LogitsRow, SequenceState
from tests.cases import cases
from tests.kernels import load_fastest, needs_native

from .oracle import text

STOPS = (95,)


def sequence(output_ids=(), prompt=(1, 2, 2, 3), **sampling):
    made = SequenceState(text(*prompt, **{"temperature": 1.0, "max_tokens": 10_000} | sampling), STOPS)
    for token in output_ids:
        made.append(token)
    return made


@pytest.fixture(params=["operators", pytest.param("kernels", marks=needs_native)])
def kernel_sampler(request):
    """What samples the tokens of rows that are not greedy."""
    return partial(sample_with_kernels, load_fastest()) if request.param == "kernels" else None


def sample(logits, sequences, kernel_sampler=None):
    return sampler.launch_sample(logits, [LogitsRow(one) for one in sequences], kernel_sampler).read()


def is_greedy(one):
    return sampler.is_greedy(LogitsRow(one))


def uniform(one):
    return sampler.uniform(LogitsRow(one))


def repeating(output, options):
    """The tokens that would complete an n-gram again, as in transformers, and with a window as in vLLM."""
    size, first = options.no_repeat_ngram_size, max(0, len(output) - (options.no_repeat_ngram_window or len(output)))
    if not size:
        return set()
    ngrams = [tuple(output[start : start + size]) for start in range(first, len(output) - size + 1)]
    prefix = tuple(output[len(output) - size + 1 :])
    return {ngram[-1] for ngram in ngrams if ngram[:-1] == prefix} - set(options.no_repeat_ngram_whitelist)


def modified(logits, sequence):
    options, scores = sequence.request.sampling, [float(x) for x in logits]
    for token, bias in options.logit_bias.items():
        scores[token] += bias
    if len(sequence.output_ids) < options.min_tokens:
        for token in {*options.stop_token_ids, *(() if options.ignore_eos else STOPS)}:
            scores[token] = -math.inf
    for token in repeating(sequence.output_ids, options):
        scores[token] = -math.inf
    for token in {*sequence.request.token_ids.tolist(), *sequence.output_ids}:
        p = options.repetition_penalty
        scores[token] = scores[token] / p if scores[token] > 0 else scores[token] * p
    for token, count in Counter(sequence.output_ids).items():
        scores[token] -= options.presence_penalty + options.frequency_penalty * count
    return np.array(scores)


def probabilities(logits, sequence):
    """Compute the distribution of the next token, step by step in the order documented by vLLM."""
    options, scores = sequence.request.sampling, modified(logits, sequence)
    if options.temperature == 0:
        return np.eye(len(scores))[int(np.argmax(scores))]
    scores = scores / options.temperature
    if options.min_p:
        scores[np.exp(scores - scores.max()) < options.min_p] = -math.inf
    if options.top_k:
        scores[scores < np.sort(scores)[::-1][: options.top_k][-1]] = -math.inf
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    if options.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= options.top_p]] = 0
    return weights / weights.sum()


def random_sampling(chance):
    """Return sampling options, each one set with probability `chance`."""
    options = {
        "temperature": float(chance.choice([0, 0.3, 1.0, 2.0])),
        "top_p": float(chance.uniform(0.05, 1)),
        "top_k": int(chance.integers(1, 120)),
        "min_p": float(chance.uniform(0, 1) ** 3),
        "repetition_penalty": float(chance.uniform(0.5, 2)),
        "presence_penalty": float(chance.uniform(-2, 2)),
        "frequency_penalty": float(chance.uniform(-2, 2)),
        "no_repeat_ngram_size": int(chance.integers(1, 3)),
        "logit_bias": {int(token): float(chance.uniform(-100, 100) / 20) for token in chance.integers(0, 96, 3)}
        | {95: 6.0},
        "min_tokens": int(chance.integers(0, 12)),
        "stop_token_ids": tuple(chance.integers(0, 96, 2).tolist()),
        "ignore_eos": True,
    }
    return {name: value for name, value in options.items() if chance.random() < 0.5} | {
        "seed": int(chance.integers(1 << 40))
    }


def test_mixed_batch_equals_simple_sampler(kernel_sampler):
    chance = np.random.default_rng(0)
    sequences = [
        sequence(chance.integers(0, 96, chance.integers(0, 12)).tolist(), **random_sampling(chance)) for _ in range(600)
    ]
    logits = torch.from_numpy(chance.normal(scale=2, size=(600, 96)).astype(np.float32))
    before = logits.clone()
    choices = sample(logits, sequences, kernel_sampler)
    for row, (one, choice) in enumerate(zip(sequences, choices, strict=True)):
        expected = probabilities(logits[row], one)
        border = np.cumsum(expected)
        point = uniform(one)
        if np.abs(border - point).min() > 1e-5:  # otherwise rounding decides
            assert choice.id == int(np.searchsorted(border, point, side="right")), one.request.sampling
    assert torch.equal(logits, before)


def test_greedy_rows_depend_only_on_argmax():
    chance = np.random.default_rng(1)
    sequences = [
        sequence(chance.integers(0, 96, chance.integers(0, 12)).tolist(), **random_sampling(chance)) for _ in range(600)
    ]
    sequences += [sequence(temperature=0), sequence(temperature=0, top_p=0.5, top_k=3, min_tokens=4, ignore_eos=True)]
    logits = torch.from_numpy(chance.normal(scale=2, size=(602, 96)).astype(np.float32))
    rows = [row for row, one in enumerate(sequences) if is_greedy(one)]
    choices = sample(logits, sequences)
    assert [choices[row] for row in rows] == [Token(id=int(logits[row].argmax())) for row in rows]
    assert rows[-2:] == [600, 601]


@cases(
    "options",
    [
        {"temperature": 0.5},
        {"logprobs": 0},
        {"logit_bias": {3: 1.0}},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"min_tokens": 2},
        {"no_repeat_ngram_size": 3},
    ],
)
def test_is_greedy(options):
    assert not is_greedy(sequence(**{"temperature": 0} | options))


def test_row_is_independent_of_batch(kernel_sampler):
    chance = np.random.default_rng(1)
    sequences = [sequence(chance.integers(0, 96, 5).tolist(), **random_sampling(chance), logprobs=3) for _ in range(50)]
    logits = torch.from_numpy(chance.normal(size=(50, 96)).astype(np.float32)).bfloat16().float()  # many equal logits
    together = sample(logits, sequences, kernel_sampler)
    assert together == [sample(logits[row : row + 1], [one], kernel_sampler)[0] for row, one in enumerate(sequences)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.5, "top_p": 0.9, "top_k": 12}]
)
def test_samples_follow_distribution(options, kernel_sampler):
    """Chi-square over 8,000 samples with fixed seeds; the bound is the 99.9% quantile for its degrees of freedom."""
    logits = torch.from_numpy(np.random.default_rng(2).normal(size=24).astype(np.float32))
    samples = 8_000
    sequences = [sequence(seed=seed, prompt=(0,), **options) for seed in range(samples)]
    seen = np.bincount(
        [choice.id for choice in sample(logits.expand(samples, -1), sequences, kernel_sampler)], minlength=24
    )
    expected = probabilities(logits, sequences[0]) * samples
    kept = expected > 0
    assert seen[~kept].sum() == 0
    freedom = int(kept.sum()) - 1
    statistic = float(((seen - expected)[kept] ** 2 / expected[kept]).sum())
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson-Hilferty


@cases("count", [1, 96, 128, 1000, 4096])
@cases("decades", [1, 50])
@cases("number", [0.0, 0.25, 0.999, MAX_UNIFORM])
def test_sample_is_first_token_above_cumulative_weight(count, decades, number):
    weights = 10 ** (-decades * torch.rand(40, count, generator=torch.Generator().manual_seed(count)))
    weights[:, : count // 2][:20] = 0  # whole blocks of zeros
    weights[:, count // 2 + 1 :][10:30] = 0
    weights[:, count // 2] = 0.5  # as in any softmax, not all values are close to 0
    uniforms = torch.full((40, 1), number, dtype=torch.float64)
    ids = _invert_cdf(weights, uniforms)
    exact = np.cumsum(weights.numpy().astype(np.longdouble), axis=1)
    for row, token in enumerate(ids.tolist()):
        assert weights[row, token] > 0
        point, slack = number * exact[row, -1], 1e-12 * exact[row, -1]
        assert exact[row, token] > point - slack
        assert token == 0 or exact[row, token - 1] <= point + slack
        assert _invert_cdf(weights[row : row + 1], uniforms[:1]) == token


def test_steps_of_sequence_use_independent_random_numbers():
    one = sequence(seed=3)
    numbers = []
    for _ in range(2000):
        numbers.append(uniform(one))
        one.output_ids.append(0)
    assert len(set(numbers)) == 2000
    assert abs(np.mean(numbers) - 0.5) < 0.03
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.08


@pytest.mark.parametrize("scale", [0.01, 0.5, 4, 30])
def test_nucleus_equals_sorting(scale):
    """With flat and peaked distributions over a large vocabulary, including equal weights."""
    weights = torch.from_numpy(np.random.default_rng(4).normal(scale=scale, size=(6, 20_000)).astype(np.float32))
    weights = weights.mul(8).round().div(8).softmax(-1)
    for p in (1e-9, 0.01, 0.5, 0.9, 0.999):
        ordered = weights.sort(dim=-1, descending=True).values
        before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
        expected = ordered.gather(1, (before < p).sum(dim=-1, keepdim=True) - 1)
        for lower_bounds_of in (_nucleus_thresholds, _wide_nucleus_thresholds):
            assert torch.equal(lower_bounds_of(weights, torch.full((6, 1), p, dtype=torch.float64)), expected)


@needs_native
@cases("scale", [0.01, 0.5, 4])
@cases(
    "options",
    [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"top_k": 1000, "top_p": 0.5}, {"min_p": 0.2, "top_k": 9}],
)
def test_kernels_sample_the_tokens_of_operators(scale, options):
    """Of nuclei of a few tokens and of most of the vocabulary, which is not divisible by the size of a block."""
    logits = torch.from_numpy(np.random.default_rng(5).normal(scale=scale, size=(12, 20_001)).astype(np.float32))
    sequences = [sequence(seed=seed, temperature=0.1 + seed / 8, **options) for seed in range(12)]
    assert sample(logits, sequences, partial(sample_with_kernels, load_fastest())) == sample(logits, sequences)


def test_nucleus_of_nan_terminates():
    weights = torch.full((2, 50), torch.nan)
    weights[1] = 0.02
    for lower_bounds_of in (_nucleus_thresholds, _wide_nucleus_thresholds):
        assert lower_bounds_of(weights, torch.tensor([[0.5], [0.5]], dtype=torch.float64))[1] == weights[1, 0]


@pytest.mark.parametrize("top_p", [1, 0.9])
def test_min_p_of_one_keeps_the_largest_logits(top_p, kernel_sampler):
    logits = torch.zeros(100, 96)
    logits[:, 10:20] = 5.0
    sequences = [sequence(seed=seed, min_p=1.0, temperature=0.7, top_p=top_p) for seed in range(100)]
    sampled = {choice.id for choice in sample(logits, sequences, kernel_sampler)}
    assert sampled <= set(range(10, 20))
    assert len(sampled) > 5


def test_top_k_keeps_all_equal_logits(kernel_sampler):
    """Their order in a sort would be arbitrary."""
    logits = torch.zeros(400, 96)
    logits[:, 10:20] = 5.0
    sequences = [sequence(seed=seed, top_k=3, top_p=0.5) for seed in range(400)]
    sampled = {choice.id for choice in sample(logits, sequences, kernel_sampler)}
    assert sampled == set(range(10, 20))


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-6])
def test_lowest_temperatures_are_greedy(temperature):
    logits = torch.arange(96.0)[None]
    assert sample(logits, [sequence(temperature=temperature)])[0].id == 95


def test_low_temperatures_do_not_overflow(kernel_sampler):
    logits = torch.linspace(-3e4, 3e4, 96)[None]
    assert sample(logits, [sequence(temperature=1e-4, top_p=0.5, top_k=50)], kernel_sampler)[0].id == 95


@cases("number", [math.nan, math.inf])
@cases("options", [{"temperature": 0}, {}, {"min_p": 0.1}, {"top_p": 0.5, "top_k": 5}])
def test_nonfinite_row_fails_alone(number, options, kernel_sampler):
    logits = torch.zeros(3, 96)
    logits[1, 5] = number
    first, broken, last = sample(logits, [sequence(seed=1, logprobs=2, **options) for _ in range(3)], kernel_sampler)
    assert isinstance(broken, DecoderFailed)
    assert first == last


class FixedMask:
    """A matcher that allows the same tokens at every step."""

    def __init__(self, allowed, size=100):
        self.mask = np.isin(np.arange(size), allowed)

    def allowed_tokens(self):
        return self.mask

    def accept_token(self, token):
        assert self.mask[token]


class DeadEnd(FixedMask):
    def allowed_tokens(self):
        raise DecoderFailed("Too complex.")


def guided(matcher, **sampling):
    made = sequence(**sampling)
    made.matcher = matcher
    return made


def test_masked_token_is_never_sampled(kernel_sampler):
    """Regardless of the bias, and even if the nucleus of the unmasked distribution has no allowed token."""
    logits = torch.zeros(1, 100)
    logits[0, 7] = 50
    for options in ({}, {"temperature": 0.0}, {"top_p": 0.01}, {"top_k": 1}, {"logit_bias": {9: 100.0}}):
        chosen = {
            sample(logits, [guided(FixedMask([3, 4]), seed=seed, **options)], kernel_sampler)[0].id
            for seed in range(30)
        }
        assert chosen <= {3, 4}, options
    assert (
        len({sample(logits, [guided(FixedMask([3, 4]), seed=seed)], kernel_sampler)[0].id for seed in range(30)}) == 2
    )


def test_request_with_grammar_is_not_greedy():
    assert not is_greedy(guided(FixedMask([3]), temperature=0))


def test_grammar_of_one_row_does_not_affect_others():
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 100)).astype(np.float32))
    free = [sequence(seed=1), sequence(seed=2, logprobs=2)]
    alone = [sample(logits[[row]], [one])[0] for row, one in ((0, free[0]), (2, free[1]))]
    together = sample(logits, [free[0], guided(FixedMask([5])), free[1]])
    assert [together[0], together[2]] == alone
    assert together[1].id == 5


def test_logprobs_are_computed_before_mask():
    logits = torch.zeros(1, 100)
    chosen = sample(logits, [guided(FixedMask([5]), logprobs=1)])[0]
    assert chosen.id == 5
    assert chosen.logprob == pytest.approx(-math.log(100))


@cases("whitelist", [(), (1,)])
@cases("window", [None, 1, 7, 12])
@cases("size", [1, 2, 3, 7])
def test_repeated_ngrams_are_those_of_the_definition(size, window, whitelist):
    """While the output grows, with drafts that are rejected."""
    chance = np.random.default_rng(size)
    fields = {"no_repeat_ngram_window": window, "no_repeat_ngram_whitelist": whitelist}
    one = sequence(no_repeat_ngram_size=size, **fields)
    seen = 0
    for _ in range(200):
        draft = tuple(chance.integers(0, 3, chance.integers(0, 4)).tolist())
        for used in (draft, ()):
            found = LogitsRow(one, used).banned_tokens().tolist()
            assert found == sorted(repeating([*one.output_ids, *used], one.request.sampling))
            seen += len(found)
        for token in chance.integers(0, 3, 2):
            one.append(int(token))
    assert seen > 0 or window in (1, 7)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_repeated_ngrams_are_those_of_transformers(size):
    from transformers import NoRepeatNGramLogitsProcessor

    process = NoRepeatNGramLogitsProcessor(size)
    output = np.random.default_rng(size).integers(0, 4, 60)
    one = sequence(no_repeat_ngram_size=size)
    for length in range(1, 60):
        one.append(int(output[length - 1]))
        scores = process(torch.from_numpy(output[None, :length]), torch.zeros(1, 96))
        assert LogitsRow(one).banned_tokens().tolist() == scores[0].isinf().nonzero()[:, 0].tolist()


def test_grammar_may_require_a_repetition(kernel_sampler):
    logits = torch.zeros(1, 100)
    for allowed, chosen in (([5], 5), ([5, 6], 6)):
        made = sequence((5,), no_repeat_ngram_size=1)
        made.matcher = FixedMask(allowed)
        assert sample(logits, [made], kernel_sampler)[0].id == chosen


def test_repetition_is_allowed_if_nothing_else_is_left(kernel_sampler):
    one = sequence([*range(95), 95], no_repeat_ngram_size=1, min_tokens=200, seed=1)
    assert sample(torch.zeros(1, 96), [one], kernel_sampler)[0].id != 95


def test_dead_end_grammar_fails_only_its_row():
    outcomes = sample(torch.zeros(2, 100), [guided(DeadEnd([])), sequence(temperature=0.0)])
    assert isinstance(outcomes[0], DecoderFailed)
    assert outcomes[1].id == 0


def test_min_tokens_is_ignored_if_only_end_is_allowed():
    logits = torch.zeros(1, 100)
    logits[0, 95] = 50
    assert sample(logits, [guided(FixedMask([5, 95]), min_tokens=3)])[0].id == 5
    assert sample(logits, [guided(FixedMask([5, 95]))])[0].id == 95
    assert sample(logits, [guided(FixedMask([95]), min_tokens=3)])[0].id == 95
