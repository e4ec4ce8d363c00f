"""What earlier requests have read is not read again, and changes nothing; in float32."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from .oracle import SHAPES, collect, decoding, ids, prompt, visual

LISTED = {"logprobs": 5, "max_tokens": 12}


def about(width, content, question, *parts, **sampling):
    """A question, random by its number, behind what `content` shows."""
    asked = prompt(1000 + question, 9)
    shown = visual(19, *parts, 9, width=width, content=content, **LISTED, **sampling)
    shown.token_ids[-9:] = asked.token_ids
    return shown


def conversation(oracle, request, answer, *more):
    """The next turn: the request, its answer, and what is said then."""
    said = visual(*more, width=oracle.width, content=77, **LISTED)
    length, after = len(request.token_ids), int(request.positions.max()) + 1
    told = np.tile(np.arange(after, after + len(answer)), (3, 1))
    return replace(
        request,
        token_ids=np.concatenate((request.token_ids, answer, said.token_ids)),
        positions=np.concatenate((request.positions, told, said.positions + after + len(answer)), axis=1),
        spans=(*request.spans, *(replace(span, start=span.start + length + len(answer)) for span in said.spans)),
    )


async def one_by_one(decoder, requests):
    return [await collect(decoder, request) for request in requests]


async def at_once(decoder, requests):
    return await asyncio.gather(*(collect(decoder, request) for request in requests))


def decoded(oracle, requests, *, how=one_by_one, **options):
    """The answers, and the decoder's statistics in the end."""

    async def run():
        async with decoding(oracle.decoder(**options)) as decoder:
            return await how(decoder, requests), decoder.stats

    return asyncio.run(run())


def equal(found, expected):
    """The same tokens, and log probabilities up to rounding."""
    for one, other in zip(found, expected, strict=True):
        assert ids(one) == ids(other)
        assert [token.logprob for token in one] == pytest.approx([token.logprob for token in other], abs=1e-4)
        for token, twin in zip(one, other, strict=True):
            assert dict(token.top_logprobs) == pytest.approx(dict(twin.top_logprobs), abs=1e-4)


def family(oracle):
    """Requests that begin alike in many ways."""
    width, picture, video = oracle.width, (1, 4, 6), (4, 3, 3)
    first = about(width, 1, 1, picture)
    return [
        first,
        about(width, 1, 2, picture),  # another question
        about(width, 2, 1, picture),  # another picture, and other text before it
        replace(first, spans=about(width, 2, 1, picture).spans),  # another picture between the same tokens
        about(width, 1, 1, (1, 6, 4)),  # the same pixels' worth in another grid
        about(width, 1, 1, video),
        about(width, 1, 3, video),
        about(width, 1, 1, picture, 3, (1, 3, 5)),
        about(width, 1, 2, picture, 3, (1, 3, 5)),
        first,
        conversation(oracle, first, oracle.greedy(first), 12),
        prompt(5, 60, **LISTED),
        prompt(5, 90, **LISTED),
        prompt(5, 50, **LISTED),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [5, 512])
def test_cached_equals_uncached(oracles, shape, chunk):
    oracle = oracles(shape)
    requests = family(oracle)
    expected, none = decoded(oracle, requests, prefix_cache=False)
    found, stats = decoded(oracle, requests, prefill_chunk=chunk)
    equal(found, expected)
    assert [ids(tokens) for tokens in found] == [oracle.greedy(request) for request in requests]
    assert (none.hits, none.cached_tokens) == (0, 0)
    assert (stats.queries, stats.hits) == (14, 11)


@pytest.mark.parametrize("chunk", [5, 30, 512])
def test_shared_at_once_equals_alone(oracle, chunk):
    requests = family(oracle)
    expected, _ = decoded(oracle, requests, prefix_cache=False)
    found, stats = decoded(oracle, requests, how=at_once, prefill_chunk=chunk)
    equal(found, expected)
    assert stats.cached_tokens > 300


def test_how_many_tokens_were_found_is_told_with_the_first(oracle):
    requests = family(oracle)
    found, stats = decoded(oracle, requests)
    cached = [tokens[0].cached_tokens for tokens in found]
    length = [len(request.token_ids) for request in requests]
    assert cached[:2] == [0, 19 + 24]
    assert cached[3:5] == [19, 19]  # up to where the pictures differ
    assert cached[9] >= 19 + 24
    assert cached[10] == length[0] + len(found[0]) - 1  # the last token of an answer is told, and never read
    assert cached[11:] == [0, 60, 49]
    assert all(token.cached_tokens == 0 for tokens in found for token in tokens[1:])
    assert stats.cached_tokens == sum(cached)


