"""Several tokens per step: the output is the same as one token per step, with fewer steps."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.decoders import Token
from dashinfer_vlm_core.errors import ConfigError, DecoderFailed
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_torch.drafter import Drafted, continue_drafts
from dashinfer_vlm_torch.proposer import (
    MAX_DRAFT_TOKENS,
    MAX_DRAFTER_TOKENS,
    MAX_FORCED_TOKENS,
    REPETITION,
    AcceptanceRate,
    Draft,
    DraftProposer,
    lookup,
)
from dashinfer_vlm_torch.runner import _verify
from dashinfer_vlm_torch.scheduler import Scheduler
from dashinfer_vlm_torch.sequence import ScheduledChunk, SequenceState
from dashinfer_vlm_torch.settings import TorchOptions
from dashinfer_vlm_torch.speculator import DRAFTER_INTERVAL
from dashinfer_vlm_torch.step_cost import DrafterCost, StepCost
from tests.cases import cases

from .oracle import collect, decoding, ids, prompt, text, visual


def words(*tokens):
    return np.array(tokens, np.int64)


# Proposals


@cases(
    ("tokens", "expected"),
    [
        ((1, 2, 3, 4, 9, 1, 2), [3, 4, 9, 1]),
        ((1, 2, 3, 8, 1, 2, 4, 8, 1, 2), [4, 8, 1, 2]),  # of equally long n-grams, the most recent one
        ((5, 1, 2, 3, 8, 6, 1, 2, 4, 8, 5, 1, 2), [3, 8, 6, 1]),  # the longest n-gram
        ((7, 8, 7, 8, 7), [8, 7, 8, 7]),  # a period is continued beyond the end
        ((3, 3, 3), [3, 3, 3, 3]),
        ((1, 2, 3, 4, 5), []),
        ((2, 1, 3, 1), []),  # one equal token is not enough
        ((1,), []),
    ],
)
def test_lookup_continues_most_recent_longest_ngram(tokens, expected):
    assert lookup(words(*tokens), 4) == expected


def test_lookup_equals_search_token_by_token():
    random = np.random.default_rng(0)
    for _ in range(300):
        tokens = random.integers(0, 4, random.integers(1, 40)).tolist()
        best = (0, 0)
        for end in range(1, len(tokens)):
            size = next((n for n in range(5) if n >= end or tokens[end - 1 - n] != tokens[-1 - n]), 5)
            best = max(best, (size, end))
        size, end = best
        extended = list(tokens)
        for index in range(6):
            extended.append(extended[end + index])
        assert lookup(words(*tokens), 6) == (extended[len(tokens) :] if size >= 2 else [])


def test_proposals_follow_growing_output():
    proposer = DraftProposer(40)
    assert proposer.propose(words(*range(40)), 8, 1e-9).tokens == ()
    assert proposer.propose(words(*range(40), 60, 7, 8), 8, 1e-9).tokens == tuple(range(9, 9 + MAX_DRAFT_TOKENS))
    assert proposer.propose(words(*range(40), 60, 7, 8, 70, 60, 7), 3, 1e-9).tokens == (8, 70, 60)


def test_stop_tokens_are_not_proposed():
    proposer = DraftProposer(6, stops=frozenset([95]))
    assert proposer.propose(words(1, 2, 3, 95, 4, 1, 2), 8, 1e-9).tokens == (3,)


def test_acceptance_is_learned_without_drafts():
    """With a threshold of 1, nothing is drafted; correct predictions still raise the rate."""
    proposer, tokens = DraftProposer(80), [*range(81)]
    for token in range(30):
        assert proposer.propose(words(*tokens), 8, 1.0).tokens == ()
        proposer.observe([token])
        tokens.append(token)
    assert len(proposer.propose(words(*tokens), 8, 0.5).tokens) == MAX_DRAFT_TOKENS
    for token in range(31, 60):  # every other token: each prediction of two tokens is wrong
        proposer.propose(words(*tokens), 8, 1.0)
        proposer.observe([99 - token])
    assert proposer.propose(words(*tokens), 8, 0.5).tokens == ()


def test_drafter_predicts_as_many_tokens_as_pay():
    tokens, proposer = words(*range(41)), DraftProposer(40)
    asked = [proposer.num_to_draft(tokens, limit, threshold) for limit, threshold in ((8, 0.1), (8, 0.4), (1, 0.1))]
    assert asked == [MAX_DRAFTER_TOKENS, 2, 1]
    assert [proposer.num_to_draft(tokens, limit, threshold) for limit, threshold in ((0, 0.1), (8, 0.8))] == [0, 0]


@pytest.mark.parametrize("predicted", [(), (95, 3)], ids=["none", "a stop token"])
def test_drafter_without_usable_predictions_is_switched_off(predicted):
    tokens, proposer = words(*range(41)), DraftProposer(40, stops=frozenset([95]))
    asked = []
    for _ in range(10):
        asked.append(proposer.num_to_draft(tokens, 8, 0.3))
        proposer.set_drafted(predicted)
        proposer.observe([8])
    assert (asked[0], asked[-1]) == (3, 0)


def test_nothing_is_drafted_after_a_stop_token():
    one, asked = sequence(1, 2), []

    def sample(x, rows):
        asked.append(len(rows))
        return [95]

    assert continue_drafts(torch.zeros(1, 2), [one], {one: 4}, sample=sample, advance=lambda x, *_: x) == {one: (95,)}
    assert asked == [1]


def test_better_of_both_predictions_is_proposed():
    proposer = DraftProposer(40, stops=frozenset([95]))
    tokens = words(*range(40), 60, 7, 8)
    proposer.set_drafted((50, 51, 95, 52))
    assert proposer.propose(tokens, 8, 0.2).tokens == (50, 51)  # the stop token is left out
    for _ in range(20):
        proposer.set_drafted((50, 51))
        proposer.propose(tokens, 8, 0.2)
        proposer.observe([9, 10])
    proposer.set_drafted((50, 51))
    assert proposer.propose(tokens, 8, 0.2).tokens == tuple(range(9, 9 + MAX_DRAFT_TOKENS))
    assert proposer.num_to_draft(tokens, 8, 0.2) == 0


def test_ngrams_are_looked_up_once_per_step(monkeypatch):
    lengths = []

    def count(tokens, limit):
        lengths.append(len(tokens))
        return lookup(tokens, limit)

    monkeypatch.setattr("dashinfer_vlm_torch.proposer.lookup", count)
    proposer = DraftProposer(40)
    for length in (41, 42):
        proposer.num_to_draft(words(*range(length)), 8, 0.2)
        proposer.propose(words(*range(length)), 8, 0.2)
        proposer.propose(words(*range(length)), 8, 0.2)
        proposer.observe([length])
    assert lengths == [41, 42]


def test_number_of_drafts_falls_with_rate_and_threshold():
    rate = AcceptanceRate(REPETITION)
    start = rate.num_drafts(0.1)
    for _ in range(20):
        rate.record(accepted=True)
    assert rate.num_drafts(0.1) == MAX_DRAFT_TOKENS > start > 0
    high = rate.num_drafts(0.95)
    assert 0 < high < MAX_DRAFT_TOKENS
    for _ in range(40):
        rate.record(accepted=False)
    assert rate.num_drafts(0.1) == 0


def test_step_cost_is_fitted_to_passes():
    cost = StepCost()
    usual = cost.ratio
    for _ in range(50):
        cost.record(1, 0.5)
    assert cost.ratio == usual  # one number of rows says nothing about the cost of a row
    for index in range(500):
        rows = 1 + index % 9
        cost.record(rows, 0.040 + 0.004 * rows)
    assert cost.ratio == pytest.approx(10, rel=0.05)
    for index in range(500):
        cost.record(1 + index % 9, 0.040)  # rows are free
    assert cost.ratio == max(StepCost.RATIOS)


def test_lower_cost_of_a_drafter_is_learned_from_calls_that_do_more():
    """Where drafts do not pay, a drafter predicts only now and then, after what it has left out in between."""
    cost = DrafterCost()
    cost.record(4, 0.001, is_limit=True)
    assert cost.seconds is None
    cost.record(4, 0.048)
    cost.record(1, 0.020, is_limit=True)
    assert cost.seconds == pytest.approx(0.012)
    for _ in range(50):
        cost.record(1, 0.008, is_limit=True)
    assert cost.seconds == pytest.approx(0.008, rel=0.02)


def test_threshold_rises_with_batch_and_falls_during_prefill():
    cost = StepCost()
    alone, batch = cost.threshold(tokens=1, rows=1), cost.threshold(tokens=8, rows=8)
    assert alone < batch < cost.threshold(tokens=500, rows=500) <= 1
    assert cost.threshold(tokens=1, rows=257) < alone  # the step is long anyway


# Scheduling and verification


def speculative(**options):
    return Scheduler(
        **{"kv_tokens": 400, "max_batch_size": 4, "max_waiting": 2, "prefill_chunk": 64, "speculative": True} | options
    )


def sequence(*tokens, **sampling):
    return SequenceState(text(*tokens, **{"max_tokens": 100} | sampling), stop=(95,))


def advance(scheduler, *tokens):
    """Run a step that samples `tokens` for the only sequence; return its chunk and the delivered tokens."""
    (chunk,) = scheduler.schedule().chunks
    outputs = scheduler.update([chunk], {chunk.sequence: tuple(Token(id=token) for token in tokens)})
    return chunk, [token for _, token in outputs]


def test_accepted_drafts_are_computed_and_rejected_ones_are_not():
    one, queue = sequence(1, 2, 3, 4, 5, 1), speculative()
    queue.add(one)
    advance(queue, 2)
    chunk, delivered = advance(queue, 3, 80)
    assert (chunk.start, chunk.stop, chunk.draft.tokens[:2]) == (6, 7, (3, 4))
    assert ids(delivered) == [3, 80]
    assert (one.output_ids, one.num_computed_tokens) == ([2, 3, 80], 8)
    assert queue.stats.draft_tokens == len(chunk.draft.tokens)
    assert queue.stats.accepted_tokens == 1


def test_tokens_after_the_end_are_dropped():
    for options in ({"max_tokens": 3}, {"stop_token_ids": (4,)}):
        one, queue = sequence(1, 2, 3, 4, 5, 1, **options), speculative()
        queue.add(one)
        advance(queue, 2)
        _, delivered = advance(queue, 3, 4, 5)
        assert ids(delivered) == [3, 4]
        assert delivered[-1].finish_reason == ("length" if "max_tokens" in options else "stop")
        assert not queue.busy


def test_wrong_drafter_predicts_for_all_sequences_in_the_same_steps():
    """In fewer steps from time to time."""
    queue, asked = speculative(kv_tokens=2000, prefill_chunk=200), []
    for step in range(8 * DRAFTER_INTERVAL):
        if step % 2 == 0 and step < 6:  # the last one begins in step 4
            queue.add(sequence(*range(100 * step, 100 * step + 30), max_tokens=200))
        chunks = queue.schedule().chunks
        tokens = {chunk.sequence: (Token(id=chunk.sequence.length + 500),) for chunk in chunks}
        queue.update(chunks, tokens)
        counts = queue.speculator.draft_counts(chunks)
        queue.speculator.record_drafts(Drafted(dict.fromkeys(counts, (7,)), len(counts)), 0.1)
        asked.append(len(counts))
    steps = [step for step, count in enumerate(asked) if count and step >= 8]
    assert [asked[step] for step in steps] == [3, 3, 3]
    assert [after - before for before, after in pairwise(steps)] == [2 * DRAFTER_INTERVAL, 4 * DRAFTER_INTERVAL]


@pytest.mark.parametrize(("others", "drafted"), [(0, 2 * DRAFTER_INTERVAL), (7, 1)])
def test_one_sequence_is_drafted_for_only_if_few_others_wait(others, drafted):
    """All sequences of a batch wait for the predictions."""
    queue, good = speculative(kv_tokens=2000, max_batch_size=8, prefill_chunk=400, max_waiting=8), sequence(*range(30))
    for one in (good, *(sequence(*range(100 * number, 100 * number + 30)) for number in range(1, others + 1))):
        queue.add(one)
    asked = 0
    for step in range(3 * DRAFTER_INTERVAL):
        chunks = queue.schedule().chunks
        queue.update(chunks, {chunk.sequence: (Token(id=chunk.sequence.length + 500),) for chunk in chunks})
        counts = queue.speculator.draft_counts(chunks)
        tokens = {one: (one.length + 500 if one is good else 7,) for one in counts}
        queue.speculator.record_drafts(Drafted(tokens, len(tokens)), 0.1)
        asked += good in counts and step >= DRAFTER_INTERVAL
    assert asked == drafted


def test_drafts_leave_room_for_sampled_token():
    one, queue = sequence(1, 1, 1, 1, max_tokens=3), speculative()
    queue.add(one)
    advance(queue, 1)
    assert len(advance(queue, 1, 1)[0].draft.tokens) == 1
    assert not queue.busy


def test_failure_after_accepted_drafts_is_left_to_next_step():
    chunk = ScheduledChunk(sequence(1, 2), 1, 2, Draft((5, 6)))
    failure = DecoderFailed("not finite")
    token = [Token(id=number) for number in range(10)]
    assert _verify(chunk, [token[5], failure, token[7]]) == (token[5],)
    assert _verify(chunk, [failure, token[6], token[7]]) is failure
    assert _verify(chunk, [token[5], token[7], token[8]]) == (token[5], token[7])
    assert _verify(chunk, [token[5], token[6], token[8]]) == (token[5], token[6], token[8])
    forced = chunk._replace(draft=Draft((5, 6), 2))
    assert _verify(forced, [failure]) == (token[5], token[6])


def test_preempted_sequence_continues_after_drafts():
    first, second = sequence(*[1, 2] * 20, max_tokens=200), sequence(*[3, 4] * 20, max_tokens=200)
    queue = speculative(kv_tokens=300)
    queue.add(first)
    queue.add(second)
    while queue.busy:
        chunks = queue.schedule().chunks
        sampled = {}
        for chunk in chunks:
            if chunk.needs_logits:
                drafted = len(chunk.draft.tokens)
                following = np.tile(chunk.sequence.request.token_ids[:2], 200)[len(chunk.sequence.output_ids) :]
                sampled[chunk.sequence] = tuple(Token(id=token) for token in following[: drafted + 1].tolist())
                assert chunk.end <= chunk.sequence.allocation.rows
        queue.update(chunks, sampled)
    assert queue.stats.preemptions > 0
    assert (first.output_ids, second.output_ids) == ([1, 2] * 100, [3, 4] * 100)
    assert queue.stats.accepted_tokens > 250


def test_drafts_of_a_large_batch_are_shorter():
    def mean_draft(batch):
        queue = speculative(kv_tokens=150 * batch, max_batch_size=batch, prefill_chunk=40 * batch)
        for number in range(batch):
            queue.add(sequence(*range(100 * number, 100 * number + 40)))
        for token in (5, 6, 7):
            chunks = queue.schedule().chunks
            first = {chunk.sequence: int(chunk.sequence.request.token_ids[0]) for chunk in chunks}
            queue.update(chunks, {one: (Token(id=start + token),) for one, start in first.items()})
        return sum(len(chunk.draft.tokens) for chunk in queue.schedule().chunks) / batch

    assert mean_draft(1) > mean_draft(4) > mean_draft(16)


# With a model


def few_words(content, length=60, **sampling):
    """A prompt of five different tokens, so that n-grams are found often and continue differently."""
    return text(*np.random.default_rng(content).integers(0, 5, length).tolist(), **{"max_tokens": 80} | sampling)


SAMPLING = {
    "greedy": {},
    "greedy to the end": {"ignore_eos": True, "max_tokens": 150},
    "seeded": {"temperature": 0.6, "seed": 7},
    "top_p and top_k": {"temperature": 1.0, "top_p": 0.4, "top_k": 5, "seed": 3},
    "min_p": {"temperature": 0.9, "min_p": 0.1, "seed": 3},
    "penalties": {"repetition_penalty": 1.05, "presence_penalty": 0.1, "frequency_penalty": 0.02},
    "penalties, seeded": {"frequency_penalty": 0.05, "temperature": 0.5, "seed": 4},
    "n-grams": {"no_repeat_ngram_size": 6, "repetition_penalty": 1.05, "ignore_eos": True},
    "n-grams, seeded": {"no_repeat_ngram_size": 4, "temperature": 0.5, "seed": 4},
    "bias": {"logit_bias": {1: 4.0, 2: 4.0}, "temperature": 0.5, "seed": 2},
    "minimum": {"min_tokens": 30, "logit_bias": {95: 6.0}},
    "stop token": {"stop_token_ids": (1, 33)},
    "logprobs": {"logprobs": 4, "ignore_eos": True},
    "logprobs, seeded": {"logprobs": 2, "temperature": 0.7, "seed": 5},
}


def decode_all(oracle, requests, **options):
    """Decode requests at the same time; return the tokens and the decoder's statistics."""

    async def run():
        async with decoding(oracle.decoder(**options)) as decoder:
            answers = await asyncio.gather(*(collect(decoder, request) for request in requests))
            return answers, decoder.snapshot()

    return asyncio.run(run())


