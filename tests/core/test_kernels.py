"""The C and PyTorch kernels match the formulas, and a row's result does not depend on its batch."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.kernels.choice import PYTORCH_SETS
from dashinfer_vlm_core.kernels.kv_cache import attend_cached, quantize_rows
from dashinfer_vlm_core.kernels.layers import ReferenceDecoderLayers
from dashinfer_vlm_core.kernels.onednn import OneDnnKernels, unavailable_reason
from dashinfer_vlm_core.kernels.quantization import INT4, INT8, QuantizedWeight, int8_codes
from dashinfer_vlm_core.kernels.torch_kernels import TorchKernels
from dashinfer_vlm_core.kernels.types import (
    Activation,
    Additions,
    Attention,
    DecoderLayer,
    DecoderShape,
    ForwardBatch,
    KVCacheLayer,
    KVSpan,
    KVSpans,
    LoraLayer,
    LoraLayers,
    LoraRows,
    LowRank,
    LowRankPart,
    Mlp,
    Norm,
)
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_cpu import native as native_module
from dashinfer_vlm_cpu import native_linear
from dashinfer_vlm_cpu.build import AMX, AVX2, AVX512, AVX512_VNNI, PORTABLE_TILES, Variant
from dashinfer_vlm_cpu.native import load_variant
from dashinfer_vlm_cpu.native_linear import NativeLinear, PackedWeights
from dashinfer_vlm_demo import CHECKPOINT
from tests.cases import cases
from tests.kernels import (
    VARIANT_PARAMS,
    choose_kernels,
    load_kernels,
    needs_amx,
    needs_avx512,
    needs_native,
    selector,
)

ROWS = [1, 5, 12, 13, 16, 29, 40, 200]
SHAPES = [(96, 64), (70, 132), (33, 260)]  # (outputs, inputs): whole panels, a partial panel, partial int8 blocks


PYTORCH_PARAMS = [
    pytest.param(TorchKernels, id="torch"),
    pytest.param(
        OneDnnKernels,
        id="onednn",
        marks=pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason() or "available"),
    ),
]


@pytest.fixture(params=[*PYTORCH_PARAMS, *VARIANT_PARAMS])
def kernels(request):
    return load_kernels(request.param) if isinstance(request.param, Variant) else request.param("cpu")


@pytest.fixture(params=VARIANT_PARAMS)
def native(request):
    return load_kernels(request.param)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def error(found, expected):
    """Return the error relative to the norm of the expected values."""
    return float((found.float() - expected).norm() / expected.norm())


ACTIVATIONS = {
    Activation.NONE: lambda x: x,
    Activation.QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: functools.partial(F.gelu, approximate="tanh"),
}


@cases("shape", SHAPES)
@cases("activation", ACTIVATIONS)
def test_linear(kernels, activation, shape):
    weight, bias = numbers(*shape) / 8, numbers(shape[0], seed=1)
    layer = kernels.linear(weight, bias, activation=activation)
    for rows in ROWS:
        x = numbers(rows, shape[1], seed=2)
        expected = ACTIVATIONS[activation](F.linear(x.float(), weight.float(), bias.float()))
        assert error(layer(x), expected) < 5e-3


def test_linear_add_to(kernels):
    weight, x, total = numbers(70, 64) / 8, numbers(29, 64, seed=1), numbers(29, 70, seed=2)
    expected = total.float() + F.linear(x.float(), weight.float())
    kernels.linear(weight).add_to(total, x)
    assert error(total, expected) < 5e-3


@needs_native
@cases(("fp32_output", "dtype"), [(True, torch.float32), (True, torch.bfloat16), (False, torch.float32)])
def test_adding_to_float32_is_rejected(native, fp32_output, dtype):
    layer = native.linear(numbers(70, 64), fp32_output=fp32_output)
    with pytest.raises(AssertionError):
        layer.add_to(torch.zeros(3, 70, dtype=dtype), numbers(3, 64))


@cases("rows", ROWS)
@cases("outputs", [192, 140])  # whole panels, a partial panel
@cases("with_bias", [False, True])
def test_gated_linear(kernels, with_bias, outputs, rows):
    weight, x = numbers(outputs, 64) / 8, numbers(rows, 64, seed=1)
    bias = numbers(outputs, seed=2) if with_bias else None
    gate, up = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).chunk(2, dim=-1)
    layer = kernels.linear(weight, bias, activation=Activation.SILU_GATE)
    assert error(layer(x), F.silu(gate) * up) < 1e-2


@needs_native
@cases("activation", [Activation.QUICK_GELU, Activation.GELU, Activation.GELU_TANH, Activation.SILU_GATE])
@cases("value", [-1e14, -3e38])
def test_activation_of_very_negative_numbers_is_zero(native, activation, value):
    layer = native.linear(torch.eye(64).bfloat16(), activation=activation)
    assert not layer(torch.full((3, 64), value).bfloat16()).any()


@needs_native
def test_gelu_of_negative_numbers_is_accurate(native):
    x = torch.linspace(-9, 9, 2560).bfloat16().view(40, 64)
    found = native.linear(torch.eye(64).bfloat16(), activation=Activation.GELU, fp32_output=True)(x)
    expected = x.double() * torch.erfc(-x.double() / math.sqrt(2)) / 2
    assert ((found - expected).abs() <= 1e-5 * expected.abs()).all()


@cases("activation", [Activation.NONE, Activation.SILU_GATE])
@cases("biased", [1, 3, 13, 40])
def test_row_bias_is_added_before_activation(kernels, activation, biased):
    weight, bias, x = numbers(140, 64) / 8, numbers(140, seed=1), numbers(40, 64, seed=2)
    row_bias = numbers(biased, 140, seed=3).float()
    product = F.linear(x.float(), weight.float(), bias.float())
    product[-biased:] += row_bias
    if activation is Activation.SILU_GATE:
        gate, up = product.chunk(2, dim=-1)
        product = F.silu(gate) * up
    layer = kernels.linear(weight, bias, activation=activation)
    assert error(layer(x, row_bias), product) < 5e-3
    if activation is Activation.NONE:
        total = numbers(*product.shape, seed=4)
        expected = total.float() + product
        layer.add_to(total, x, row_bias)
        assert error(total, expected) < 5e-3


@needs_native
@cases("quantization", [None, INT8, INT4])
def test_row_bias_does_not_change_other_rows(native, quantization):
    layer = native.linear(numbers(96, 260) / 8, activation=Activation.SILU_GATE, quantization=quantization)
    x, row_bias = numbers(60, 260, seed=1), numbers(20, 96, seed=2).float()
    whole, plain = layer(x, row_bias), layer(x)
    assert torch.equal(whole[:40], plain[:40])
    assert torch.equal(layer(x[50:], row_bias[10:]), whole[50:])
    assert not torch.equal(whole[40:], plain[40:])


def test_fp32_output_and_strided_rows(kernels):
    weight, x = numbers(70, 64), numbers(29, 128, seed=1)[:, :64]
    found = kernels.linear(weight, fp32_output=True)(x)
    assert found.dtype == torch.float32
    assert error(found, F.linear(x.float(), weight.float())) < (1e-6 if kernels.supports_int8 else 5e-3)


@needs_native
@cases("shape", SHAPES)
def test_int8_linear_is_close(native, shape):
    weight, bias = numbers(*shape) / 8, numbers(shape[0], seed=1)
    layer = native.linear(weight, bias, quantization=INT8)
    for rows in ROWS:
        x = numbers(rows, shape[1], seed=2)
        assert error(layer(x), F.linear(x.float(), weight.float(), bias.float())) < 1.5e-2


@needs_native
def test_int8_outlier_input_affects_only_its_block(native):
    weight, x = numbers(64, 512) / 8, numbers(7, 512, seed=1)
    x[:, 3] *= 300
    weight[:, :128] = 0
    assert error(native.linear(weight, quantization=INT8)(x), F.linear(x.float(), weight.float())) < 1.5e-2


@needs_native
def test_int8_of_zeros_is_zero(native):
    layer = native.linear(torch.zeros(64, 128).bfloat16(), quantization=INT8)
    assert not layer(numbers(3, 128)).any()
    assert not native.linear(numbers(64, 128), quantization=INT8)(torch.zeros(3, 128).bfloat16()).any()


def full_argmax(head, x):
    """Return the first index of each row's largest logit."""
    logits = head(x).numpy()
    return torch.from_numpy(logits.argmax(axis=1))