def test_several_answers_read_their_prompt_once(oracle):
    request = about(oracle.width, 1, 1, (1, 4, 6), temperature=1.0, ignore_eos=True)
    requests = [replace(request, sampling=replace(request.sampling, seed=seed)) for seed in (1, 2, 3)]
    expected, _ = decoded(oracle, requests, prefix_cache=False)
    found, _ = decoded(oracle, requests, how=at_once)
    equal(found, expected)
    assert sorted(tokens[0].cached_tokens for tokens in found) == [0, 51, 51]
    assert len({tuple(ids(tokens)) for tokens in found}) == 3


def test_salts_read_for_themselves(oracle):
    request = prompt(1, 60, **LISTED)
    requests = [replace(request, cache_salt=salt) for salt in ("", "anna", "bert", "anna", "")]
    found, _ = decoded(oracle, requests)
    assert [tokens[0].cached_tokens for tokens in found] == [0, 0, 0, 59, 59]


def test_what_a_cancelled_request_has_read_is_used(oracle):
    request = about(oracle.width, 1, 1, (1, 4, 6), ignore_eos=True)
    (expected,), _ = decoded(oracle, [request], prefix_cache=False)

    async def run():
        async with decoding(oracle.decoder()) as decoder:
            async with aclosing(decoder.decode(request)) as tokens:
                await anext(tokens)
                await anext(tokens)
            return await collect(decoder, request), decoder.stats

    found, stats = asyncio.run(run())
    equal([found], [expected])
    assert (found[0].cached_tokens, stats.kv_used) == (len(request.token_ids) - 1, 0)


def test_cancelling_at_any_time_leaves_only_what_is_right(oracle):
    """Each request is cut off in its prompt, or in its answer, and asked again whole."""
    requests = family(oracle)
    expected, _ = decoded(oracle, requests, prefix_cache=False)

    async def cut_off(decoder, request, pauses):
        task = asyncio.create_task(collect(decoder, request))
        for _ in range(pauses):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def run():
        async with decoding(oracle.decoder(prefill_chunk=3)) as decoder:
            for pauses in (1, 3, 10, 30, 100, 300):
                await asyncio.gather(*(cut_off(decoder, request, pauses + i) for i, request in enumerate(requests)))
            return await at_once(decoder, requests), decoder.stats

    found, stats = asyncio.run(run())
    equal(found, expected)
    assert (stats.running, stats.kv_used) == (0, 0)


@pytest.mark.slow
def test_under_pressure_answers_are_the_same(oracle):
    """2048 tokens of memory; the requests come to take 4000, and leave as much behind."""
    requests = [
        replace(one, sampling=replace(one.sampling, max_tokens=200 + 15 * i, ignore_eos=True))
        for i, one in enumerate(family(oracle))
    ]
    expected, none = decoded(oracle, requests, how=at_once, prefix_cache=False)

    async def twice(decoder, requests):
        return [*await at_once(decoder, requests), *await at_once(decoder, requests[::-1])]

    found, stats = decoded(oracle, requests, how=twice, kv_cache_mib=1)
    equal(found, [*expected, *expected[::-1]])
    assert none.preemptions == 0
    assert stats.preemptions > 3
    assert stats.kv_cached <= 2048
    plain, without = decoded(oracle, requests, how=at_once, kv_cache_mib=1, prefix_cache=False)
    equal(plain, expected)
    assert without.preemptions > 3


@pytest.mark.slow
def test_a_preempted_answer_goes_on_with_the_same_random_numbers(oracle):
    requests = [
        prompt(content, 30, temperature=1.0, seed=content, max_tokens=600, ignore_eos=True, logprobs=2)
        for content in range(4)
    ]
    expected, none = decoded(oracle, requests, how=at_once)
    found, stats = decoded(oracle, requests, how=at_once, kv_cache_mib=1)
    equal(found, expected)
    assert none.preemptions == 0
    assert stats.preemptions > 0
    assert all(len(tokens) == 600 for tokens in found)