def check_equal(found, expected):
    """Ids and finish reasons are equal; log-probabilities are equal up to the rounding of matrix products."""
    for one, other in zip(found, expected, strict=True):
        assert ids(one) == ids(other)
        assert [token.finish_reason for token in one] == [token.finish_reason for token in other]
        for left, right in zip(one, other, strict=True):
            assert [token for token, _ in left.top_logprobs] == [token for token, _ in right.top_logprobs]
            assert (left.logprob is None) == (right.logprob is None)
            if left.logprob is not None:
                assert left.logprob == pytest.approx(right.logprob, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLING)
def test_output_equals_one_token_per_step(oracle, name):
    requests = [few_words(seed, **SAMPLING[name]) for seed in range(3)]
    expected, plain = decode_all(oracle, requests, speculative_method="none")
    together = decode_all(oracle, requests)
    alone = decode_all(oracle, requests, max_batch_size=1)
    for answers, stats in (together, alone):
        check_equal(answers, expected)
        assert stats.draft_tokens > 0
    assert (plain.draft_tokens, plain.accepted_tokens, plain.forced_tokens) == (0, 0, 0)


@pytest.mark.slow
def test_periodic_output_takes_fewer_steps(oracle):
    request = few_words(0, ignore_eos=True, max_tokens=300, logit_bias={1: 50.0, 2: 50.0})
    ((expected,), plain), ((tokens,), stats) = (
        decode_all(oracle, [request], speculative_method=method) for method in ("none", "ngram")
    )
    assert ids(tokens) == ids(expected)
    assert stats.steps < 0.6 * plain.steps
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert stats.steps + stats.accepted_tokens == plain.steps


