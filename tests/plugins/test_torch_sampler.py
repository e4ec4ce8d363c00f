"""The vectorised sampler against a plain one, row by row."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from dashinfer_vlm_core.errors import DecoderFailed
from dashinfer_vlm_torch.sampler import (
    LARGEST_UNIFORM,
    _nucleus_floors,
    _pick,
    _wide_nucleus_floors,
    is_greedy,
    sample,
    uniform,
)
from dashinfer_vlm_torch.scheduler import SampledToken, SequenceState

from .oracle import text

STOPS = (95,)


def run(answer=(), prompt=(1, 2, 2, 3), **sampling):
    made = SequenceState.of(text(*prompt, **{"temperature": 1.0, "max_tokens": 10_000} | sampling), STOPS)
    made.output_ids.extend(answer)
    return made


def probabilities(logits, run):
    """The distribution of the next token, step by step in the order that vLLM documents."""
    options, scores = run.request.sampling, [float(x) for x in logits]
    for token, bias in options.logit_bias.items():
        scores[token] += bias
    if len(run.output_ids) < options.min_tokens:
        for token in {*options.stop_token_ids, *(() if options.ignore_eos else STOPS)}:
            scores[token] = -math.inf
    for token in {*run.request.token_ids.tolist(), *run.output_ids}:
        p = options.repetition_penalty
        scores[token] = scores[token] / p if scores[token] > 0 else scores[token] * p
    for token, count in Counter(run.output_ids).items():
        scores[token] -= options.presence_penalty + options.frequency_penalty * count
    if options.temperature == 0:
        return np.eye(len(scores))[int(np.argmax(scores))]
    scores = np.array(scores) / options.temperature
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
    """Each option in about half of the rows."""
    options = {
        "temperature": float(chance.choice([0, 0.3, 1.0, 2.0])),
        "top_p": float(chance.uniform(0.05, 1)),
        "top_k": int(chance.integers(1, 120)),
        "repetition_penalty": float(chance.uniform(0.5, 2)),
        "presence_penalty": float(chance.uniform(-2, 2)),
        "frequency_penalty": float(chance.uniform(-2, 2)),
        "logit_bias": {int(token): float(chance.uniform(-100, 100) / 20) for token in chance.integers(0, 96, 3)}
        | {95: 6.0},
        "min_tokens": int(chance.integers(0, 12)),
        "stop_token_ids": tuple(chance.integers(0, 96, 2).tolist()),
        "ignore_eos": True,
    }
    return {name: value for name, value in options.items() if chance.random() < 0.5} | {
        "seed": int(chance.integers(1 << 40))
    }


def test_every_row_of_a_mixed_batch_is_drawn_as_by_the_plain_sampler():
    chance = np.random.default_rng(0)
    runs = [run(chance.integers(0, 96, chance.integers(0, 12)).tolist(), **random_sampling(chance)) for _ in range(600)]
    logits = torch.from_numpy(chance.normal(scale=2, size=(600, 96)).astype(np.float32))
    before = logits.clone()
    choices = sample(logits, runs)
    for row, (one, choice) in enumerate(zip(runs, choices, strict=True)):
        expected = probabilities(logits[row], one)
        border = np.cumsum(expected)
        point = uniform(one)
        if np.abs(border - point).min() > 1e-5:  # else rounding decides
            assert choice.id == int(np.searchsorted(border, point, side="right")), one.request.sampling
    assert torch.equal(logits, before)


def test_rows_that_take_the_likeliest_token_depend_on_nothing_else():
    chance = np.random.default_rng(1)
    runs = [run(chance.integers(0, 96, chance.integers(0, 12)).tolist(), **random_sampling(chance)) for _ in range(600)]
    runs += [run(temperature=0), run(temperature=0, top_p=0.5, top_k=3, min_tokens=4, ignore_eos=True)]
    logits = torch.from_numpy(chance.normal(scale=2, size=(602, 96)).astype(np.float32))
    rows = [row for row, one in enumerate(runs) if is_greedy(one)]
    choices = sample(logits, runs)
    assert [choices[row] for row in rows] == [SampledToken(int(logits[row].argmax())) for row in rows]
    assert rows[-2:] == [600, 601]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"logprobs": 0},
        {"logit_bias": {3: 1.0}},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"min_tokens": 2},
    ],
)
def test_what_asks_for_more_than_the_likeliest_token(options):
    assert not is_greedy(run(**{"temperature": 0} | options))


def test_a_row_does_not_depend_on_the_rows_beside_it():
    chance = np.random.default_rng(1)
    runs = [run(chance.integers(0, 96, 5).tolist(), **random_sampling(chance), logprobs=3) for _ in range(50)]
    logits = torch.from_numpy(chance.normal(size=(50, 96)).astype(np.float32)).bfloat16().float()  # many equal logits
    together = sample(logits, runs)
    assert together == [sample(logits[row : row + 1], [one])[0] for row, one in enumerate(runs)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"top_k": 5}, {"temperature": 0.5, "top_p": 0.9, "top_k": 12}])
def test_draws_follow_the_distribution(options):
    """Chi-square over 20 000 draws with fixed seeds; the bound is the 99.9 % quantile for its degrees of freedom."""
    logits = torch.from_numpy(np.random.default_rng(2).normal(size=24).astype(np.float32))
    draws = 20_000
    runs = [run(seed=seed, prompt=(0,), **options) for seed in range(draws)]
    seen = np.bincount([choice.id for choice in sample(logits.expand(draws, -1), runs)], minlength=24)
    expected = probabilities(logits, runs[0]) * draws
    kept = expected > 0
    assert seen[~kept].sum() == 0
    freedom = int(kept.sum()) - 1
    statistic = float(((seen - expected)[kept] ** 2 / expected[kept]).sum())
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson-Hilferty


@pytest.mark.parametrize("count", [1, 96, 128, 1000, 4096])
@pytest.mark.parametrize("decades", [1, 50], ids=["alike", "of all sizes"])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.999, LARGEST_UNIFORM])
def test_a_draw_is_where_the_running_sum_exceeds_its_share(count, decades, share):
    weights = 10 ** (-decades * torch.rand(40, count, generator=torch.Generator().manual_seed(count)))
    weights[:, : count // 2][:20] = 0  # whole blocks of nothing
    weights[:, count // 2 + 1 :][10:30] = 0
    weights[:, count // 2] = 0.5  # as in any softmax, not all is next to nothing
    shares = torch.full((40, 1), share, dtype=torch.float64)
    ids = _pick(weights, shares)
    exact = np.cumsum(weights.numpy().astype(np.longdouble), axis=1)
    for row, token in enumerate(ids.tolist()):
        assert weights[row, token] > 0
        point, slack = share * exact[row, -1], 1e-12 * exact[row, -1]
        assert exact[row, token] > point - slack
        assert token == 0 or exact[row, token - 1] <= point + slack
        assert _pick(weights[row : row + 1], shares[:1]) == token


def test_steps_of_one_run_draw_independent_numbers():
    one = run(seed=3)
    numbers = []
    for _ in range(2000):
        numbers.append(uniform(one))
        one.output_ids.append(0)
    assert len(set(numbers)) == 2000
    assert abs(np.mean(numbers) - 0.5) < 0.03
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.08


@pytest.mark.parametrize("scale", [0.01, 0.5, 4, 30])
def test_a_nucleus_ends_where_sorting_says(scale):
    """Flat and peaked distributions over a large vocabulary, with equal weights among them."""
    weights = torch.from_numpy(np.random.default_rng(4).normal(scale=scale, size=(6, 20_000)).astype(np.float32))
    weights = weights.mul(8).round().div(8).softmax(-1)
    for p in (1e-9, 0.01, 0.5, 0.9, 0.999):
        ordered = weights.sort(dim=-1, descending=True).values
        before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
        expected = ordered.gather(1, (before < p).sum(dim=-1, keepdim=True) - 1)
        for floors_of in (_nucleus_floors, _wide_nucleus_floors):
            assert torch.equal(floors_of(weights, torch.full((6, 1), p, dtype=torch.float64)), expected)


def test_a_nucleus_of_what_is_no_number_is_found_too():
    weights = torch.full((2, 50), torch.nan)
    weights[1] = 0.02
    for floors_of in (_nucleus_floors, _wide_nucleus_floors):
        assert floors_of(weights, torch.tensor([[0.5], [0.5]], dtype=torch.float64))[1] == weights[1, 0]


def test_equal_logits_are_all_kept():
    """Which of them comes first in a sort is nobody's decision."""
    logits = torch.zeros(400, 96)
    logits[:, 10:20] = 5.0
    drawn = {choice.id for choice in sample(logits, [run(seed=seed, top_k=3, top_p=0.5) for seed in range(400)])}
    assert drawn == set(range(10, 20))


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-6])
def test_the_coldest_temperatures_are_greedy(temperature):
    logits = torch.arange(96.0)[None]
    assert sample(logits, [run(temperature=temperature)])[0].id == 95


