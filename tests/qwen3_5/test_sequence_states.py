"""The decoder with recurrent states: batched = alone, chunked = whole, cached = uncached, with drafts = without, also
after preemption, cancellation and failure."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from dashinfer_vlm_core import Engine
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_qwen3_vl import Qwen35
from dashinfer_vlm_torch.decoder import TorchDecoder
from tests.kernels import needs_native, selector
from tests.plugins import oracle
from tests.plugins.oracle import at_once, collect, decoding, ids, next_turn, one_by_one, prompt, text, visual
from tests.samples import image_url
from tests.server.conftest import serving

WIDTH = 64
LISTED = {"logprobs": 5, "max_tokens": 12, "ignore_eos": True}
IDLE = {"running": 0, "waiting": 0, "kv_used": 0, "states_used": 0}
MESSAGE = prompt(77, 20)
assert_equal = partial(oracle.assert_equal, tolerance=1e-3)
"""Logits have a standard deviation above 1."""


@pytest.fixture(scope="module")
def folder(dense):
    """The states of a mixture of experts are the same; one test shows it."""
    return dense


def decoder(folder, **options):
    config = EngineConfig(**{"device": "cpu", "dtype": "float32", "kv_cache_mib": 64} | options)
    return TorchDecoder(Qwen35().load_spec(folder), config, selector(config))


def run(folder, requests, *, how=one_by_one, **options):
    """Return the completions and the decoder's final statistics."""

    async def main():
        async with decoding(decoder(folder, **options)) as running:
            found = await how(running, requests)
            stats = running.snapshot()
            assert {name: getattr(stats, name) for name in IDLE} == IDLE
            return found, stats

    return asyncio.run(main())


def run_alone(folder, requests, **options):
    return run(folder, requests, prefix_cache=False, speculative_method="none", **options)[0]


def with_tail(request, number, length=40):
    """Return a request whose last tokens are random."""
    request.token_ids[-length:] = prompt(1000 + number, length).token_ids
    return request


def image_prompt(number, *parts, content=1, **sampling):
    """Return random text after the media of `content`."""
    return with_tail(visual(19, *parts, 40, width=WIDTH, content=content, **LISTED | sampling), number)


@pytest.fixture(scope="module")
def requests():
    """Requests with common prefixes of many kinds."""
    image, video = (1, 8, 9), (4, 5, 5)
    return [
        image_prompt(1, image),
        image_prompt(2, image),  # another prompt on the same image
        image_prompt(1, image, content=2),
        image_prompt(1, image),
        image_prompt(3, image, 11, video),
        image_prompt(4, image, 11, video),
        prompt(5, 140, **LISTED),
        prompt(5, 190, **LISTED),
        prompt(5, 3, **LISTED),
        prompt(5, 64, **LISTED),
    ]


@pytest.fixture(scope="module")
def expected(folder, requests):
    return run_alone(folder, requests)


@pytest.mark.slow
@pytest.mark.parametrize("how", [one_by_one, at_once])
@pytest.mark.parametrize("chunk", [1, 100, 512])
def test_cached_and_batched_equal_alone(folder, requests, expected, how, chunk):
    found, stats = run(folder, requests, how=how, prefill_chunk=chunk)
    assert_equal(found, expected)
    assert stats.states_cached > 5
    if how is one_by_one and chunk == 512:
        assert stats.hits == 5
        assert [tokens[0].cached_tokens for tokens in found] == [0, 64, 0, 128, 64, 192, 0, 128, 0, 0]


@pytest.mark.slow
def test_cached_and_batched_experts_equal_alone(moe, requests):
    found, _ = run(moe, requests, how=at_once, prefill_chunk=100)
    assert_equal(found, run_alone(moe, requests))


@pytest.mark.slow
def test_cached_equals_alone_with_8_bit_cache(folder, requests):
    expected = run_alone(folder, requests, kv_cache_dtype="int8")
    found, stats = run(folder, requests, kv_cache_dtype="int8")
    assert_equal(found, expected)
    assert stats.hits == 5


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("how", [one_by_one, at_once])
def test_c_kernels_compute_the_same_bits_from_cached_states(folder, requests, how):
    """Batched, chunked, and continued from the states of prompts."""
    expected = run_alone(folder, requests, dtype="bfloat16")
    found, stats = run(folder, requests, how=how, dtype="bfloat16", prefill_chunk=64)
    assert found == [
        [replace(token, cached_tokens=one.cached_tokens) for token, one in zip(tokens, other, strict=True)]
        for tokens, other in zip(expected, found, strict=True)
    ]
    assert stats.cached_tokens > 0 or how is at_once


@pytest.mark.slow
def test_conversation_equals_transformers(folder):
    """Its turns continue from states of prompts and outputs."""

    async def converse(running, turns):
        for _ in range(3):
            found.append(await collect(running, turns[-1]))
            turns.append(next_turn(turns[-1], ids(found[-1]), MESSAGE))
        return found

    found, turns = [], [prompt(5, 90, max_tokens=70, ignore_eos=True)]
    _, stats = run(folder, turns, how=converse)
    assert [tokens[0].cached_tokens for tokens in found] == [0, 159, 249]
    assert (stats.hits, stats.queries) == (2, 3)
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    for turn, tokens in zip(turns, found, strict=False):
        whole = np.concatenate((turn.token_ids, ids(tokens)[:-1]))
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(whole)[None]).logits[0]
        assert logits[len(turn.token_ids) - 1 :].argmax(-1).tolist() == ids(tokens)


