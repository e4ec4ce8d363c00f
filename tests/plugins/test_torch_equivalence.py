"""Greedy tokens equal transformers' in float32, however requests are batched and prompts are cut."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.kernels.quantization import INT4, INT8
from dashinfer_vlm_torch.model import layer_quantization
from tests.kernels import needs_native

from .oracle import IMAGE, SHAPES, collect, decoding, ids, prompt, text, visual

PROMPTS = {
    "one token": lambda width: text(7),
    "text": lambda width: prompt(1, 20),
    "picture": lambda width: visual(5, (1, 4, 6), 7, width=width),
    "picture first and last": lambda width: visual((1, 2, 3), 4, (1, 3, 2), width=width, content=1),
    "three pictures between text": lambda width: visual(
        3, (1, 2, 2), 4, (1, 3, 5), 2, (1, 4, 4), 3, width=width, seed=3
    ),
    "video": lambda width: visual(4, (6, 3, 4), 8, width=width, content=4),
    "video and picture": lambda width: visual(2, (3, 2, 2), 1, (1, 5, 1), 6, width=width, content=5),
    "two turns": lambda width: visual(6, (1, 3, 3), 30, (1, 2, 2), 40, width=width, content=6),
}


FAST = ("gqa-tied", "mha-untied")
"""The shapes of the fast tests."""


def requests(oracle):
    return [make(oracle.width) for make in PROMPTS.values()]


@pytest.mark.parametrize(
    "shape", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES]
)
@pytest.mark.supports("text", backend="torch-cpu")
def test_greedy_tokens_equal_transformers(oracles, shape):
    oracle = oracles(shape)

    async def alone():
        async with decoding(oracle.decoder()) as decoder:
            return [await collect(decoder, request) for request in requests(oracle)]

    for name, request, tokens in zip(PROMPTS, requests(oracle), asyncio.run(alone()), strict=True):
        assert ids(tokens) == oracle.greedy(request), name
        assert all(token.finish_reason is None for token in tokens[:-1])
        assert tokens[-1].finish_reason is not None


@pytest.mark.supports("images", backend="torch-cpu")
def test_image_request_equals_transformers_generate(oracle):
    """Compare with `generate`, with transformers' own vision encoder, placeholders and positions."""
    request = visual(3, (1, 2, 3), 4, width=oracle.width, max_tokens=20)
    request.token_ids[2], request.token_ids[9] = 92, 93  # vision_start, vision_end
    pixels, grid = (
        torch.randn(24, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(0)),
        torch.tensor([[1, 4, 6]]),
    )
    expected = oracle.model.generate(
        input_ids=torch.from_numpy(request.token_ids)[None],
        attention_mask=torch.ones(1, len(request.token_ids), dtype=torch.long),
        mm_token_type_ids=torch.from_numpy((request.token_ids == IMAGE).astype(np.int64))[None],
        pixel_values=pixels,
        image_grid_thw=grid,
        do_sample=False,
        max_new_tokens=20,
    )[0, len(request.token_ids) :].tolist()
    with torch.no_grad():
        (embedding,) = oracle.model.get_image_features(pixels, grid).pooler_output
    span = replace(request.spans[0], tokens=replace(request.spans[0].tokens, embedding=embedding))

    async def ours():
        async with decoding(oracle.decoder()) as decoder:
            return await collect(decoder, replace(request, spans=(span,)))

    assert ids(asyncio.run(ours())) == expected


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.supports("chunked-prefill", backend="torch-cpu")
def test_chunked_equals_whole(oracle, chunk):
    """A chunk size of 7 splits every span of these prompts."""

    async def chunked():
        async with decoding(oracle.decoder(prefill_chunk=chunk)) as decoder:
            return [ids(await collect(decoder, request)) for request in requests(oracle)]

    assert asyncio.run(chunked()) == [oracle.greedy(request) for request in requests(oracle)]


@pytest.mark.parametrize("batch", [3, 32])
@pytest.mark.supports("batching", backend="torch-cpu")
def test_batched_equals_alone(oracle, batch):
    """Requests arrive while others decode; with a batch size of 3, most of them wait."""

    decoded = 0

    async def join(decoder, request, after):
        nonlocal decoded
        while decoded < after:  # noqa: ASYNC110 - until the others have decoded so many tokens
            await asyncio.sleep(0)
        tokens = []
        async for token in decoder.decode(request):
            tokens.append(token)
            decoded += 1
        return ids(tokens)

    async def batched():
        async with decoding(oracle.decoder(max_batch_size=batch, prefill_chunk=16)) as decoder:
            return await asyncio.gather(*(join(decoder, request, 3 * i) for i, request in enumerate(requests(oracle))))

    assert asyncio.run(batched()) == [oracle.greedy(request) for request in requests(oracle)]


