"""Balanced keys have the same products with queries, and lose less when they are quantized."""

from __future__ import annotations

import torch

from dashinfer_vlm_core.kernels.kv_cache import quantize_rows
from dashinfer_vlm_core.kernels.types import Norm
from dashinfer_vlm_torch.key_balance import balance_norms, balance_projection, channel_factors

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 6, 2, 128, 48


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def projection():
    """Return weights, and biases as those of Qwen2's keys: two channels are far larger than the others."""
    weight, bias = numbers((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN) / 7, numbers((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    keys = bias.view(-1, HEAD_DIM)[HEADS : HEADS + KV_HEADS]
    keys[:, [3, 3 + HEAD_DIM // 2]] = torch.tensor([100.0, -250]).bfloat16()
    return weight, bias


def heads_of(weight, bias, x):
    """Return queries, keys and values of x, float64 [rows, heads, head_dim]."""
    rows = (x.double() @ weight.double().T + bias.double()).view(len(x), -1, HEAD_DIM)
    return rows.split([HEADS, KV_HEADS, KV_HEADS], dim=1)


def scores(queries, keys):
    shared = keys.repeat_interleave(HEADS // KV_HEADS, dim=1)
    return torch.einsum("qhd,khd->hqk", queries, shared)


def test_balanced_projection_has_same_scores_and_values():
    (weight, bias), x = projection(), numbers(20, HIDDEN, seed=1)
    queries, keys, values = heads_of(weight, bias, x)
    balance_projection(weight, bias, torch.ones(HIDDEN), heads=HEADS, kv_heads=KV_HEADS)
    found = heads_of(weight, bias, x)
    assert torch.allclose(scores(*found[:2]), scores(queries, keys), rtol=1e-12, atol=1e-9)
    assert not torch.equal(found[1], keys)
    assert torch.equal(found[2], values)


def test_balanced_keys_lose_less_when_quantized():
    (weight, bias), x = projection(), numbers(200, HIDDEN, seed=1)

    def error():
        queries, keys, _ = heads_of(weight, bias, x)
        quantized, scales = quantize_rows(keys)
        lost = scores(queries, quantized.double() * scales[..., None].double() - keys)
        return float(lost.square().mean().sqrt())

    before = error()
    balance_projection(weight, bias, torch.ones(HIDDEN), heads=HEADS, kv_heads=KV_HEADS)
    assert error() < before / 5


def test_gain_of_norm_affects_magnitudes():
    """Channel 5 reads an input that the norm amplifies."""
    weight, gain = torch.ones((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), torch.ones(HIDDEN)
    weight.view(-1, HEAD_DIM, HIDDEN)[:, :, 7] = 0
    weight.view(-1, HEAD_DIM, HIDDEN)[:, 5, 7] = 1
    gain[7] = 1000
    balance_projection(weight, None, gain, heads=HEADS, kv_heads=KV_HEADS)
    keys = weight.view(-1, HEAD_DIM, HIDDEN)[HEADS]
    assert set(keys[:, 0].tolist()) == {1.0, keys[5, 0].item()}
    assert keys[5, 0] == keys[5 + HEAD_DIM // 2, 0] < 1 / 50


def test_balanced_norms_have_same_products():
    query, key = Norm(numbers(HEAD_DIM), numbers(HEAD_DIM, seed=1)), Norm(numbers(HEAD_DIM, seed=2))
    key.weight[4] = 300
    balanced = balance_norms(query, key)
    assert balanced[1].weight[4] < 10
    assert torch.equal(balanced[0].weight.double() * balanced[1].weight.double(), query.weight.double() * key.weight)
    assert torch.equal(balanced[0].bias.double() * balanced[1].weight.double(), query.bias.double() * key.weight)


def test_factors_are_shared_powers_of_two_within_limits():
    magnitudes = torch.rand(3, HEAD_DIM, generator=torch.Generator().manual_seed(0)) + 0.5
    magnitudes[0, 1] = magnitudes[0, 1 + HEAD_DIM // 2] = 0
    magnitudes[1, 2] = 1e30
    factors = channel_factors(magnitudes)
    assert torch.equal(*factors.chunk(2, dim=-1))
    assert torch.equal(factors.log2(), factors.log2().round())
    assert (factors[0, 1], factors[1, 2]) == (2.0**-8, 2.0**8)