def test_low_temperatures_do_not_overflow():
    logits = torch.linspace(-3e4, 3e4, 96)[None]
    assert sample(logits, [run(temperature=1e-4, top_p=0.5, top_k=50)])[0].id == 95


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_p": 0.5, "top_k": 5}], ids=str)
def test_a_row_that_is_not_finite_fails_alone(number, options):
    logits = torch.zeros(3, 96)
    logits[1, 5] = number
    first, broken, last = sample(logits, [run(seed=1, logprobs=2, **options) for _ in range(3)])
    assert isinstance(broken, DecoderFailed)
    assert first == last


class Barring:
    """A walk that allows some tokens at every step."""

    def __init__(self, allowed, size=100):
        self.mask = np.isin(np.arange(size), allowed)

    def allowed_tokens(self):
        return self.mask

    def accept_token(self, token):
        assert self.mask[token]


class Lost(Barring):
    def allowed_tokens(self):
        raise DecoderFailed("Too complex.")


def guided(walk, **sampling):
    made = run(**sampling)
    made.matcher = walk
    return made


def test_what_a_grammar_bars_is_never_chosen():
    """Whatever the bias, and though the nucleus of the free distribution holds nothing that is allowed."""
    logits = torch.zeros(1, 100)
    logits[0, 7] = 50
    for options in ({}, {"temperature": 0.0}, {"top_p": 0.01}, {"top_k": 1}, {"logit_bias": {9: 100.0}}):
        chosen = {sample(logits, [guided(Barring([3, 4]), seed=seed, **options)])[0].id for seed in range(30)}
        assert chosen <= {3, 4}, options
    assert len({sample(logits, [guided(Barring([3, 4]), seed=seed)])[0].id for seed in range(30)}) == 2


