"""LoRA adapters: the tokens of merged weights, in any batch and next to the model itself."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from transformers import Qwen2VLForConditionalGeneration

from dashinfer_vlm_core.models.lora import read_lora
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from tests.kernels import needs_native
from tests.lora_folders import ATTENTION, MLP, merge_lora, write_lora

from .oracle import Oracle, collect, decoding, ids, prompt, visual

LORAS = {
    "all linear layers": {"targets": (*ATTENTION, *MLP)},
    "query and value": {"targets": ("q_proj", "v_proj"), "rank": 8, "use_rslora": True},
    "one of two fused": {"targets": ("k_proj", "up_proj"), "rank": 3},  # not a multiple of four
    "output layers": {"targets": ("o_proj", "down_proj"), "ranks": {"o_proj": 6}, "alpha_pattern": {"down_proj": 9}},
    "layer of the head": {"targets": ("lm_head", "gate_proj")},
    "embedding table": {"targets": ("embed_tokens",)},
    "saved modules": {"targets": ("q_proj",), "saved": ("lm_head", "embed_tokens")},
    "bfloat16": {"targets": ATTENTION, "dtype": torch.bfloat16},
}


@pytest.fixture(scope="module")
def base(oracles):
    return oracles("mha-untied")


@pytest.fixture(scope="module")
def adapted(base, tmp_path_factory):
    """Return the adapters by name, each with transformers and the merged weights as its reference."""
    made = {}
    for seed, (name, options) in enumerate(LORAS.items()):
        folder = tmp_path_factory.mktemp("adapter") / name
        write_lora(folder, base.folder, seed=seed, **options)
        merged = merge_lora(folder.parent / "merged", base.folder, folder)
        model = Qwen2VLForConditionalGeneration.from_pretrained(merged, dtype="float32").eval()
        made[name] = read_lora(name, str(folder), read_spec(base.folder)), Oracle(merged, model)
    return made


def requests(width, **sampling):
    return [prompt(1, 20, **sampling), visual(5, (1, 4, 6), 7, width=width, **sampling), prompt(3, 1, **sampling)]


def run(decoder, requests):
    """Return the tokens of requests that are decoded together."""

    async def decode():
        async with decoding(decoder):
            return await asyncio.gather(*(collect(decoder, request) for request in requests))

    return asyncio.run(decode())


@pytest.mark.slow
@pytest.mark.parametrize("name", LORAS)
@pytest.mark.supports("lora", backend="torch-cpu")
def test_tokens_and_logprobs_equal_merged_weights(base, adapted, name):
    lora, merged = adapted[name]
    given = requests(base.width, logprobs=0)
    found = run(base.decoder(), [replace(request, lora=lora) for request in given])
    for request, tokens in zip(given, found, strict=True):
        expected = merged.greedy(request)
        assert ids(tokens) == expected
        logprobs = merged.logits(request, expected).log_softmax(-1)
        assert [token.logprob for token in tokens] == pytest.approx(
            [float(logprobs[step, token]) for step, token in enumerate(expected)], abs=1e-4
        )
    assert [merged.greedy(request) for request in given] != [base.greedy(request) for request in given]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 7}, {"max_batch_size": 3}], ids=str)
def test_loras_and_model_share_a_batch(base, adapted, options):
    """In float32, adapters and requests are in every order; prompts are cut between and within them."""
    given = requests(base.width)
    mixed = [(request, lora) for request in given for lora in (*adapted.values(), (None, base))]
    found = run(base.decoder(**options), [replace(request, lora=lora) for request, (lora, _) in mixed])
    assert [ids(tokens) for tokens in found] == [oracle.greedy(request) for request, (_, oracle) in mixed]


@needs_native
@pytest.mark.parametrize("name", ["layer of the head", "saved modules"])
def test_chunk_of_a_lora_without_logits_in_a_step_with_logits(base, adapted, name):
    given = [prompt(1, 2), replace(prompt(2, 40), lora=adapted[name][0])]
    options = {"dtype": "bfloat16", "prefill_chunk": 8}
    together = run(base.decoder(**options), given)
    assert [ids(tokens) for tokens in together] == [
        ids(run(base.decoder(**options), [request])[0]) for request in given
    ]


def test_prefixes_are_shared_only_within_a_lora(base, adapted):
    request = prompt(1, 40)
    chosen = [None, adapted["query and value"][0], adapted["bfloat16"][0]]

    async def decode():
        async with decoding(base.decoder()) as decoder:
            return [await collect(decoder, replace(request, lora=lora)) for lora in chosen * 2]

    found = asyncio.run(decode())
    assert [tokens[0].cached_tokens for tokens in found] == [0, 0, 0, 39, 39, 39]
    assert [ids(tokens) for tokens in found[:3]] == [ids(tokens) for tokens in found[3:]]


def test_copies_of_a_lora_share_prefixes(base, tmp_path):
    request = prompt(1, 40)
    copies = [
        read_lora(name, str(write_lora(tmp_path / name, base.folder, ("q_proj",))), read_spec(base.folder))
        for name in ("one", "two")
    ]

    async def decode():
        async with decoding(base.decoder()) as decoder:
            return [await collect(decoder, replace(request, lora=lora)) for lora in copies]

    first, second = asyncio.run(decode())
    assert second[0].cached_tokens == 39
    assert ids(first) == ids(second)


def test_keys_balanced_for_int8_cache(base, adapted, tmp_path):
    """The factors of key channels, which a large bias causes, apply to the adapter too."""
    weights = Qwen2VLForConditionalGeneration.from_pretrained(base.folder, dtype="float32")
    with torch.no_grad():
        for layer in weights.model.language_model.layers:
            layer.self_attn.k_proj.bias[::5] *= 40
    weights.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "preprocessor_config.json").write_bytes(
        (base.folder / "preprocessor_config.json").read_bytes()
    )
    write_lora(tmp_path / "adapter", tmp_path / "base", ATTENTION)
    merged = merge_lora(tmp_path / "merged", tmp_path / "base", tmp_path / "adapter")
    lora = read_lora("a", str(tmp_path / "adapter"), read_spec(tmp_path / "base"))
    request = prompt(1, 30, logprobs=0, max_tokens=1)

    def logprob(folder, lora=None, **options):
        decoder = Oracle(folder, weights).decoder(**options)
        return run(decoder, [replace(request, lora=lora)])[0][0].logprob

    exact, rounded = logprob(merged), logprob(merged, kv_cache_dtype="int8")
    found = logprob(tmp_path / "base", lora, kv_cache_dtype="int8")
    assert found == pytest.approx(rounded, abs=5e-3)
    assert found == pytest.approx(exact, abs=5e-2)


def test_lora_is_freed_with_its_last_reference(base, tmp_path):
    folder = write_lora(tmp_path / "a", base.folder, ATTENTION)

    async def decode():
        async with decoding(base.decoder()) as decoder:
            lora = read_lora("a", str(folder), read_spec(base.folder))
            await collect(decoder, replace(prompt(1, 30), lora=lora))
            reference = weakref.ref(lora)
            del lora
            gc.collect()
            return reference()

    assert asyncio.run(decode()) is None