@needs_native
@pytest.mark.parametrize("quantization", [None, INT8, INT4, "codes"])
@pytest.mark.parametrize("activation", [Activation.NONE, Activation.SILU_GATE])
def test_weights_packed_in_blocks(native, activation, quantization, monkeypatch):
    weight, x = numbers(230, 256) / 8, numbers(3, 256, seed=1)

    def outputs():
        if quantization == "codes":
            codes, scales = int8_codes(weight)
            stored = QuantizedWeight(
                (codes.int() + 128).to(torch.uint8), scales, torch.full((230, 1), 128, dtype=torch.int16), 256, bits=8
            )
            layer = native.linear_quantized(stored, dtype=torch.bfloat16, activation=activation)
        else:
            layer = native.linear(weight, activation=activation, quantization=quantization)
        return layer(x)

    together = outputs()
    monkeypatch.setattr(native_linear, "BLOCK_WEIGHTS", 2 * native_linear.PANEL * 256)
    assert torch.equal(outputs(), together)


@needs_native
def test_head_packed_in_blocks(native, monkeypatch):
    monkeypatch.setattr(native_linear, "BLOCK_WEIGHTS", 1)
    head, x = native.head(numbers(230, 64) / 8), numbers(5, 64, seed=1)
    assert torch.equal(head.argmax(x), full_argmax(head, x))


@needs_native
@cases("shape", [(4096, 64), (5001, 260), (8010, 896)])
def test_argmax_equals_full_argmax(native, shape):
    head = native.head(numbers(*shape) / 8)
    for rows in (1, 5, 12, 13, 29):
        x = numbers(rows, 2 * shape[1], seed=rows)[:, : shape[1]]
        assert torch.equal(head.argmax(x), full_argmax(head, x))


@needs_native
@cases("apart", [0, 2**-8, 2**-6])
def test_argmax_of_rows_equal_in_int8(native, apart):
    """A hundred weight rows are equal, or differ only by the rounding of a few inputs."""
    weight = numbers(8192, 128) / 8
    weight[3000:3100] = 4 * weight[3000]
    weight[3000:3100] *= 1 + apart * (torch.rand(100, 128, generator=torch.Generator().manual_seed(1)) > 0.9)
    head, x = native.head(weight), numbers(12, 128, seed=2)
    x[:6] = weight[3000] * 10 + x[:6] / 10
    best = head.argmax(x)
    assert torch.equal(best, full_argmax(head, x))
    assert ((best >= 3000) & (best < 3100)).sum() >= 6
    assert apart or 3000 in best  # the first of equal rows


INPUTS = 256


@needs_native
def test_argmax_with_weights_all_rounded_down(native):
    """Each by nearly half a step in the direction of the activations, which int8 represents exactly."""
    weight, x = numbers(4096, INPUTS) / 100, numbers(1, INPUTS, seed=1).sign()
    weight[100] = 0.4375 * x[0]
    weight[2000] = torch.where(torch.arange(INPUTS) % 10 < 3, x[0], 0)
    weight[[100, 2000], 0] = 127 * x[0, 0]  # so that a step is 1, and the first row rounds to 0
    head = native.head(weight)
    assert full_argmax(head, x).item() == head.argmax(x).item() == 100


@needs_native
def test_argmax_with_activations_all_rounded_down(native):
    """Each by nearly half a step in the direction of the weights, which int8 represents exactly."""
    weight, x = numbers(4096, INPUTS) / 100, torch.zeros(1, INPUTS).bfloat16()
    weight[100] = numbers(INPUTS, seed=1).sign()
    x[0] = 0.4375 * weight[100]
    x[0, ::128] = 127  # so that a step is 1, and the others round to 0
    weight[100, ::128] = weight[2000] = 0
    weight[2000, 0] = 0.3 * INPUTS / 127
    head = native.head(weight)
    assert full_argmax(head, x).item() == head.argmax(x).item() == 100


@needs_native
def test_argmax_is_first_of_equals_despite_larger_later_bound(native):
    weight, x = numbers(4096, INPUTS) / 100, numbers(1, INPUTS, seed=1)
    weight[100] = weight[3000] = x[0]
    weight[3001, ::2] = 128 * x[0, 1::2]
    weight[3001, 1::2] = -128 * x[0, ::2]  # orthogonal to x, with a large norm
    head = native.head(weight)
    assert full_argmax(head, x).item() == head.argmax(x).item() == 100


@needs_native
def test_argmax_of_negative_logits_with_partial_panel(native):
    weight = -numbers(4100, 64).abs() - 1
    weight[4096:] /= 2
    head, x = native.head(weight), numbers(9, 64).abs() + 0.5
    assert head(x).max() < 0
    assert torch.equal(head.argmax(x), full_argmax(head, x))