def test_a_grammar_asks_for_more_than_the_likeliest_token():
    assert not is_greedy(guided(Barring([3]), temperature=0))


def test_a_grammar_of_one_row_leaves_the_others_alone():
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 100)).astype(np.float32))
    free = [run(seed=1), run(seed=2, logprobs=2)]
    alone = [sample(logits[[row]], [one])[0] for row, one in ((0, free[0]), (2, free[1]))]
    together = sample(logits, [free[0], guided(Barring([5])), free[1]])
    assert [together[0], together[2]] == alone
    assert together[1].id == 5


def test_log_probabilities_are_from_before_the_mask():
    logits = torch.zeros(1, 100)
    chosen = sample(logits, [guided(Barring([5]), logprobs=1)])[0]
    assert chosen.id == 5
    assert chosen.logprob == pytest.approx(-math.log(100))


def test_a_grammar_that_cannot_go_on_fails_its_own_row_alone():
    outcomes = sample(torch.zeros(2, 100), [guided(Lost([])), run(temperature=0.0)])
    assert isinstance(outcomes[0], DecoderFailed)
    assert outcomes[1].id == 0


def test_an_answer_that_is_too_short_ends_only_where_nothing_else_is_allowed():
    logits = torch.zeros(1, 100)
    logits[0, 95] = 50
    assert sample(logits, [guided(Barring([5, 95]), min_tokens=3)])[0].id == 5
    assert sample(logits, [guided(Barring([5, 95]))])[0].id == 95
    assert sample(logits, [guided(Barring([95]), min_tokens=3)])[0].id == 95
