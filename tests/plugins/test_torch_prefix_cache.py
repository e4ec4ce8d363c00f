"""Cached prefixes are not computed again and do not change results, in float32."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from .oracle import SHAPES, assert_equal, at_once, collect, decoding, ids, next_turn, one_by_one, prompt, visual

LISTED = {"logprobs": 5, "max_tokens": 12}


def image_prompt(width, content, number, *parts, **sampling):
    """Return random text, seeded by `number`, after the media of `content`."""
    text = prompt(1000 + number, 9)
    request = visual(19, *parts, 9, width=width, content=content, **LISTED, **sampling)
    request.token_ids[-9:] = text.token_ids
    return request


def conversation(oracle, request, output_ids, *more):
    """Return the next turn: the request, its completion and the next message."""
    return next_turn(request, output_ids, visual(*more, width=oracle.width, content=77))


def run_decoder(oracle, requests, *, how=one_by_one, **options):
    """Return the completions and the decoder's final statistics."""

    async def run():
        async with decoding(oracle.decoder(**options)) as decoder:
            return await how(decoder, requests), decoder.snapshot()

    return asyncio.run(run())


def requests_with_shared_prefixes(oracle):
    """Return requests with common prefixes of many kinds."""
    width, picture, video = oracle.width, (1, 4, 6), (4, 3, 3)
    first = image_prompt(width, 1, 1, picture)
    return [
        first,
        image_prompt(width, 1, 2, picture),  # another prompt
        image_prompt(width, 2, 1, picture),  # another image, and other text before it
        replace(first, spans=image_prompt(width, 2, 1, picture).spans),  # another image between the same tokens
        image_prompt(width, 1, 1, (1, 6, 4)),  # the same number of patches in another grid
        image_prompt(width, 1, 1, video),
        image_prompt(width, 1, 3, video),
        image_prompt(width, 1, 1, picture, 3, (1, 3, 5)),
        image_prompt(width, 1, 2, picture, 3, (1, 3, 5)),
        first,
        conversation(oracle, first, oracle.greedy(first), 12),
        prompt(5, 60, **LISTED),
        prompt(5, 90, **LISTED),
        prompt(5, 50, **LISTED),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunk", [5, 512])
@pytest.mark.supports("prefix-cache", backend="torch-cpu")
def test_cached_equals_uncached(oracles, shape, chunk):
    oracle = oracles(shape)
    requests = requests_with_shared_prefixes(oracle)
    expected, none = run_decoder(oracle, requests, prefix_cache=False)
    found, stats = run_decoder(oracle, requests, prefill_chunk=chunk)
    assert_equal(found, expected)
    assert [ids(tokens) for tokens in found] == [oracle.greedy(request) for request in requests]
    assert (none.hits, none.cached_tokens) == (0, 0)
    assert (stats.queries, stats.hits) == (14, 11)


@pytest.mark.parametrize("chunk", [5, 30, 512])
def test_concurrent_sharing_equals_alone(oracle, chunk):
    requests = requests_with_shared_prefixes(oracle)
    expected, _ = run_decoder(oracle, requests, prefix_cache=False)
    found, stats = run_decoder(oracle, requests, how=at_once, prefill_chunk=chunk)
    assert_equal(found, expected)
    assert stats.cached_tokens > 300


def test_cached_tokens_are_reported_with_first_token(oracle):
    requests = requests_with_shared_prefixes(oracle)
    found, stats = run_decoder(oracle, requests)
    cached = [tokens[0].cached_tokens for tokens in found]
    length = [len(request.token_ids) for request in requests]
    assert cached[:2] == [0, 19 + 24]
    assert cached[3:5] == [19, 19]  # up to the first difference of the images
    assert cached[9] >= 19 + 24
    assert cached[10] == length[0] + len(found[0]) - 1  # the last token of a completion is returned, but never computed
    assert cached[11:] == [0, 60, 49]
    assert all(token.cached_tokens == 0 for tokens in found for token in tokens[1:])
    assert stats.cached_tokens == sum(cached)


def test_several_choices_compute_their_prompt_once(oracle):
    request = image_prompt(oracle.width, 1, 1, (1, 4, 6), temperature=1.0, ignore_eos=True)
    requests = [replace(request, sampling=replace(request.sampling, seed=seed)) for seed in (1, 2, 3)]
    expected, _ = run_decoder(oracle, requests, prefix_cache=False)
    found, _ = run_decoder(oracle, requests, how=at_once)
    assert_equal(found, expected)
    assert sorted(tokens[0].cached_tokens for tokens in found) == [0, 51, 51]
    assert len({tuple(ids(tokens)) for tokens in found}) == 3


def test_cache_salts_are_isolated(oracle):
    request = prompt(1, 60, **LISTED)
    requests = [replace(request, cache_salt=salt) for salt in ("", "anna", "bert", "anna", "")]
    found, _ = run_decoder(oracle, requests)
    assert [tokens[0].cached_tokens for tokens in found] == [0, 0, 0, 59, 59]


def test_prefix_of_canceled_request_is_reused(oracle):
    request = image_prompt(oracle.width, 1, 1, (1, 4, 6), ignore_eos=True)
    (expected,), _ = run_decoder(oracle, [request], prefix_cache=False)

    async def run():
        async with decoding(oracle.decoder()) as decoder:
            async with aclosing(decoder.decode(request)) as tokens:
                await anext(tokens)
                await anext(tokens)
            return await collect(decoder, request), decoder.snapshot()

    found, stats = asyncio.run(run())
    assert_equal([found], [expected])
    assert (found[0].cached_tokens, stats.kv_used) == (len(request.token_ids) - 1, 0)


def test_canceling_at_any_time_leaves_cache_valid(oracle):
    """Each request is canceled in prefill or decode and then sent again."""
    requests = requests_with_shared_prefixes(oracle)
    expected, _ = run_decoder(oracle, requests, prefix_cache=False)

    async def cancel_after(decoder, request, pauses):
        task = asyncio.create_task(collect(decoder, request))
        for _ in range(pauses):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def run():
        async with decoding(oracle.decoder(prefill_chunk=3)) as decoder:
            for pauses in (1, 3, 10, 30, 100, 300):
                await asyncio.gather(
                    *(cancel_after(decoder, request, pauses + i) for i, request in enumerate(requests))
                )
            return await at_once(decoder, requests), decoder.snapshot()

    found, stats = asyncio.run(run())
    assert_equal(found, expected)
    assert (stats.running, stats.kv_used) == (0, 0)


@pytest.mark.slow
def test_completions_are_equal_under_memory_pressure(oracle):
    """Memory for 2048 tokens; the requests grow to 4000 and leave as much cached."""
    requests = [
        replace(one, sampling=replace(one.sampling, max_tokens=200 + 15 * i, ignore_eos=True))
        for i, one in enumerate(requests_with_shared_prefixes(oracle))
    ]
    expected, none = run_decoder(oracle, requests, how=at_once, prefix_cache=False)

    async def twice(decoder, requests):
        return [*await at_once(decoder, requests), *await at_once(decoder, requests[::-1])]

    found, stats = run_decoder(oracle, requests, how=twice, kv_cache_mib=1)
    assert_equal(found, [*expected, *expected[::-1]])
    assert none.preemptions == 0
    assert stats.preemptions > 3
    assert stats.kv_cached <= 2048
    plain, without = run_decoder(oracle, requests, how=at_once, kv_cache_mib=1, prefix_cache=False)
    assert_equal(plain, expected)
    assert without.preemptions > 3


@pytest.mark.slow
def test_preempted_sequence_continues_with_same_random_numbers(oracle):
    # Nearly uniform probabilities: at a temperature of 1, a difference in rounding between prefill and
    # decode now and then falls on a random number.
    requests = [
        prompt(content, 30, temperature=1e4, seed=content, max_tokens=600, ignore_eos=True, logprobs=2)
        for content in range(4)
    ]
    expected, none = run_decoder(oracle, requests, how=at_once)
    found, stats = run_decoder(oracle, requests, how=at_once, kv_cache_mib=1)
    assert_equal(found, expected)
    assert none.preemptions == 0
    assert stats.preemptions > 0
    assert all(len(tokens) == 600 for tokens in found)