@needs_native
def test_argmax_with_outlier_inputs(native):
    weight, x = numbers(8192, 512) / 8, numbers(7, 512, seed=1)
    x[:, 3] *= 30
    x[2, 400:] *= 1000
    head = native.head(weight)
    assert torch.equal(head.argmax(x), full_argmax(head, x))


@needs_native
def test_argmax_is_none_for_equal_or_nonfinite_logits(native):
    weight, x = numbers(4096, 64) / 8, numbers(3, 64, seed=1)
    assert native.head(weight).argmax(torch.zeros_like(x)) is None
    assert native.head(numbers(1, 64).repeat(4096, 1)).argmax(x) is None
    for value in (math.nan, math.inf, 1e30):
        nonfinite = x.clone()
        nonfinite[1, 5] = value
        assert native.head(weight).argmax(nonfinite) is None
        nonfinite = weight.clone()
        nonfinite[4000, 7] = value
        assert native.head(nonfinite).argmax(x) is None


@needs_native
def test_argmax_screening_backs_off_after_failures(native):
    head, x = native.head(numbers(4096, 64) / 8), numbers(3, 64, seed=1)

    def steps_until_next_attempt():
        return next(steps for steps in range(1, 1000) if head.argmax(x) is not None)

    for vain, steps in ((0, 1), (1, 2), (3, 4), (7, 8), (63, 64), (127, 64)):
        assert [head.argmax(torch.zeros_like(x)) for _ in range(vain)] == [None] * vain
        assert steps_until_next_attempt() == steps
        assert steps_until_next_attempt() == 1