@pytest.mark.slow
def test_next_turn_continues_from_state_of_output(folder):
    first = image_prompt(1, (1, 8, 9), max_tokens=100)
    turns = [first, next_turn(first, ids(run_alone(folder, [first])[0]), MESSAGE)]
    found, _ = run(folder, turns)
    assert_equal(found, run_alone(folder, turns))
    assert found[1][0].cached_tokens == 230


@pytest.mark.slow
def test_completions_are_equal_under_memory_pressure(folder, requests):
    """Memory for 1000 tokens and 21 states; the requests grow to 3000 tokens."""
    longer = [replace(one, sampling=replace(one.sampling, max_tokens=120 + 13 * i)) for i, one in enumerate(requests)]
    expected = run_alone(folder, longer)
    for caching in (True, False):
        found, stats = run(folder, longer, how=at_once, kv_cache_mib=1, prefix_cache=caching)
        assert_equal(found, expected)
        assert stats.preemptions > 1


def test_second_turn_of_a_chat_finds_its_states(folder):
    image = {"type": "image_url", "image_url": {"url": image_url(192, 192)}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "What is on the left of the tree?"}]}]
    with Engine(EngineConfig(model=str(folder), dtype="float32")) as engine, serving(engine) as server:
        first = chat(engine, messages, max_tokens=90)
        messages += [{"role": "assistant", "content": first.choices[0].message.content}]
        second = chat(engine, [*messages, {"role": "user", "content": "And on the right?"}], max_tokens=1)
        with server.http() as client:
            metrics = client.get("/metrics").text
    assert second.usage.prompt_tokens_details.cached_tokens >= 64
    for name, value in {"prefix_cache_hits_total": 1, "recurrent_states_used": 0}.items():
        assert f"dashinfer_vlm_{name} {value:.1f}" in metrics
    cached = re.search(r"^dashinfer_vlm_recurrent_states_cached (\d+)", metrics, re.MULTILINE)
    assert cached
    assert int(cached[1]) >= 2


RESPONSE = 80
"""The token after which responses begin."""


def turn(*parts, **sampling):
    """Return a prompt of parts, which are token ids."""
    request = text(*np.concatenate(parts).tolist(), **LISTED | sampling)
    return replace(request, response_boundaries=tuple((np.flatnonzero(request.token_ids == RESPONSE) + 1).tolist()))


def words(number, length):
    return np.random.default_rng(number).integers(0, RESPONSE, length)


def conversation(number, turns, **sampling):
    """Return the prompts of a conversation, whose responses are not repeated as they were generated."""
    header = np.array([1, RESPONSE])
    parts = [words(0, 75)]
    requests = []
    for count in range(turns):
        parts += [words(10 * number + count, 30 + 20 * count), header]
        requests.append(turn(*parts, [2, 3], **sampling))
        parts.append(words(100 * number + count, 40))
    return requests


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("how", [one_by_one, at_once])
@pytest.mark.parametrize("chunk", [64, 512])
def test_turns_have_the_same_bits_from_states_before_responses(folder, how, chunk):
    turns = [*conversation(1, 4), *conversation(2, 3)]
    expected = run_alone(folder, turns, dtype="bfloat16")
    found, _ = run(folder, turns, how=how, dtype="bfloat16", prefill_chunk=chunk)
    without_cached = [[replace(token, cached_tokens=0) for token in tokens] for tokens in found]
    assert without_cached == expected
    if how is one_by_one:
        starts = [each.response_boundaries for each in turns]
        cached = [tokens[0].cached_tokens for tokens in found]
        assert cached == [0, *(before[-1] for before in starts[:3]), 0, *(before[-1] for before in starts[4:6])]


@pytest.mark.slow
def test_turns_are_equal_after_preemption(folder):
    """Memory for 1000 tokens; the conversations need 3000."""
    turns = [*conversation(1, 4, max_tokens=150), *conversation(2, 4, max_tokens=150)]
    found, stats = run(folder, turns, how=at_once, kv_cache_mib=1)
    assert_equal(found, run_alone(folder, turns))
    assert stats.preemptions > 1


def chat(engine, messages, **fields):
    return engine.chat({"messages": messages, "temperature": 0, "ignore_eos": True, **fields})


# Drafts


def few_words(content, length=70, **sampling):
    """A prompt of five different tokens, so that n-grams are found often and continue differently."""
    return text(*np.random.default_rng(content).integers(0, 5, length).tolist(), **sampling)