@pytest.mark.slow
def test_speculation_next_to_ordinary_requests_and_chunked_prefill(oracle):
    """Mixed with images, random prompts that are never drafted for, and prompts longer than a chunk."""
    requests = [
        few_words(1, ignore_eos=True),
        prompt(5, 150),
        visual(4, (1, 4, 6), 9, (2, 2, 3), 30, width=oracle.width, ignore_eos=True, max_tokens=60),
        few_words(2, 200, temperature=0.5, seed=1),
        prompt(6, 40, logprobs=3),
    ]
    expected = [decode_all(oracle, [request], speculative_method="none")[0][0] for request in requests]
    for options in ({"prefill_chunk": 16}, {"max_batch_size": 2}, {"kv_cache_mib": 1, "prefix_cache": False}):
        answers, stats = decode_all(oracle, requests, **options)
        check_equal(answers, expected)
        assert stats.draft_tokens > 0


def test_max_tokens_inside_a_burst(oracle):
    request = few_words(0, ignore_eos=True, max_tokens=60, logit_bias={1: 50.0})
    ((whole,), _) = decode_all(oracle, [request], speculative_method="none")

    async def run():
        async with decoding(oracle.decoder()) as decoder:
            for count in range(20, 45):
                shorter = replace(request, sampling=replace(request.sampling, max_tokens=count))
                tokens = await collect(decoder, shorter)
                assert ids(tokens) == ids(whole)[:count]
                assert tokens[-1].finish_reason == "length"
            return decoder.snapshot()

    assert asyncio.run(run()).accepted_tokens > 100


