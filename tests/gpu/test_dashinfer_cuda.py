"""DashInfer on CUDA = transformers, with the real positions of images and videos; skipped without a GPU."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from dashinfer_vlm_dashinfer import DashInferFactory
from tests.dashinfer.conftest import decoding
from tests.plugins.oracle import collect, ids, prompt, visual

pytestmark = pytest.mark.dashinfer


def generate(decoder, requests):
    async def run():
        async with decoding(decoder):
            return [ids(tokens) for tokens in await asyncio.gather(*(collect(decoder, each) for each in requests))]

    return asyncio.run(run())


@pytest.fixture
def on_cuda(decoder):
    return lambda **options: decoder(**{"device": "cuda", "dtype": "float32"} | options)


def conversations(oracle):
    return [
        prompt(1, 30),
        visual(5, (1, 4, 6), 7, width=oracle.width),
        visual(3, (1, 2, 2), 4, (1, 3, 5), 2, (1, 4, 4), 3, width=oracle.width, content=3),
        visual(4, (6, 3, 4), 8, width=oracle.width, content=4),
        visual(2, (3, 2, 2), 1, (1, 5, 1), 6, width=oracle.width, content=5),
    ]


def test_auto_selects_dashinfer(oracle, cache):
    support = DashInferFactory().check_support(read_spec(oracle.folder), EngineConfig(cache_dir=cache))
    assert support.score > 10, support.reason


@pytest.mark.supports("images", backend="dashinfer-cuda")
def test_tokens_equal_transformers_at_real_positions(oracle, on_cuda):
    requests = conversations(oracle)
    assert generate(on_cuda(), requests) == [oracle.greedy(request) for request in requests]


@pytest.mark.supports("prefix-cache", backend="dashinfer-cuda")
def test_prefix_cache_does_not_change_tokens(oracle, on_cuda):
    requests = conversations(oracle) * 2
    assert generate(on_cuda(prefix_cache=True), requests) == generate(on_cuda(prefix_cache=False), requests)


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 1.5}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.3}]
)
def test_penalties_match_definition(oracle, on_cuda, penalty):
    requests = [prompt(seed, 20, **penalty) for seed in range(4)]
    assert generate(on_cuda(), requests) == generate(oracle.decoder(), requests)


@pytest.mark.supports("sampling", backend="dashinfer-cuda")
def test_top_p_1_samples_full_distribution(oracle, on_cuda):
    expected = (oracle.logits(prompt(1, 12), [0])[0] / 2).softmax(-1).double().numpy()
    order = np.argsort(-expected)
    inside = set(order[: int((expected[order].cumsum() < 0.99).sum()) + 1].tolist())
    requests = [prompt(1, 12, max_tokens=1, seed=seed, temperature=2.0) for seed in range(1500)]
    assert any(token not in inside for (token,) in generate(on_cuda(), requests))
