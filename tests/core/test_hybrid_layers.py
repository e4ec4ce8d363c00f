"""Layers with gated delta nets and gated attention in one call to C have the bits of the single kernels."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from dashinfer_vlm_core.kernels import delta_net
from dashinfer_vlm_core.kernels.kv_cache import quantize_rows
from dashinfer_vlm_core.kernels.layers import ReferenceDecoderLayers
from dashinfer_vlm_core.kernels.quantization import INT4, INT8
from dashinfer_vlm_core.kernels.torch_kernels import TorchKernels
from dashinfer_vlm_core.kernels.types import (
    Activation,
    Additions,
    Attention,
    DecoderLayer,
    DecoderShape,
    DeltaNet,
    ForwardBatch,
    KVSpan,
    KVSpans,
    LoraLayer,
    LoraLayers,
    LoraRows,
    LowRank,
    LowRankPart,
    Mlp,
    Norm,
    RecurrentBatch,
    RecurrentStates,
    StateSpan,
    StateSpans,
)
from dashinfer_vlm_core.text_spec import DeltaNetSpec
from tests.kernels import VARIANT_PARAMS, load_kernels

SPEC = DeltaNetSpec(num_key_heads=2, num_value_heads=4, key_dim=12, value_dim=20, conv_width=4)
SHAPE = DecoderShape(heads=4, kv_heads=2, head_dim=40, eps=1e-6, gate=True)
HIDDEN, INNER, CACHE_ROWS, SLOTS = 96, 136, 200, 8
QUERIES, KEYS = SHAPE.heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim

STATES = (
    StateSpan(0, 70, 0, -1, 1, (64, 6), ((64, 7),)),
    StateSpan(70, 1, 0, 2, 3),
    StateSpan(71, 3, 2, 4, 5),
    StateSpan(74, 18, 1, -1, 6, (17,)),
)
"""A prompt, a step, a step with drafts, and a prompt with a draft."""
KEY_SPANS = (KVSpan(0, 70, 0, 70, 0), KVSpan(70, 1, 70, 31, 30), KVSpan(71, 3, 110, 19, 16), KVSpan(74, 18, 140, 18, 0))
TOKENS = 92


@pytest.fixture(params=VARIANT_PARAMS)
def native(request):
    return load_kernels(request.param)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def layer(kernels, seed, *, is_attention, quantization):
    def linear(outputs, inputs, **options):
        nonlocal seed
        seed += 1
        return kernels.linear(numbers(outputs, inputs, seed=seed) / 8, **options)

    quantized = {"quantization": quantization}
    if is_attention:
        mixer = Attention(
            linear(2 * (QUERIES + KEYS), HIDDEN, **quantized),
            linear(HIDDEN, QUERIES, **quantized),
            Norm(numbers(SHAPE.head_dim, seed=1)),
            Norm(numbers(SHAPE.head_dim, seed=2)),
        )
    else:
        heads = SPEC.num_value_heads
        mixer = DeltaNet(
            SPEC, linear(SPEC.conv_channels + SPEC.value_width, HIDDEN, **quantized),
            linear(2 * heads, HIDDEN, fp32_output=True), linear(HIDDEN, SPEC.value_width, **quantized),
            conv=numbers(SPEC.conv_width, SPEC.conv_channels, seed=3).float(),
            rate=-numbers(heads, seed=4).float().exp(), step_bias=numbers(heads, seed=5).float(),
            norm=numbers(SPEC.value_dim, seed=6).float(), eps=SHAPE.eps,
        )  # fmt: skip
    mlp = Mlp(
        linear(2 * INNER, HIDDEN, activation=Activation.SILU_GATE, **quantized), linear(HIDDEN, INNER, **quantized)
    )
    return DecoderLayer(Norm(numbers(HIDDEN, seed=7)), mixer, Norm(numbers(HIDDEN, seed=8)), mlp)


def low_rank(kernels, seed, outputs, inputs, rank=4):
    """Return what an adapter adds to a layer whose fused projections have these outputs."""
    parts, first = [], 0
    for number, count in enumerate(outputs):
        up = kernels.linear(numbers(count, rank, seed=seed + number) / 4, fp32_output=True)
        parts.append(LowRankPart(up, number * rank, rank, first, count))
        first += count
    down = kernels.linear(numbers(rank * len(parts), inputs, seed=seed) / 4)
    return LowRank(down, tuple(parts), first)


def lora_layer(kernels, seed, *, is_attention):
    heads = SPEC.num_value_heads
    changes = {
        "qkv": ((2 * QUERIES, KEYS, KEYS) if is_attention else (SPEC.conv_channels, SPEC.value_width), HIDDEN),
        "output": ((HIDDEN,), QUERIES if is_attention else SPEC.value_width),
        "gate_up": ((INNER, INNER), HIDDEN),
        "down": ((HIDDEN,), INNER),
        **({} if is_attention else {"gates": ((heads, heads), HIDDEN)}),
    }
    return LoraLayer(**{name: low_rank(kernels, seed + i, *shape) for i, (name, shape) in enumerate(changes.items())})


class Case(NamedTuple):
    """What the layers compute. `mixers` has a letter for each: attention or delta net."""

    mixers: str = "dada"
    quantization: object = None
    returns_all: bool = False
    has_int8_cache: bool = False
    has_lora: bool = False
    has_additions: bool = False
    drafts: bool = True


CASES = {
    "bfloat16": Case(),
    "int8": Case(quantization=INT8),
    "int4": Case(quantization=INT4),
    "all rows": Case(quantization=INT4, returns_all=True),
    "last is delta net": Case("add"),
    "only delta nets": Case("dd", returns_all=True),
    "int8 cache": Case(has_int8_cache=True),
    "lora": Case(quantization=INT8, has_lora=True),
    "lora, last is delta net": Case("ad", has_lora=True),
    "lora, all rows": Case("add", returns_all=True, has_lora=True),
    "additions": Case(has_additions=True),
    "no drafts": Case(drafts=False),
}


def batch(case, loras=()):
    slots = torch.tensor([span.first_key + span.start + i for span in KEY_SPANS for i in range(span.num_queries)])
    angles = torch.randn(TOKENS, SHAPE.head_dim // 2, generator=torch.Generator().manual_seed(9))
    ends = [span.first_query + span.num_queries - 1 for span in KEY_SPANS[1:]]
    last_spans = [
        KVSpan(i, 1, span.first_key, span.num_keys, span.num_keys - 1) for i, span in enumerate(KEY_SPANS[1:])
    ]
    cache = numbers(case.mixers.count("a"), 2 * SHAPE.kv_heads, CACHE_ROWS, SHAPE.head_dim, seed=10)
    cache, scales = quantize_rows(cache) if case.has_int8_cache else (cache, None)
    count = case.mixers.count("d")
    states = RecurrentStates(
        numbers(count, SLOTS, SPEC.conv_width - 1, SPEC.conv_channels, seed=11),
        numbers(count, SLOTS, SPEC.num_value_heads, SPEC.key_dim, SPEC.value_dim, seed=12).float(),
    )
    state_spans = [span._replace(num_drafts=span.num_drafts * case.drafts) for span in STATES]
    return ForwardBatch(
        angles.cos(), angles.sin(), slots, KVSpans(KEY_SPANS),
        torch.arange(TOKENS) if case.returns_all else torch.tensor(ends),
        KVSpans(KEY_SPANS if case.returns_all else last_spans), cache, cache_scales=scales, loras=loras,
        additions=Additions(torch.tensor([0, 5, 80]), numbers(1, 3, HIDDEN, seed=13)) if case.has_additions else None,
        recurrent=RecurrentBatch(states, StateSpans(state_spans), []),
    )  # fmt: skip


def written(forward):
    """Return everything that a forward pass writes."""
    caches = [part for part in (forward.cache, forward.cache_scales) if part is not None]
    kept = [part for inputs in forward.recurrent.kept for part in inputs]
    return [*caches, *forward.recurrent.states, *kept]


@pytest.mark.parametrize("name", CASES)
def test_layers_in_one_call_are_bit_exact_with_reference_layers(native, name):
    case = CASES[name]
    kinds = [letter == "a" for letter in case.mixers]
    layers = [
        layer(native, 100 * number, is_attention=kind, quantization=case.quantization)
        for number, kind in enumerate(kinds)
    ]
    loras = ()
    if case.has_lora:
        lora = LoraLayers([lora_layer(native, 1000 + 100 * i, is_attention=kind) for i, kind in enumerate(kinds)])
        loras = (LoraRows(lora, 70, TOKENS, *((70, TOKENS) if case.returns_all else (0, 3))),)
    whole, parts = native.decoder_layers(layers, SHAPE), ReferenceDecoderLayers(native, layers, SHAPE)
    assert type(whole) is not type(parts)
    batches = [batch(case, loras), batch(case, loras)]
    found, expected = (
        run(numbers(TOKENS, HIDDEN), forward) for run, forward in zip((whole, parts), batches, strict=True)
    )
    assert torch.equal(found, expected)
    assert found.isfinite().all()
    assert all(map(torch.equal, *map(written, batches)))
    assert len(batches[0].recurrent.kept) == (case.mixers.count("d") if case.drafts else 0)


@pytest.mark.parametrize("mixers", ["da", "ad"])
def test_layers_without_requested_rows_write_cache_and_states(native, mixers):
    case = Case(mixers)
    layers = [layer(native, 100 * i, is_attention=kind == "a", quantization=None) for i, kind in enumerate(mixers)]
    run = native.decoder_layers(layers, SHAPE)
    full, empty = batch(case), batch(case)._replace(last=torch.zeros(0, dtype=torch.int64), last_spans=KVSpans([]))
    assert len(run(numbers(TOKENS, HIDDEN), full)) == 3
    assert len(run(numbers(TOKENS, HIDDEN), empty)) == 0
    assert all(map(torch.equal, written(full), written(empty)))


def test_rewound_states_equal_those_without_rejected_drafts(native):
    """Of two sequences at once; the third one keeps its state."""
    case = Case("dd")
    layers = [layer(native, 100 * i, is_attention=False, quantization=None) for i in range(2)]
    forward = batch(case)
    before = forward.recurrent.states.delta[:, STATES[0].target].clone()
    native.decoder_layers(layers, SHAPE)(numbers(TOKENS, HIDDEN), forward)
    kept = forward.recurrent.kept
    delta_net.rewind(native, [layer.mixer for layer in layers], forward.recurrent, {2: 1, 3: 17})
    assert not torch.equal(forward.recurrent.states.delta[:, STATES[0].target], before)
    for number, (net, inputs) in enumerate(zip((layer.mixer for layer in layers), kept, strict=True)):
        for span, first, count in ((STATES[2], 0, 1), (STATES[3], 3, 17)):
            rows = type(inputs)(*(part[first : first + count] for part in inputs))
            states = batch(case).recurrent.states.layer(number)
            alone = span._replace(first_token=0, num_tokens=count, num_drafts=0)
            native.mix_delta_net(net, rows, states, StateSpans([alone]))
            for state, expected in zip(forward.recurrent.states.layer(number), states, strict=True):
                assert torch.equal(state[span.target], expected[span.target])


def test_gates_multiply_rows(native):
    x, gates = numbers(20, 104), 10 * numbers(20, 2, 104, seed=1)
    gates[0, 1, :4] = torch.tensor([200.0, -200.0, torch.nan, 0.0])
    expected = x.clone()
    TorchKernels("cpu").gate_(expected, gates[:, 1])
    native.gate_(x, gates[:, 1])
    torch.testing.assert_close(x, expected, rtol=2**-7, atol=0, equal_nan=True)