def test_follow_up_uses_cached_output(oracle):
    """The prefix cache contains what was computed for accepted drafts, and nothing of rejected ones."""
    request = few_words(3, ignore_eos=True, max_tokens=100)

    async def run(**options):
        async with decoding(oracle.decoder(**options)) as decoder:
            first = ids(await collect(decoder, request))
            follow_up = text(*request.token_ids.tolist(), *first, 7, 8, 9, max_tokens=40, ignore_eos=True)
            return first, await collect(decoder, follow_up), decoder.snapshot()

    first, expected, _ = asyncio.run(run(speculative_method="none", prefix_cache=False))
    again, tokens, stats = asyncio.run(run())
    assert again == first
    assert ids(tokens) == ids(expected)
    assert tokens[0].cached_tokens == 60 + 100 - 1
    assert stats.draft_tokens > stats.accepted_tokens > 0


def test_canceled_during_bursts_frees_memory(oracle):
    async def run():
        async with decoding(oracle.decoder()) as decoder:
            request = few_words(0, ignore_eos=True, max_tokens=3000, logit_bias={1: 50.0, 2: 50.0})
            async with aclosing(decoder.decode(request)) as tokens:
                received = [token.id async for token, _ in _first(tokens, 50)]
            return received, decoder.snapshot(), await collect(decoder, prompt(1, 20))

    received, stats, after = asyncio.run(run())
    assert len(received) == 50
    assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0)
    assert ids(after) == oracle.greedy(prompt(1, 20))