def test_visual_token_dtype_does_not_matter(oracle):
    """The vision encoder may compute in another dtype."""
    request = visual(5, (1, 4, 6), 7, width=oracle.width)
    rounded = request.spans[0].tokens.embedding.bfloat16()
    spans = [
        replace(request.spans[0], tokens=replace(request.spans[0].tokens, embedding=e))
        for e in (rounded, rounded.float())
    ]

    async def both():
        async with decoding(oracle.decoder(prefix_cache=False)) as decoder:
            return [ids(await collect(decoder, replace(request, spans=(span,)))) for span in spans]

    in_bfloat16, in_float32 = asyncio.run(both())
    assert in_bfloat16 == in_float32


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(oracle, dtype):
    """Log probabilities of a forced completion agree within the precision of 8 (or 11) mantissa bits."""
    answer = oracle.greedy(prompt(1, 20))
    forced = prompt(1, 20, logprobs=0, max_tokens=len(answer), ignore_eos=True)

    async def ours():
        async with decoding(oracle.decoder(dtype=dtype)) as decoder:
            return await collect(decoder, forced)

    tokens = asyncio.run(ours())
    same = next((i for i, (a, b) in enumerate(zip(ids(tokens), answer, strict=True)) if a != b), len(answer))
    assert same >= 3
    expected = oracle.logits(forced, answer).log_softmax(-1)
    for i in range(same):
        assert tokens[i].logprob == pytest.approx(
            float(expected[i, answer[i]]), abs=0.15 if dtype == "bfloat16" else 0.03
        )


@pytest.mark.supports("logprobs", backend="torch-cpu")
def test_logprobs_equal_transformers(oracle):
    """They are those of the unmodified distribution: penalties, bias and temperature only affect sampling."""
    request = prompt(2, 20, logprobs=5, temperature=1.5, seed=1, repetition_penalty=1.3, logit_bias={3: 5.0}, top_k=9)

    async def ours():
        async with decoding(oracle.decoder()) as decoder:
            return await collect(decoder, request)

    tokens = asyncio.run(ours())
    expected = oracle.logits(request, ids(tokens)).log_softmax(-1)
    best = expected.topk(5)
    for step, token in enumerate(tokens):
        assert token.logprob == pytest.approx(float(expected[step, token.id]), abs=1e-4)
        assert [one for one, _ in token.top_logprobs] == best.indices[step].tolist()
        assert [value for _, value in token.top_logprobs] == pytest.approx(best.values[step].tolist(), abs=1e-4)


def test_logprobs_are_omitted_unless_requested(oracle):
    async def ours():
        async with decoding(oracle.decoder()) as decoder:
            return await asyncio.gather(
                collect(decoder, prompt(1, 9)),
                collect(decoder, prompt(1, 9, logprobs=0)),
                collect(decoder, prompt(1, 9, logprobs=20)),
            )

    none, chosen, all_twenty = asyncio.run(ours())
    assert {(token.logprob, token.top_logprobs) for token in none} == {(None, ())}
    assert all(token.logprob is not None and token.top_logprobs == () for token in chosen)
    assert all(
        len(token.top_logprobs) == 20 and token.top_logprobs[0] == (token.id, token.logprob) for token in all_twenty
    )


@pytest.mark.supports("sampling", backend="torch-cpu")
@pytest.mark.supports("sampling-ocr", backend="torch-cpu")
def test_same_seed_gives_same_completion_in_any_batch(oracle):
    request = visual(
        3, (1, 3, 3), 5, width=oracle.width, temperature=1.0, seed=1234, top_p=0.95, max_tokens=40, ignore_eos=True,
        min_p=0.01, no_repeat_ngram_size=2,
    )  # fmt: skip
    company = [prompt(i, 3 + 5 * i, temperature=1.2, top_k=7 * i, max_tokens=60, ignore_eos=True) for i in range(6)]

    async def run():
        async with decoding(oracle.decoder(prefill_chunk=10)) as decoder:
            alone = await collect(decoder, request)
            first, *_, last = await asyncio.gather(*(collect(decoder, one) for one in [request, *company, request]))
            other = await collect(decoder, replace(request, sampling=replace(request.sampling, seed=1235)))
            return ids(alone), ids(first), ids(last), ids(other)

    alone, first, last, other = asyncio.run(run())
    assert alone == first == last
    assert other != alone