@dataclass
class Script:
    """A grammar that forces some tokens: those that are not None; it allows any token after them."""

    tokens: tuple[int | None, ...]
    position: int = 0

    def allowed_tokens(self):
        token = self.tokens[self.position] if self.position < len(self.tokens) else None
        return np.ones(320, bool) if token is None else np.arange(320) == token

    def accept_token(self, token):
        self.position += 1

    def forced_tokens(self):
        rest = self.tokens[self.position :]
        return list(rest[: rest.index(None)] if None in rest else rest)

    def count_allowed(self, tokens):
        rest = self.tokens[self.position :]
        differs = (index for index, (token, allowed) in enumerate(zip(tokens, rest, strict=False))
                   if allowed not in (None, token))  # fmt: skip
        return next(differs, len(tokens))

    def copy(self):
        return replace(self)


FORCED = Script((*range(30, 45), None, None, *range(50, 53), None, *range(100, 170), None))

TWO_WORDS = {"logit_bias": {1: 50.0, 2: 50.0}, "ignore_eos": True, "max_tokens": 150}

DRAFTED = {
    "predicted": few_words(1, **TWO_WORDS),
    "predicted, sampled": few_words(2, temperature=0.6, seed=7, **TWO_WORDS),
    "predicted, log probabilities": few_words(3, logprobs=3, **TWO_WORDS),
    "forced": replace(prompt(5, 70, max_tokens=110, ignore_eos=True), grammar=FORCED),
    "forced, log probabilities": replace(prompt(6, 60, logprobs=2, max_tokens=110, ignore_eos=True), grammar=FORCED),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTED)
def test_drafts_change_no_token(folder, name):
    expected = run_alone(folder, [DRAFTED[name]])
    found, stats = run(folder, [DRAFTED[name]])
    assert [ids(tokens) for tokens in found] == [ids(tokens) for tokens in expected]
    assert (stats.forced_tokens if "forced" in name else stats.accepted_tokens) > 0


@pytest.mark.slow
def test_drafts_of_a_batch_with_prompts_change_no_token(folder, requests, expected):
    """Some drafts are rejected, next to sequences that are prefilled, and the next turn continues from their states."""
    drafted = list(DRAFTED.values())
    following = [
        next_turn(one, ids(tokens), MESSAGE) for one, tokens in zip(drafted, run_alone(folder, drafted), strict=True)
    ]
    plain = run_alone(folder, [*drafted, *following])

    async def turns(decoder, requests):
        mixed = await at_once(decoder, requests)
        return [*mixed, *await at_once(decoder, following)]

    found, stats = run(folder, [*drafted, *requests], how=turns, prefill_chunk=64)
    assert [ids(tokens) for tokens in found] == [ids(tokens) for tokens in [*plain[:5], *expected, *plain[5:]]]
    assert stats.draft_tokens > stats.accepted_tokens > 0


# Cancellation, failure, memory


def test_canceling_at_any_time_leaves_states_valid(folder, requests, expected):
    async def cancel_after(running, request, pauses):
        task = asyncio.create_task(collect(running, request))
        for _ in range(pauses):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def main(running, requests):
        for pauses in (1, 3, 10, 30, 100, 300):
            await asyncio.gather(*(cancel_after(running, one, pauses + i) for i, one in enumerate(requests)))
        async with aclosing(running.decode(requests[0])) as tokens:
            await anext(tokens)
        return await at_once(running, requests)

    found, _ = run(folder, requests, how=main, prefill_chunk=64)
    assert_equal(found, expected)


@pytest.mark.slow
def test_failed_step_is_repeated_for_each_sequence(folder, requests, expected):
    """Steps of several sequences fail after the model has written their states."""

    async def main(running, requests):
        runner = running._worker._runner
        read = runner.read

        def fail_together(launched):
            outcomes = read(launched)
            if len(launched.chunks) > 1:
                raise RuntimeError("broken")
            return outcomes

        runner.read = fail_together
        return await at_once(running, requests)

    found, _ = run(folder, requests, how=main, prefill_chunk=64)
    assert_equal(found, expected)


def test_memory_is_divided_between_tokens_and_states(folder, caplog):
    with caplog.at_level(logging.INFO, logger="dashinfer_vlm_torch"):
        _, stats = run(folder, [prompt(1, 5)], kv_cache_mib=2, max_batch_size=8)
    layers, heads = 3, 4
    size = layers * (heads * 16 * 24 + 3 * (2 * 2 * 16 + heads * 24)) * 4
    assert stats.states_size == 2**20 // size
    assert stats.kv_size == (2**21 - stats.states_size * size) // (2 * 2 * 32 * 4)
    assert f"{stats.states_size} recurrent states of 0.0 MiB, two per sequence: up to 8 sequences" in caplog.text


def test_memory_for_less_than_one_sequence_is_rejected(tmp_path, folder):
    from .tiny_qwen3_5 import write_checkpoint

    large = write_checkpoint(tmp_path, linear_num_value_heads=16, linear_value_head_dim=512)
    with pytest.raises(
        ConfigError, match=r"`kv_cache_mib` 2 does not hold one sequence .* two recurrent states"
    ) as bad:
        decoder(large, kv_cache_mib=2)
    assert bad.value.param == "kv_cache_mib"
    assert decoder(large, kv_cache_mib=int(str(bad.value).split()[-1].strip("."))).max_model_len >= 16