async def _first(tokens, count):
    """Yield the first `count` items with their numbers."""
    number = 0
    async for token in tokens:
        yield token, number
        number += 1
        if number == count:
            return


# With the bundled model

FORM = {
    "type": "object",
    "properties": {
        "shape of the object": {"enum": ["circle", "square", "triangle"]},
        "number of objects": {"type": "integer", "minimum": 0, "maximum": 99},
        "is the object visible": {"type": "boolean"},
        "color of the object": {"enum": ["red", "green", "blue"]},
        "comment": {"type": "string", "maxLength": 12},
    },
    "required": [
        "shape of the object", "number of objects", "is the object visible", "color of the object", "comment",
    ],
    "additionalProperties": False,
}  # fmt: skip
GUIDED = {
    "messages": [{"role": "user", "content": "Describe the picture."}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "form", "schema": FORM}},
    "max_tokens": 300,
}


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def engines(request):
    with (
        Engine(EngineConfig(dtype=request.param, speculative_method="none")) as plain,
        Engine(EngineConfig(dtype=request.param)) as fast,
    ):
        yield plain, fast


def steps_of(engine, body):
    """Return a response without its id and time, and the number of steps that it took."""
    before = engine.stats().decoder.steps
    response = engine.chat(body).model_dump(exclude={"id", "created"})
    return response, engine.stats().decoder.steps - before


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.5, "seed": 4, "logprobs": True, "top_logprobs": 3, "frequency_penalty": 0.3},
        {"temperature": 0.5, "seed": 5, "min_tokens": 40, "n": 2},
    ],
)
def test_forced_tokens_of_a_schema_take_no_steps(engines, fields):
    plain, fast = engines
    (expected, many), (found, few) = (steps_of(engine, {**GUIDED, **fields}) for engine in engines)
    if fields.get("logprobs") and fast.config.dtype == "float32":  # rounding depends on the number of rows
        for response in (expected, found):
            del response["choices"][0]["logprobs"]
    assert found["choices"] == expected["choices"]
    assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    assert few <= 0.6 * many
    for choice in found["choices"]:
        assert set(json.loads(choice["message"]["content"])) == set(FORM["required"])
    assert plain.stats().decoder.forced_tokens == 0 < fast.stats().decoder.forced_tokens