def test_completions_without_seed_differ(oracle):
    request = prompt(1, 5, temperature=1.5, max_tokens=30, ignore_eos=True)

    async def run():
        async with decoding(oracle.decoder()) as decoder:
            return await asyncio.gather(*(collect(decoder, request) for _ in range(3)))

    assert len({tuple(ids(tokens)) for tokens in asyncio.run(run())}) == 3


def test_finish_reasons(oracle):
    """By the model's stop token, by a stop token of the request, or by length."""
    free = oracle.greedy(prompt(1, 20, max_tokens=24))
    third = next(token for token in free if token != free[0])
    place = free.index(third)

    async def run():
        async with decoding(oracle.decoder()) as decoder:
            ask = lambda **options: collect(decoder, prompt(1, 20, max_tokens=24, **options))  # noqa: E731 - short
            banned = oracle.model.config.text_config.eos_token_id
            return {
                "length": await ask(),
                "stop": await ask(stop_token_ids=(third,)),
                "eos": await ask(logit_bias={banned: 100.0}),
                "ignored": await ask(logit_bias={banned: 100.0}, ignore_eos=True),
                "late": await ask(logit_bias={banned: 100.0}, min_tokens=5),
                "late stop": await ask(stop_token_ids=(third,), min_tokens=place + 2),
            }

    completions = asyncio.run(run())
    ends = {name: (len(tokens), tokens[-1].finish_reason) for name, tokens in completions.items()}
    assert ends["length"] == (24, "length")
    assert ends["stop"] == (place + 1, "stop")
    assert ends["eos"] == (1, "stop")
    assert ends["ignored"] == (24, "length")
    assert ends["late"] == (6, "stop")
    assert third not in ids(completions["late stop"])[: place + 2]


def test_completion_may_fill_context(oracle):
    request = prompt(1, 20, max_tokens=44, ignore_eos=True)

    async def run():
        async with decoding(oracle.decoder(max_model_len=64)) as decoder:
            return await collect(decoder, request)

    tokens = asyncio.run(run())
    assert len(tokens) == 44
    assert ids(tokens) == oracle.logits(request, ids(tokens)).argmax(-1).tolist()


@needs_native
@pytest.mark.parametrize(
    "compressed", [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}]
)
def test_bfloat16_is_bit_exact_in_any_batch_and_chunking(oracle, compressed):
    """With the C kernels, tokens and log probabilities are bit-exact."""

    async def completions(together, **options):
        requests_ = [replace(request, sampling=replace(request.sampling, logprobs=3)) for request in requests(oracle)]
        async with decoding(oracle.decoder(dtype="bfloat16", **compressed, **options)) as decoder:
            if together:
                return await asyncio.gather(*(collect(decoder, request) for request in requests_))
            return [await collect(decoder, request) for request in requests_]

    alone = asyncio.run(completions(False, prefix_cache=False))
    assert asyncio.run(completions(True, prefill_chunk=16)) == alone
    assert asyncio.run(completions(True, max_batch_size=3)) == alone


@needs_native
@pytest.mark.supports("int8", backend="torch-cpu")
def test_int8_stays_close(oracle):
    answer = oracle.greedy(prompt(1, 20))
    forced = prompt(1, 20, logprobs=0, max_tokens=len(answer), ignore_eos=True)

    async def ours():
        async with decoding(oracle.decoder(dtype="bfloat16", quantization="int8")) as decoder:
            return await collect(decoder, forced)

    first = asyncio.run(ours())[0]
    assert first.id == answer[0]
    assert first.logprob == pytest.approx(float(oracle.logits(forced, answer).log_softmax(-1)[0, answer[0]]), abs=0.2)


