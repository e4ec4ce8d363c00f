"""DashInfer on the CPU equals transformers, batched equals alone, and each sampling option matches its definition."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.errors import UnsupportedParameter
from dashinfer_vlm_demo import CHECKPOINT
from tests.conversations import as_openai, blurred_image, user
from tests.plugins.oracle import STOP, VOCAB, collect, ids, prompt, visual
from tests.tiny import write_qwen2_5_vl
from tests.transformers_engine import TransformersEngine
from tests.waiting import HANG

from .conftest import decoding

pytestmark = pytest.mark.dashinfer


def sequential(request):
    """Return the request at positions 0, 1, 2, ..., which DashInfer uses on a CPU instead of the real ones."""
    return replace(request, positions=np.tile(np.arange(len(request.token_ids)), (3, 1)))


def generate(decoder, requests, *, concurrent=True):
    async def run():
        async with decoding(decoder):
            if concurrent:
                return await asyncio.gather(*(collect(decoder, request) for request in requests))
            return [await collect(decoder, request) for request in requests]

    return asyncio.run(run())


@pytest.mark.parametrize("shape", ["one-kv-head-128", "64-untied"])
@pytest.mark.supports("text", backend="dashinfer-cpu")
def test_text_equals_transformers(oracles, decoder, shape):
    oracle = oracles(shape)
    requests = [prompt(seed, length) for seed, length in enumerate((1, 2, 9, 40, 130))]
    for request, tokens in zip(requests, generate(decoder(oracle.folder), requests, concurrent=False), strict=True):
        assert ids(tokens) == oracle.greedy(request)
        assert [token.finish_reason for token in tokens[:-1]] == [None] * (len(tokens) - 1)
        assert tokens[-1].finish_reason in {"stop", "length"}


def test_embeddings_equal_transformers_on_sequential_positions(oracle, decoder):
    requests = [
        visual(5, (1, 4, 6), 7, width=oracle.width),
        visual(3, (1, 2, 2), 4, (1, 3, 5), 2, (1, 4, 4), 3, width=oracle.width, content=3),
        visual(2, (3, 2, 2), 1, (1, 5, 1), 6, width=oracle.width, content=5),
    ]
    requests = [sequential(request) for request in requests]
    decoder = decoder()
    decoder.unsupported_vision_reason = ""  # with sequential positions, DashInfer's CPU engine is right
    found = generate(decoder, requests)
    assert [ids(tokens) for tokens in found] == [oracle.greedy(request) for request in requests]


@pytest.mark.supports("batching", backend="dashinfer-cpu")
def test_batch_of_32_equals_each_alone(shared):
    lengths = np.random.default_rng(0).integers(1, 150, 32)
    requests = [prompt(seed, int(length), max_tokens=40) for seed, length in enumerate(lengths)]
    requests += [prompt(seed, 20, max_tokens=40, temperature=1.3, top_k=50, seed=seed) for seed in range(8)]
    concurrent = shared.generate(requests)
    alone = shared.generate(requests, concurrent=False)
    assert [ids(tokens) for tokens in concurrent] == [ids(tokens) for tokens in alone]


@pytest.mark.supports("prefix-cache", backend="dashinfer-cpu")
def test_prefix_cache_does_not_change_tokens(decoder):
    shared = prompt(1, 100)
    requests = [replace(shared, token_ids=np.append(shared.token_ids[:-1], last)) for last in range(6)]
    on = generate(decoder(prefix_cache=True), requests, concurrent=False)
    off = generate(decoder(prefix_cache=False), requests, concurrent=False)
    assert [ids(tokens) for tokens in on] == [ids(tokens) for tokens in off]


def test_bundled_model_equals_transformers(cache):
    conversations = [[user(text)] for text in ("Hello!", "Which shapes do you know?", "What can you see?")]
    oracle = TransformersEngine(CHECKPOINT)
    config = EngineConfig(model="demo", decoder="dashinfer", device="cpu", max_model_len=512, cache_dir=cache)
    with Engine(config) as engine:
        for messages in conversations:
            answer = engine.chat({"messages": messages, "temperature": 0, "max_tokens": 24})
            expected = oracle.generate([messages])[0][0][:24]
            assert answer.choices[0].message.content == oracle.tokenizer.decode(expected, skip_special_tokens=True)
            assert answer.usage.completion_tokens == len(expected)


@pytest.mark.supports("text", backend="dashinfer-cpu", family="qwen2_5_vl")
@pytest.mark.supports("images", backend="dashinfer-cpu", family="qwen2_5_vl", rejected=True)
def test_qwen2_5_vl_text_equals_transformers_and_images_are_rejected(tmp_path, cache):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    write_qwen2_5_vl(tmp_path, num_attention_heads=1, num_key_value_heads=1, rope_parameters=rope)
    oracle = TransformersEngine(tmp_path)
    config = EngineConfig(model=str(tmp_path), decoder="dashinfer", device="cpu", max_model_len=512, cache_dir=cache)
    with Engine(config) as engine:
        for messages in ([user("Hello!")], [user("In the beginning, there was a star.")]):
            request = {"messages": messages, "temperature": 0, "max_tokens": 24}
            found = engine.submit(request).result(timeout=HANG).token_ids[0]
            assert list(found) == oracle.generate([messages])[0][0][:24]
        with pytest.raises(UnsupportedParameter, match="M-RoPE"):
            engine.chat({"messages": as_openai([user("What is this?", blurred_image(1))])})


@pytest.mark.supports("logprobs", backend="dashinfer-cpu")
def test_logprobs_are_of_unmodified_distribution(oracle, shared):
    """They are taken before temperature, for every request of a batch."""
    requests = [prompt(seed, 8 + seed, logprobs=count, max_tokens=6) for seed, count in enumerate((0, 3, 10))]
    requests += [prompt(9, 12, logprobs=2, max_tokens=6, temperature=1.7, seed=4), prompt(10, 30)]
    for request, tokens in zip(requests, shared.generate(requests), strict=True):
        count = request.sampling.logprobs
        if count is None:
            assert all(token.logprob is None and not token.top_logprobs for token in tokens)
            continue
        expected = oracle.logits(request, ids(tokens)).log_softmax(-1)
        for token, row in zip(tokens, expected, strict=True):
            assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-3)
            assert [index for index, _ in token.top_logprobs] == row.topk(count).indices.tolist()
            assert [value for _, value in token.top_logprobs] == pytest.approx(
                row.topk(count).values.tolist(), abs=1e-3
            )


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_matches_definition(oracle, shared, penalty):
    """Compare with the PyTorch decoder, whose sampler is compared with the definition."""
    requests = [prompt(seed, 20, repetition_penalty=penalty) for seed in range(4)]

    async def torch():
        async with decoding(oracle.decoder()) as ours:
            return [await collect(ours, request) for request in requests]

    assert [ids(tokens) for tokens in shared.generate(requests)] == [ids(tokens) for tokens in asyncio.run(torch())]


def first_tokens(shared, count, **sampling):
    """Return the first token of `count` completions of one prompt, each with another seed."""
    requests = [prompt(1, 12, max_tokens=1, seed=seed, **sampling) for seed in range(count)]
    return [tokens[0].id for tokens in shared.generate(requests)]


def probabilities(oracle, temperature):
    return (oracle.logits(prompt(1, 12), [0])[0] / temperature).softmax(-1).double().numpy()


def test_top_p_1_samples_full_distribution(oracle, shared):
    """The engine would silently lower it to 0.99, and no token outside of that nucleus could be sampled."""
    expected = probabilities(oracle, 2.0)
    order = np.argsort(-expected)
    inside = set(order[: int((expected[order].cumsum() < 0.99).sum()) + 1].tolist())
    drawn = first_tokens(shared, 1500, temperature=2.0, top_p=1.0)
    outside = sum(token not in inside for token in drawn)
    mass = 1500 * (1 - sum(expected[token] for token in inside))
    assert mass / 3 < outside < 3 * mass, (outside, mass)
    counts = np.bincount(drawn, minlength=VOCAB)
    frequent = expected * 1500 > 10
    deviations = (counts - expected * 1500)[frequent] / (expected * 1500)[frequent] ** 0.5
    assert np.abs(deviations).max() < 4.5


def test_top_k_and_top_p_keep_the_right_tokens(oracle, shared):
    order = np.argsort(-probabilities(oracle, 2.0)).tolist()
    cumulative = np.sort(probabilities(oracle, 2.0))[::-1].cumsum()
    assert set(first_tokens(shared, 200, temperature=2.0, top_k=3)) == set(order[:3])
    nucleus = order[: int((cumulative < 0.5).sum()) + 1]
    assert set(first_tokens(shared, 400, temperature=2.0, top_p=0.5)) <= set(nucleus)
    assert set(first_tokens(shared, 20, temperature=2.0, top_p=1e-9)) == {order[0]}
    assert set(first_tokens(shared, 20, temperature=2.0, top_k=1)) == {order[0]}


@pytest.mark.supports("sampling", backend="dashinfer-cpu")
def test_seed_determines_output(shared):
    requests = [prompt(1, 12, max_tokens=30, temperature=1.5, seed=seed) for seed in (5, 5, 6, -1)]
    first, again, other, negative = (ids(tokens) for tokens in shared.generate(requests))
    assert first == again
    assert len({tuple(first), tuple(other), tuple(negative)}) == 3


def test_stop_tokens_end_generation(oracle, shared):
    plain = oracle.greedy(prompt(1, 20))
    stops = (plain[5], plain[9])
    requests = [
        prompt(1, 20, stop_token_ids=stops),
        prompt(1, 20, stop_token_ids=(plain[0],)),
        prompt(1, 20, max_tokens=1),
    ]
    stopped, at_once, one = shared.generate(requests)
    first = min(plain.index(token) for token in stops)
    assert (ids(stopped), stopped[-1].finish_reason) == (plain[: first + 1], "stop")
    assert (ids(at_once), at_once[-1].finish_reason) == (plain[:1], "stop")
    assert (ids(one), one[-1].finish_reason) == (plain[:1], "length")


def test_models_end_token_ends_unless_ignored(shared):
    """Among a few sampled completions, some are ended by the model itself."""
    requests = [prompt(seed, 5, max_tokens=60, temperature=2.0, seed=seed) for seed in range(30)]
    ignoring = [replace(request, sampling=replace(request.sampling, ignore_eos=True)) for request in requests]
    ended = 0
    for plain, on in zip(shared.generate(requests), shared.generate(ignoring), strict=True):
        ended += plain[-1].finish_reason == "stop"
        assert (plain[-1].id == STOP) == (plain[-1].finish_reason == "stop")
        assert (len(on), on[-1].finish_reason) == (60, "length")
        assert ids(on)[: len(plain)] == ids(plain)
    assert ended > 0