@pytest.mark.parametrize("fields", [{"stop": ["objects"]}, {"stop": ['ble": ', '":']}, {"max_tokens": 17}])
def test_end_inside_forced_tokens(engines, fields):
    body = {**GUIDED, "temperature": 0, **fields}
    expected, found = (steps_of(engine, body)[0] for engine in engines)
    assert found["choices"] == expected["choices"]
    assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    chunks = [chunk.choices[0] for chunk in engines[1].stream({**body, "stream": True})]
    assert "".join(choice.delta.content or "" for choice in chunks) == found["choices"][0]["message"]["content"]
    assert chunks[-1].finish_reason == found["choices"][0]["finish_reason"]


def test_max_tokens_ends_at_the_same_token(engines):
    bodies = [{**GUIDED, "temperature": 0, "max_tokens": count} for count in (1, 2, 3, 5, 8, 13, 21, 34)]
    for body in bodies:
        expected, found = (engine.chat(body).choices[0] for engine in engines)
        assert (found.message.content, found.finish_reason) == (expected.message.content, expected.finish_reason)


@pytest.mark.slow
def test_guided_copy_is_drafted_and_equal(engines):
    """An array whose items repeat is drafted from its earlier items, where the grammar allows them."""
    schema = {"type": "array", "items": FORM, "minItems": 3, "maxItems": 3}
    body = {
        **GUIDED,
        "response_format": {"type": "json_schema", "json_schema": {"name": "forms", "schema": schema}},
        "temperature": 0,
        "max_tokens": 600,
    }
    (expected, many), (found, few) = (steps_of(engine, body) for engine in engines)
    assert found["choices"] == expected["choices"]
    assert few <= 0.5 * many
    assert engines[1].stats().decoder.accepted_tokens > 0


def test_long_forced_text_is_split(engines):
    plain, fast = engines
    schema = {"const": "forced " * 30}
    body = {
        **GUIDED,
        "response_format": {"type": "json_schema", "json_schema": {"name": "text", "schema": schema}},
        "temperature": 0,
        "max_tokens": 400,
    }
    (expected, many), (found, few) = (steps_of(engine, body) for engine in (plain, fast))
    assert found["choices"] == expected["choices"]
    assert many / MAX_FORCED_TOKENS <= few <= many / 8


# Options


def test_other_decoders_reject_the_option():
    TorchOptions(speculative_method="ngram").check("torch")
    TorchOptions().check("dashinfer")
    TorchOptions(speculative_method="auto").check("dashinfer")
    TorchOptions(speculative_method="none").check("dashinfer")
    with pytest.raises(
        ConfigError, match="`speculative_method` ngram: the decoder dashinfer does not support it"
    ) as bad:
        TorchOptions(speculative_method="ngram").check("dashinfer")
    assert bad.value.param == "speculative_method"
    with pytest.raises(ConfigError, match="speculative_method"):
        load_plugins().resolve_options(EngineConfig(speculative_method="eagle"))