@needs_native
def test_cached_prompt_with_int8_kv_cache_is_bit_exact(oracle):
    """Keys and values are quantized once and always read from the cache, so that sharing them changes nothing."""
    first = prompt(1, 60, logprobs=3)
    later = replace(first, token_ids=np.concatenate([first.token_ids[:-5], prompt(2, 5).token_ids]))

    async def completions(**options):
        async with decoding(oracle.decoder(dtype="bfloat16", kv_cache_dtype="int8", **options)) as decoder:
            return [await collect(decoder, request) for request in (first, later, first)]

    found, expected = asyncio.run(completions(prefill_chunk=7)), asyncio.run(completions(prefix_cache=False))
    assert [tokens[0].cached_tokens for tokens in found] == [0, 55, 55]
    assert [[replace(token, cached_tokens=0) for token in tokens] for tokens in found] == expected


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_native)])
@pytest.mark.supports("int8-kv-cache", backend="torch-cpu")
def test_int8_kv_cache_stays_close(oracles, shape, dtype):
    """Log probabilities of forced completions agree, whichever kernels attend to the cache."""
    oracle = oracles(shape)
    answer = oracle.greedy(prompt(1, 20))
    forced = prompt(1, 20, logprobs=0, max_tokens=len(answer), ignore_eos=True)

    async def ours():
        async with decoding(oracle.decoder(dtype=dtype, kv_cache_dtype="int8")) as decoder:
            return await collect(decoder, forced)

    tokens = asyncio.run(ours())
    same = next((i for i, (a, b) in enumerate(zip(ids(tokens), answer, strict=True)) if a != b), len(answer))
    assert same >= 2
    expected = oracle.logits(forced, answer).log_softmax(-1)
    for i in range(same):
        assert tokens[i].logprob == pytest.approx(float(expected[i, answer[i]]), abs=0.3)


def test_bfloat16_kv_cache_of_float32_model_stays_close(oracle):
    request = prompt(1, 20, logprobs=0, max_tokens=1)

    async def first(**options):
        async with decoding(oracle.decoder(**options)) as decoder:
            return (await collect(decoder, request))[0]

    exact, rounded = asyncio.run(first()), asyncio.run(first(kv_cache_dtype="bfloat16"))
    assert rounded.id == exact.id
    assert exact.logprob != rounded.logprob == pytest.approx(exact.logprob, abs=0.1)


def test_int8_kv_cache_holds_more_tokens(oracle):
    """A token of this model has 2 layers * 2 * 2 rows of 16 elements."""
    bfloat16, int8 = (
        oracle.decoder(kv_cache_mib=1, dtype="bfloat16", kv_cache_dtype=dtype).snapshot().kv_size
        for dtype in ("bfloat16", "int8")
    )
    assert (bfloat16, int8) == (2**20 // (8 * 32), 2**20 // (8 * (16 + 4)))


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8", "dtype": "float32"},
        {"quantization": "int8", "dtype": "bfloat16", "cpu_kernels": "torch"},
    ],
)
def test_impossible_quantization_is_rejected(oracle, options):
    with pytest.raises(ConfigError, match=r"it supports int4 on a CPU|Remove `cpu_kernels` torch") as caught:
        oracle.decoder(**options)
    assert caught.value.param == "quantization"


@needs_native
@pytest.mark.supports("int4", backend="torch-cpu")
def test_int4_is_close_to_rounded_weights(oracle, caplog):
    """The C kernels compute with 4 bits what PyTorch's compute with the same weights in float32. With some instruction
    sets, activations have 8 bits, so that a few prompts with two likely tokens get the other one."""
    prompts = [prompt(content, 20, logprobs=0, max_tokens=1) for content in range(48)]

    async def first_tokens(**options):
        async with decoding(oracle.decoder(quantization="int4", **options)) as decoder:
            return [token for (token,) in await asyncio.gather(*(collect(decoder, each) for each in prompts))]

    found = asyncio.run(first_tokens(dtype="bfloat16"))
    assert "saves no memory" not in caplog.text
    expected = asyncio.run(first_tokens(dtype="float32"))
    assert "`quantization` int4 saves no memory here" in caplog.text
    pairs = list(zip(found, expected, strict=True))
    assert sum(own.id == other.id for own, other in pairs) >= 0.75 * len(prompts)
    assert statistics.median(abs(own.logprob - other.logprob) for own, other in pairs) < 0.1


def test_first_and_last_layer_keep_8_bits():
    assert [layer_quantization(INT4, number, 4) for number in range(4)] == [INT8, INT4, INT4, INT8]
    assert [layer_quantization(INT4, number, 2) for number in range(2)] == [INT4, INT4]