@needs_native
@cases("count", [1, 96, 128, 1000])
@cases("number", [0.0, 0.25, 0.999, 1 - 2.0**-52])
def test_sampled_token_is_first_above_cumulative_weight(native, count, number):
    logits = 4 * numbers(9, count).float()
    logits[:3, : count // 2] = -torch.inf  # whole blocks without weight
    logits[2:5, count // 2 + 1 :] = -torch.inf
    temperatures = torch.linspace(0.25, 2, 9)
    lower_bounds = torch.full((9,), -torch.inf)
    lower_bounds[4:] = (logits / temperatures[:, None]).median(dim=1).values[4:]
    max_differences = torch.tensor([math.inf, 1.5, 3.0]).repeat(3)
    uniforms = torch.full((9,), number, dtype=torch.float64)
    options = {"lower_bounds": lower_bounds, "max_differences": max_differences, "uniforms": uniforms}
    sampled = native.sample_tokens(logits, torch.arange(9), temperatures, **options)
    quotients = logits / temperatures[:, None]
    largest = quotients.amax(dim=1, keepdim=True)
    weights = (quotients - largest).double().exp()
    weights[quotients < lower_bounds[:, None]] = 0
    weights[quotients < largest - max_differences[:, None]] = 0
    cumulative = weights.cumsum(dim=1)
    assert torch.allclose(sampled.totals, cumulative[:, -1], rtol=1e-5)
    for row, token in enumerate(sampled.ids.tolist()):
        assert weights[row, token] > 0
        point, slack = number * cumulative[row, -1], 1e-5 * cumulative[row, -1]
        assert cumulative[row, token] > point - slack
        assert token == 0 or cumulative[row, token - 1] <= point + slack


@needs_native
def test_sampled_token_does_not_depend_on_other_rows(native):
    logits = numbers(9, 1000).float()
    options = {
        "temperatures": torch.linspace(0.25, 2, 9),
        "lower_bounds": torch.linspace(-3, 0, 9),
        "max_differences": torch.linspace(0, 9, 9),
        "uniforms": torch.linspace(0, 0.9, 9, dtype=torch.float64),
    }
    together = native.sample_tokens(logits, torch.arange(9), **options)
    for row in range(9):
        own = {name: option[[row]] for name, option in options.items()}
        alone = native.sample_tokens(logits, torch.tensor([row]), **own)
        assert (alone.ids, alone.totals) == (together.ids[[row]], together.totals[[row]])


@needs_native
@cases("value", [math.nan, math.inf])
def test_total_of_nonfinite_logits_is_not_finite(native, value):
    logits = torch.zeros(3, 200)
    logits[1, 150] = value
    options = {"lower_bounds": torch.full((3,), -torch.inf), "uniforms": torch.full((3,), 0.5, dtype=torch.float64)}
    for maximum in (math.inf, 2.0):
        options["max_differences"] = torch.full((3,), maximum)
        sampled = native.sample_tokens(logits, torch.arange(3), torch.ones(3), **options)
        assert sampled.totals.isfinite().tolist() == [True, False, True]
    assert (sampled.ids >= 0).all()
    assert (sampled.ids < 200).all()


def test_head_without_screening_has_no_argmax(kernels):
    weight, x = numbers(70, 66), numbers(5, 66, seed=1)  # 66 inputs are left to PyTorch
    head = kernels.head(weight)
    assert head.argmax(x) is None
    assert error(head(x), F.linear(x.float(), weight.float())) < 5e-3


@needs_native
@cases(("shape", "quantization"), [((4096, 64), INT8), ((70, 96), INT8), ((4096, 64), INT4)])
def test_quantized_head_finds_argmax(native, shape, quantization):
    weight, x = numbers(*shape), numbers(5, shape[1], seed=1)
    weight[3] = weight[-1]
    head = native.head(weight, quantization=quantization)
    x[2] = weight[3]
    assert head.argmax(x)[2] == 3
    assert torch.equal(head.argmax(x), full_argmax(head, x))
    assert head.argmax(x[:0]).tolist() == []


@needs_native
@cases(
    ("values", "expected"),
    [
        ({}, 0),
        ({7: 1, 299: 1}, 7),
        ({0: -1, 128: 2, 299: 2}, 128),
        (dict.fromkeys(range(299), -math.inf), 299),
        (dict.fromkeys(range(300), -math.inf), None),
        ({5: math.inf}, None),
        ({5: math.nan, 6: 1}, None),
        ({299: math.nan}, None),
    ],
)
def test_argmax_of_layer(native, values, expected):
    weight = torch.zeros(300, 4).bfloat16()
    for output, value in values.items():
        weight[output, 0] = value
    found = native.linear(weight, fp32_output=True).argmax(torch.tensor([[1.0, 0, 0, 0]]).bfloat16())
    assert found is None if expected is None else found.tolist() == [expected]


@needs_native
@cases(("quantization", "inputs"), [(None, 260), (None, 1380), (INT8, 260), (INT4, 260)])
@cases("activation", [Activation.NONE, Activation.GELU])
def test_row_is_bit_exact_in_any_batch(native, activation, quantization, inputs):
    layer = native.linear(numbers(70, inputs) / 4, activation=activation, quantization=quantization)
    x = numbers(200, inputs, seed=1)
    whole = layer(x)
    for rows in (0, 1, 2, 7, 12, 13, 30, 33, 48, 100, 130, 199):
        assert torch.equal(layer(x[:rows]), whole[:rows])


def bits(*tensors):
    return [tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16) for tensor in tensors]


@needs_amx
@cases("rows", [1, 2, 16, 17, 32, 33, 48, 100, 130])
@cases("inputs", [64, 260, 1380])  # whole steps, a partial step, more than one block
def test_tile_instructions_equal_portable_tiles(rows, inputs):
    weight, x = numbers(100, inputs) / 8, numbers(rows, inputs, seed=1)
    x[0, :40] *= 2.0**-120  # denormal products, and sums of them
    weight[3, :] *= 2.0**-20
    weight[5, 1] = x[0, 3] = 2.0**-130  # denormal numbers
    precise = [{"fp32_output": True, "quantization": quantization} for quantization in (None, INT8, INT4)]
    for options in (*precise, {"activation": Activation.SILU_GATE}):
        found, expected = (load_kernels(variant).linear(weight, **options)(x) for variant in (AMX, PORTABLE_TILES))
        assert torch.equal(*bits(found, expected))


@needs_amx
@pytest.mark.parametrize("tokens", [1, 20, 90])
def test_attention_by_tile_instructions_equals_portable_tiles(tokens):
    q, (k, v) = numbers(tokens, 6, 80), numbers(4, 700, 80, seed=1).split(2)
    spans = KVSpans([KVSpan(0, tokens, 10, 600, 600 - tokens)])
    found, expected = (load_kernels(variant).attend(q, k, v, spans) for variant in (AMX, PORTABLE_TILES))
    assert torch.equal(*bits(found, expected))
    cache, _ = int8_cache(700, 80)
    found, expected = (load_kernels(variant).attend_int8(q, cache, spans) for variant in (AMX, PORTABLE_TILES))
    assert torch.equal(*bits(found, expected))


@needs_avx512
@cases("variant", [PORTABLE_TILES, AVX2, AVX512_VNNI])
@cases("quantization", [INT8, INT4])
def test_variants_are_equal_for_8_and_4_bits(variant, quantization):
    """They pack the same weights, and multiply them with the same results, also in blocks of rows of all sizes."""
    weight, x = numbers(70, 260) / 8, numbers(220, 260, seed=1)
    weight[5, :] = weight.max() * x[0].sign()  # the largest sums
    x[1] = 1  # the largest activations
    found, expected = (
        load_kernels(each).linear(weight, quantization=quantization, fp32_output=True) for each in (variant, AVX512)
    )
    assert torch.equal(found.packed.weights, expected.packed.weights)
    assert torch.equal(found.packed.scales, expected.packed.scales)
    for rows in (1, 2, 3, 4, 5, 7, 40, 220):
        assert torch.equal(found(x[:rows]), expected(x[:rows])), rows


@needs_avx512
def test_argmax_by_vnni_instructions_of_avx2_variant():
    native, x = load_kernels(AVX512_VNNI), numbers(13, 260, seed=1)
    head = native.head(numbers(5001, 260) / 8)
    assert torch.equal(head.argmax(x), full_argmax(head, x))


def test_unavailable_kernels_are_rejected_by_name(monkeypatch):
    config = EngineConfig(cpu_kernels="amx")
    monkeypatch.setattr(native_module, "cpu_flags", frozenset)
    load_variant.cache_clear()
    try:
        with pytest.raises(
            ConfigError, match=r"`cpu_kernels` 'amx' cannot be used: this CPU has no avx512_bf16"
        ) as caught:
            choose_kernels("cpu", torch.bfloat16, config)
    finally:
        load_variant.cache_clear()
    assert caught.value.param == "cpu_kernels"


class Uncompressed(NativeLinear):
    """A linear layer that keeps 16-bit weights even where 12 bits suffice."""

    def _pack(self, weight, gated, bits):
        return PackedWeights(*weight.shape, self._panels(weight, gated))


def uncompressed(native, weight, activation=Activation.NONE):
    return Uncompressed(native._library, weight, None, activation, fp32_output=activation is Activation.NONE)


def weights_with_outliers(outputs, inputs):
    """Return weights with far smaller and larger outliers, some of them adjacent, in the first and last columns."""
    weight = numbers(outputs, inputs) / 16
    bits = weight.view(torch.int16)
    for number, column in enumerate([0, 1, 2, 3, 4, inputs - 1]):
        for row in (0, 1, 17, 31, outputs - 1):
            bits[row, column] = (3 + 7 * number + row) << 7 | 0x55
    weight[5, 8:12] = torch.tensor([-0.0, 1e30, -1e30, 2e-38]).bfloat16()
    return weight


def is_compressed(layer):
    return layer.matrix.codes is not None


@needs_native
@cases("shape", [(96, 256), (33, 1028)])
@cases("many", [False, True])
def test_compression_to_12_bits_is_lossless(native, shape, many):
    weight = weights_with_outliers(*shape)
    layer = native.linear(weight, fp32_output=True)
    assert is_compressed(layer)
    inputs = torch.eye(shape[1]).bfloat16()
    found = layer(inputs) if many else torch.cat([layer(part) for part in inputs.split(9)])
    assert torch.equal(found, weight.T.float())


def decompressed(layer):
    """Return the bits of the panels of `layer`, decoded from its codes."""
    panels = layer.packed.weights.numpy().reshape(-(-layer.columns // 32), layer.inputs // 4, 3, 64)
    heads = layer.packed.codes.numpy().reshape(len(panels), -1)
    low, pairs = panels[:, :, :2], panels[:, :, 2]
    high = np.stack([heads[np.arange(len(panels))[:, None, None], code] for code in (pairs & 15, pairs >> 4)], axis=2)
    for panel, head in enumerate(heads):
        strays = head[16:].view([("group", "<u4"), ("place", "u1"), ("high", "u1"), ("", "<u2")])
        for group, place, byte, _ in strays[: strays["group"].tolist().index(2**32 - 1)]:
            high[panel, group, place // 64, place % 64] = byte
    both = high.astype(np.uint16) << 8 | low
    return both.reshape(*both.shape[:3], 4, 2, 8).transpose(0, 1, 2, 4, 3, 5).reshape(-1)


@needs_native
def test_compression_keeps_nan_and_signed_zero(native):
    weight = numbers(50, 4096) / 16
    odd = torch.arange(256).repeat(2) << 8 | torch.arange(512) % 251
    weight[torch.arange(512) % 50, 8 * torch.arange(512)] = odd.to(torch.uint16).view(torch.bfloat16)
    layer = native.linear(weight)
    assert is_compressed(layer)
    assert np.array_equal(decompressed(layer), layer._panels(weight, False).view(torch.int16).numpy().view(np.uint16))


@needs_native
@cases("rows", [*range(1, 14), 24, 25, 72, 73, 80, 192, 193, 500])
def test_compressed_linear_is_bit_exact(native, rows):
    weight, x = numbers(70, 260) / 8, numbers(rows, 260, seed=1)
    layer = native.linear(weight, fp32_output=True)
    assert is_compressed(layer)
    assert torch.equal(layer(x), uncompressed(native, weight)(x))


@needs_native
def test_threads_do_not_overwrite_each_others_panels(native):
    weight, x = numbers(3200, 512) / 8, numbers(96, 512, seed=1)
    expected, before = uncompressed(native, weight)(x), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert torch.equal(native.linear(weight, fp32_output=True)(x), expected)
    finally:
        torch.set_num_threads(before)


@needs_native
def test_compressed_gated_linear_with_strided_rows(native):
    weight, x = numbers(2 * 48, 256) / 8, numbers(90, 300, seed=1)[:, :256]
    layer = native.linear(weight, activation=Activation.SILU_GATE)
    assert is_compressed(layer)
    assert torch.equal(layer(x), uncompressed(native, weight, Activation.SILU_GATE)(x))


@needs_native
def test_weights_of_every_magnitude_stay_uncompressed(native):
    bits = torch.randint(0x0080, 0x5F00, (64, 128), generator=torch.Generator().manual_seed(0))
    weight = bits.to(torch.int16).view(torch.bfloat16)
    layer = native.linear(weight, fp32_output=True)
    assert not is_compressed(layer)
    assert torch.equal(layer(torch.eye(128).bfloat16()), weight.T.float())
    assert (
        layer.workspace_bytes(100) == native.linear(numbers(64, 128)).workspace_bytes(100) > 0
    )  # all layers share the first one's workspace


@needs_native
def test_panel_with_too_many_outliers_stays_uncompressed(native):
    weight = numbers(96, 256) / 16
    weight[40, ::2] = (2.0 ** torch.arange(-64, 64)).bfloat16()
    layer = native.linear(weight, fp32_output=True)
    assert not is_compressed(layer)
    assert torch.equal(layer(torch.eye(256).bfloat16()), weight.T.float())


@needs_native
def test_argmax_with_uncompressed_weights(native):
    weight, x = numbers(4096, 64), numbers(9, 64, seed=1)
    weight[7, :] = 2.0 ** torch.arange(-32, 32)
    head = native.head(weight)
    assert not is_compressed(head)
    assert torch.equal(head.argmax(x), full_argmax(head, x))


@cases("columns", [64, 70, 100])
def test_norms(kernels, columns):
    x, weight, bias = numbers(40, 2 * columns)[:, :columns] + 1, numbers(columns, seed=1), numbers(columns, seed=2)
    layer = F.layer_norm(x.float(), (columns,), weight.float(), bias.float(), 1e-6)
    assert error(kernels.norm(x, weight, bias, 1e-6), layer) < 5e-3
    root = F.rms_norm(x.float(), (columns,), weight.float(), 1e-6)
    assert error(kernels.norm(x, weight, None, 1e-6), root) < 5e-3


@cases("width", [8, 64, 80, 128, 256])
def test_rotation_equals_transformers(kernels, width):
    x, angles = numbers(30, 6, width), torch.randn(30, width // 2)
    cos, sin = (torch.cat((table, table), dim=-1) for table in (angles.cos(), angles.sin()))
    query, key = apply_rotary_pos_emb_vision(x[:, :2].float(), x[:, 2:4].float(), cos, sin)
    untouched = x[:, 4:].clone()
    kernels.rotate_(x[:, :4], angles.cos(), angles.sin())
    assert error(x[:, :4], torch.cat((query, key), dim=1)) < 5e-3
    assert torch.equal(x[:, 4:], untouched)


def attention(q, k, v, spans):
    """Compute attention by its formula, one span and head at a time."""
    rows, heads, width = q.shape
    out = torch.zeros(rows, heads, width)
    for span in spans:
        queries, keys = (
            slice(span.first_query, span.first_query + span.num_queries),
            slice(span.first_key, span.first_key + span.num_keys),
        )
        hidden = (
            torch.ones(span.num_queries, span.num_keys).triu(span.start + 1) > 0
            if span.start >= 0
            else torch.tensor(False)
        )
        for head in range(heads):
            shared = head * len(k) // heads
            scores = q[queries, head].float() @ k[shared, keys].float().T / math.sqrt(width)
            weights = scores.masked_fill(hidden, -math.inf).softmax(1)
            out[queries, head] = weights @ v[shared, keys].float()
    return out.flatten(1)


@cases("width", [6, 8, 40, 64, 80, 128])
def test_attention_within_frames(kernels, width):
    q, k, v = numbers(100, 3, 4, width).unbind(1)
    spans = [KVSpan(0, 36, 0, 36), KVSpan(36, 36, 36, 36), KVSpan(72, 28, 72, 28)]
    found = kernels.attend(q, k.transpose(0, 1), v.transpose(0, 1), KVSpans(spans))
    assert error(found, attention(q, k.transpose(0, 1), v.transpose(0, 1), spans)) < 1e-2


@needs_native
def test_attention_is_bit_exact_in_tasks_of_many_and_few_queries(native):
    """With all heads, there are enough tasks of many queries; with a single one, tasks have fewer."""
    q, k, v = numbers(1100, 3, 16, 32).unbind(1)
    k, v, spans = k.transpose(0, 1), v.transpose(0, 1), KVSpans([KVSpan(0, 100, 0, 100), KVSpan(100, 1000, 100, 1000)])
    whole = native.attend(q, k, v, spans).view(1100, 16, 32)
    for head in range(16):
        one = slice(head, head + 1)
        assert torch.equal(native.attend(q[:, one], k[one], v[one], spans), whole[:, head])


CAUSAL = [
    KVSpan(0, 50, 0, 50, 0),
    KVSpan(50, 1, 100, 700, 699),
    KVSpan(51, 30, 1000, 1100, 1070),
    KVSpan(81, 1, 2200, 1, 0),
]


@cases(("heads", "width"), [(14, 64), (2, 128), (12, 8), (8, 256)])
def test_causal_attention_of_many_requests(kernels, heads, width):
    q, (k, v) = numbers(82, heads, width), numbers(4, 2300, width, seed=1).split(2)
    found = kernels.attend(q, k, v, KVSpans(CAUSAL))
    assert error(found, attention(q, k, v, CAUSAL)) < 1e-2


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize(("heads", "width"), [(14, 64), (24, 128), (8, 40), (2, 8)])
def test_attention_is_bit_exact_alone_and_in_chunks(native, heads, width):
    q, (k, v) = numbers(600, heads, width), numbers(4, 700, width, seed=1).split(2)
    whole = native.attend(q, k, v, KVSpans([KVSpan(0, 600, 50, 600, 0)]))
    for start, stop in [(0, 1), (0, 513), (33, 34), (513, 600), (544, 545), (598, 599), (599, 600)]:
        chunk = native.attend(q[start:stop], k, v, KVSpans([KVSpan(0, stop - start, 50, stop, start)]))
        assert torch.equal(chunk, whole[start:stop])


@needs_native
@cases("span", [KVSpan(0, 20, 100, 60, 40), KVSpan(0, 1, 100, 60, 59), KVSpan(0, 1, 100, 33, 32)])
def test_attention_ignores_rows_outside_span(native, span):
    """Unwritten rows of the pool may contain anything."""
    q, pool = numbers(span.num_queries, 4, 64), numbers(4, 300, 64, seed=1)
    spans = KVSpans([span])
    k, v = pool.split(2)
    clean = native.attend(q, k, v, spans)
    pool[:, :100] = pool[:, 100 + span.num_keys :] = torch.nan
    assert torch.equal(native.attend(q, k, v, spans), clean)


def test_quantized_rows_are_within_half_a_step():
    rows = numbers(3, 50, 64)
    rows[0, 0] = 0
    rows[1, 1, 5] = -1000
    rows[2, 2] = 2.0**-130
    quantized, scales = quantize_rows(rows)
    assert quantized.dtype == torch.int8
    assert scales.shape == (3, 50)
    assert not quantized[0, 0].any()
    assert quantized[1, 1, 5] == -127
    assert ((quantized * scales[..., None] - rows).abs() <= scales[..., None] * 0.501 + 2.0**-126).all()


def int8_cache(rows, head_dim, *, heads=4, seed=1):
    """Return keys and values in 8 bits, whose magnitudes differ by up to 32 times, and what they represent."""
    exponents = torch.randint(-2, 4, (heads, rows, 1), generator=torch.Generator().manual_seed(seed))
    quantized, scales = quantize_rows(numbers(heads, rows, head_dim, seed=seed) * 2.0**exponents)
    return KVCacheLayer(quantized, scales), quantized * scales[..., None]


@cases(("heads", "width"), [(14, 64), (2, 128), (12, 8), (6, 40), (8, 256)])
def test_attention_to_int8_cache(kernels, heads, width):
    q, (cache, plain) = numbers(82, heads, width) / 2, int8_cache(2300, width)
    found = attend_cached(kernels, q, cache, KVSpans(CAUSAL))
    assert error(found, attention(q, *plain.chunk(2), CAUSAL)) < 1e-2


def test_attention_to_cache_in_another_dtype():
    q, pool = numbers(82, 14, 64).float(), numbers(4, 2300, 64, seed=1)
    found = attend_cached(TorchKernels("cpu"), q, KVCacheLayer(pool), KVSpans(CAUSAL))
    assert error(found, attention(q, *pool.chunk(2), CAUSAL)) < 1e-5


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize(("heads", "width"), [(14, 64), (24, 128), (8, 40), (2, 8)])
def test_attention_to_int8_cache_is_bit_exact_alone_and_in_chunks(native, heads, width):
    q, (cache, _) = numbers(600, heads, width), int8_cache(700, width)
    whole = native.attend_int8(q, cache, KVSpans([KVSpan(0, 600, 50, 600, 0)]))
    for start, stop in [(0, 1), (0, 513), (33, 34), (513, 600), (544, 545), (598, 599), (599, 600)]:
        chunk = native.attend_int8(q[start:stop], cache, KVSpans([KVSpan(0, stop - start, 50, stop, start)]))
        assert torch.equal(chunk, whole[start:stop])


@needs_native
@cases("span", [KVSpan(0, 20, 100, 60, 40), KVSpan(0, 1, 100, 60, 59), KVSpan(0, 1, 100, 33, 32)])
def test_attention_to_int8_cache_ignores_rows_outside_span(native, span):
    q, (cache, _), spans = numbers(span.num_queries, 4, 64), int8_cache(300, 64), KVSpans([span])
    clean = native.attend_int8(q, cache, spans)
    for rows in (slice(0, 100), slice(100 + span.num_keys, 300)):
        cache.rows[:, rows] = -128
        cache.scales[:, rows] = torch.nan
    assert torch.equal(native.attend_int8(q, cache, spans), clean)


@needs_native
def test_int8_cache_propagates_nonfinite_scales(native):
    q, (cache, _) = numbers(3, 4, 64), int8_cache(10, 64)
    cache.scales[0, 4] = torch.nan
    found = native.attend_int8(q, cache, KVSpans([KVSpan(0, 1, 0, 4, 3), KVSpan(1, 2, 0, 10, 8)])).view(3, 4, 64)
    assert found[0].isfinite().all()
    assert not found[1:, :2].isfinite().any()
    assert found[1:, 2:].isfinite().all()


SHAPE = DecoderShape(heads=6, kv_heads=2, head_dim=40, eps=1e-6)
HIDDEN, INNER = 96, 328  # wider than all heads, and not a multiple of a panel


def decoder_layer(kernels, number, *, quantization=None):
    def linear(outputs, inputs, seed, **options):
        weight = numbers(outputs, inputs, seed=10 * number + seed) / 8
        return kernels.linear(weight, quantization=quantization, **options)

    heads, keys = SHAPE.heads * SHAPE.head_dim, 2 * SHAPE.kv_heads * SHAPE.head_dim
    return DecoderLayer(
        input_norm=Norm(numbers(HIDDEN, seed=1)),
        mixer=Attention(
            qkv=linear(heads + keys, HIDDEN, 2, bias=numbers(heads + keys, seed=3)),
            output=linear(HIDDEN, heads, 4),
        ),
        mlp_norm=Norm(numbers(HIDDEN, seed=5)),
        mlp=Mlp(
            gate_up=linear(2 * INNER, HIDDEN, 6, activation=Activation.SILU_GATE),
            down=linear(HIDDEN, INNER, 7),
        ),
    )


def forward_batch(cache):
    """Return a batch of the last chunk of a 240-token prompt, a decode step, and a chunk of an unfinished prompt."""
    spans = [KVSpan(0, 230, 0, 240, 10), KVSpan(230, 1, 260, 17, 16), KVSpan(231, 20, 280, 20, 0)]
    slots = torch.tensor([span.first_key + span.start + i for span in spans for i in range(span.num_queries)])
    angles = torch.randn(251, SHAPE.head_dim // 2, generator=torch.Generator().manual_seed(8))
    last_spans = KVSpans([KVSpan(0, 1, 0, 240, 239), KVSpan(1, 1, 260, 17, 16)])
    return ForwardBatch(angles.cos(), angles.sin(), slots, KVSpans(spans), torch.tensor([229, 230]), last_spans, cache)


@needs_native
@cases("quantizations", [(None, None), (INT8, INT8), (INT4, INT4), (INT8, INT4)])
def test_fused_layers_are_bit_exact_with_reference_layers(native, quantizations):
    """Layers that need workspaces of different sizes share one."""
    layers = [decoder_layer(native, number, quantization=quantizations[number > 0]) for number in range(3)]
    whole, parts = native.decoder_layers(layers, SHAPE), ReferenceDecoderLayers(native, layers, SHAPE)
    assert type(whole) is not type(parts)
    x, caches = numbers(251, HIDDEN), [numbers(3, 2 * SHAPE.kv_heads, 320, SHAPE.head_dim, seed=9) for _ in range(2)]
    found, expected = (run(x.clone(), forward_batch(cache)) for run, cache in zip((whole, parts), caches, strict=True))
    assert torch.equal(found, expected)
    assert torch.equal(*caches)
    assert not torch.equal(caches[0], numbers(*caches[0].shape, seed=9))


def int8_batch():
    """Return a batch with an int8 cache of three layers, which already has keys and values."""
    quantized, scales = quantize_rows(numbers(3, 2 * SHAPE.kv_heads, 320, SHAPE.head_dim, seed=9))
    return forward_batch(quantized)._replace(cache_scales=scales)


@needs_native
@cases("value", [1, math.nan])
def test_fused_layers_with_int8_cache_are_bit_exact_with_reference_layers(native, value):
    """The C kernels also quantize keys and values like PyTorch."""
    layers = [decoder_layer(native, number) for number in range(3)]
    batches = [int8_batch(), int8_batch()]
    whole, parts = native.decoder_layers(layers, SHAPE), ReferenceDecoderLayers(native, layers, SHAPE)
    x = numbers(251, HIDDEN)
    x[3, 0] = value
    found, expected = (run(x.clone(), batch) for run, batch in zip((whole, parts), batches, strict=True))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(*(batch.cache for batch in batches))
    torch.testing.assert_close(*(batch.cache_scales for batch in batches), rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(batches[0].cache, int8_batch().cache)


@needs_native
def test_int8_cache_is_close_to_bfloat16_cache(native):
    layers = [decoder_layer(native, number) for number in range(3)]
    run = native.decoder_layers(layers, SHAPE)
    found = run(numbers(251, HIDDEN), int8_batch())
    expected = run(numbers(251, HIDDEN), forward_batch(numbers(3, 2 * SHAPE.kv_heads, 320, SHAPE.head_dim, seed=9)))
    assert 0 < error(found, expected.float()) < 3e-2


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("levels", [0, 1, 2])
def test_fused_layers_with_head_norms_and_additions_are_bit_exact(native, levels):
    norms = {"query_norm": Norm(numbers(SHAPE.head_dim, seed=11)), "key_norm": Norm(numbers(SHAPE.head_dim, seed=12))}
    layers = [decoder_layer(native, number) for number in range(3)]
    layers = [layer._replace(mixer=layer.mixer._replace(**norms)) for layer in layers]
    whole, parts = native.decoder_layers(layers, SHAPE), ReferenceDecoderLayers(native, layers, SHAPE)
    assert type(whole) is not type(parts)
    rows = torch.tensor([0, 3, 100, 229, 230, 250])
    values = numbers(len(rows), max(levels, 1), HIDDEN, seed=13).transpose(0, 1)
    results = []
    for run, additions in ((whole, Additions(rows, values)), (parts, Additions(rows, values)), (whole, None)):
        cache = numbers(3, 2 * SHAPE.kv_heads, 320, SHAPE.head_dim, seed=9)
        batch = forward_batch(cache)._replace(additions=additions if levels else None)
        results.append((run(numbers(251, HIDDEN), batch), cache))
    (found, cache), (expected, expected_cache), (without, _) = results
    assert torch.equal(found, expected)
    assert torch.equal(cache, expected_cache)
    assert torch.equal(found, without) == (levels == 0)


def lora_layers(kernels, count, *, seed, rank=8):
    """Return an adapter that changes some projections of `count` layers, and none of the last but one."""
    heads, keys = SHAPE.heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim

    def low_rank(inputs, outputs, changed, seed):
        starts = [sum(outputs[:part]) for part in changed]
        parts = [
            LowRankPart(
                kernels.linear(numbers(outputs[part], rank, seed=seed + part) / 4, fp32_output=True),
                index * rank,
                rank,
                starts[index],
                outputs[part],
            )
            for index, part in enumerate(changed)
        ]
        return LowRank(kernels.linear(numbers(len(parts) * rank, inputs, seed=seed) / 4), tuple(parts), sum(outputs))

    layers = [
        LoraLayer(
            low_rank(HIDDEN, (heads, keys, keys), (0, 2), seed + 10 * number),
            low_rank(heads, (HIDDEN,), (0,), seed + 10 * number + 3) if number else None,
            low_rank(HIDDEN, (INNER, INNER), (0, 1) if number else (1,), seed + 10 * number + 4),
            low_rank(INNER, (HIDDEN,), (0,), seed + 10 * number + 6),
        )
        for number in range(count)
    ]
    layers[-2] = LoraLayer()
    return LoraLayers(layers)


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("quantization", [None, INT8, INT4])
def test_fused_layers_with_lora_are_bit_exact_with_reference_layers(native, quantization):
    layers = [decoder_layer(native, number, quantization=quantization) for number in range(3)]
    loras = [lora_layers(native, 3, seed=seed, rank=rank) for seed, rank in ((100, 8), (200, 20))]
    rows = (LoraRows(loras[0], 230, 231, 1, 2), LoraRows(loras[1], 231, 251, 2, 2))
    results = []
    for run, adapted in (
        (native.decoder_layers(layers, SHAPE), rows),
        (ReferenceDecoderLayers(native, layers, SHAPE), rows),
        (native.decoder_layers(layers, SHAPE), ()),
    ):
        cache = numbers(3, 2 * SHAPE.kv_heads, 320, SHAPE.head_dim, seed=9)
        results.append((run(numbers(251, HIDDEN), forward_batch(cache)._replace(loras=adapted)), cache))
    (found, cache), (expected, expected_cache), (plain, plain_cache) = results
    assert torch.equal(found, expected)
    assert torch.equal(cache, expected_cache)
    assert torch.equal(found[0], plain[0])
    assert not torch.equal(found[1], plain[1])
    assert torch.equal(cache[:, :, :240], plain_cache[:, :, :240])
    assert not torch.equal(cache[:, :, 280:300], plain_cache[:, :, 280:300])


@needs_native
@cases("tokens", [1, 3])
def test_loras_in_one_batch_are_bit_exact_with_each_alone(native, tokens):
    """There are more adapters than threads; the first sequence has none."""
    layers = [decoder_layer(native, number) for number in range(3)]
    loras = [None, *(lora_layers(native, 3, seed=100 * number, rank=8) for number in range(1, 9))]
    run, x = native.decoder_layers(layers, SHAPE), numbers(9 * tokens, HIDDEN)
    angles = torch.randn(9 * tokens, SHAPE.head_dim // 2, generator=torch.Generator().manual_seed(8))

    def batch(chosen):
        """Return the batch of these sequences, each with 9 earlier tokens in the cache."""
        spans = [KVSpan(i * tokens, tokens, 20 * number, 9 + tokens, 9) for i, number in enumerate(chosen)]
        taken = torch.tensor([number * tokens + i for number in chosen for i in range(tokens)])
        rows = [
            LoraRows(loras[number], i * tokens, (i + 1) * tokens, i, i + 1)
            for i, number in enumerate(chosen)
            if loras[number]
        ]
        cache = numbers(3, 2 * SHAPE.kv_heads, 320, SHAPE.head_dim, seed=9)
        slots = torch.tensor([20 * number + 9 + i for number in chosen for i in range(tokens)])
        last = torch.tensor([(i + 1) * tokens - 1 for i in range(len(chosen))])
        last_spans = [KVSpan(i, 1, 20 * number, 9 + tokens, 8 + tokens) for i, number in enumerate(chosen)]
        cos, sin = angles[taken].cos(), angles[taken].sin()
        forward = ForwardBatch(cos, sin, slots, KVSpans(spans), last, KVSpans(last_spans), cache, loras=tuple(rows))
        return run(x[taken], forward)

    together = batch(range(9))
    for number in range(9):
        assert torch.equal(batch([number])[0], together[number])


@needs_native
def test_layers_without_requested_rows_fill_kv_cache(native):
    layers = [decoder_layer(native, number) for number in range(2)]
    caches = [torch.zeros(2, 2 * SHAPE.kv_heads, 320, SHAPE.head_dim).bfloat16() for _ in range(2)]
    for cache, has_last_rows in zip(caches, (True, False), strict=True):
        batch = forward_batch(cache)
        none = batch._replace(last=torch.zeros(0, dtype=torch.int64), last_spans=KVSpans([]))
        native.decoder_layers(layers, SHAPE)(numbers(251, HIDDEN), batch if has_last_rows else none)
    assert torch.equal(*caches)


@needs_native
def test_layers_unsupported_in_c_use_reference_layers(native):
    odd = native.linear(numbers(HIDDEN, 66))  # 66 inputs are left to PyTorch
    layer = decoder_layer(native, 0)
    layer_with_odd = layer._replace(mixer=layer.mixer._replace(output=odd))
    assert isinstance(native.decoder_layers([layer_with_odd], SHAPE), ReferenceDecoderLayers)
    assert isinstance(native.decoder_layers([layer], SHAPE._replace(head_dim=41)), ReferenceDecoderLayers)
    assert not isinstance(native.decoder_layers([layer], SHAPE), ReferenceDecoderLayers)


@needs_native
def test_int8_propagates_nonfinite_inputs(native):
    layer, x = native.linear(numbers(64, 256) / 8, quantization=INT8), numbers(3, 256, seed=1)
    for broken in (torch.nan, torch.inf, -torch.inf):
        x[1, 130] = broken
        assert not layer(x)[1].isfinite().any()
        assert layer(x)[[0, 2]].isfinite().all()


def test_very_large_scores_do_not_overflow(kernels):
    q, (k, v) = numbers(3, 2, 64) * 1000, (numbers(4, 10, 64, seed=1) * 1000).split(2)
    spans = [KVSpan(0, 3, 0, 10, 7)]
    assert error(kernels.attend(q, k, v, KVSpans(spans)), attention(q, k, v, spans)) < 1e-2


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cpu", torch.float16)])
def test_other_dtypes_use_torch_kernels(device, dtype):
    assert choose_kernels(device, dtype, EngineConfig()).name in PYTORCH_SETS


@needs_native
def test_cpu_device_with_index_uses_c_kernels():
    assert choose_kernels("cpu:0", torch.bfloat16, EngineConfig()).name != "torch"


def test_unsupported_text_model_falls_back_to_next_kernels(caplog):
    text = load_plugins().families["qwen2_vl"].load_spec(CHECKPOINT).text
    odd = replace(text.layers[0], mixer=replace(text.attention, head_dim=15))
    text = replace(text, layers=(odd,))
    chosen = selector(EngineConfig()).choose("cpu", torch.bfloat16, text)
    assert chosen.name in PYTORCH_SETS
    assert "they require an even head_dim and hidden_size, got 15" in caplog.text
    with pytest.raises(ConfigError, match="`cpu_kernels` 'avx512' cannot be used: they require an even head_dim"):
        selector(EngineConfig(cpu_kernels="avx512")).choose("cpu", torch.bfloat16, text)


@needs_native
def test_shapes_unsupported_in_c_use_pytorch(native):
    weight, x = numbers(33, 66) / 8, numbers(5, 66, seed=1)
    assert error(native.linear(weight)(x), F.linear(x.float(), weight.float())) < 5e-3
    gated = numbers(40, 64) / 8
    gate, up = F.linear(numbers(5, 64, seed=1).float(), gated.float()).chunk(2, dim=-1)
    found = native.linear(gated, activation=Activation.SILU_GATE)(numbers(5, 64, seed=1))
    assert error(found, F.silu(gate) * up) < 1e-2
    q, (k, v) = numbers(2, 200, 8), numbers(2, 4, 8, seed=1).split(1)
    spans = [KVSpan(0, 2, 0, 4, 2)]
    assert error(native.attend(q, k, v, KVSpans(spans)), attention(q, k, v, spans)) < 1e-2


def test_cuda_attention_does_not_use_cudnn():
    """cuDNN would build a plan for each number of keys. The switch can be read without a GPU."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        TorchKernels("cuda")
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
