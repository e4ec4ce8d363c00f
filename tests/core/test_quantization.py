"""Weights with 4 bits, and stored ones with 8 bits: results equal those of the dequantized weights, to the bit where
sums are exact."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dashinfer_vlm_core.kernels.progressive import STEP_GROUP, quantize_progressive
from dashinfer_vlm_core.kernels.quantization import (
    GROUPS,
    INT4,
    INT8,
    Quantization,
    QuantizedWeight,
    concatenate,
    quantize,
)
from dashinfer_vlm_core.kernels.torch_kernels import TorchKernels
from dashinfer_vlm_core.kernels.types import Activation
from dashinfer_vlm_cpu.build import AVX512, PORTABLE_TILES
from tests.cases import cases
from tests.core.test_kernels import error, numbers
from tests.kernels import QUANTIZED_PARAMS, load_kernels, needs_avx512

ROWS = (1, 3, 5, 16, 17, 40)


@pytest.fixture(params=[pytest.param(None, id="torch"), *QUANTIZED_PARAMS])
def kernels(request):
    return load_kernels(request.param) if request.param else TorchKernels("cpu")


@pytest.fixture(params=QUANTIZED_PARAMS)
def native(request):
    return load_kernels(request.param)


def random_weight(outputs, inputs, group, *, ordered=False, seed=0):
    """Return weights as those of published checkpoints, with scales of fp16 and zero points of up to 16."""
    generator = torch.Generator().manual_seed(seed)
    shape = (outputs, -(-inputs // group))
    return QuantizedWeight(
        torch.randint(16, (outputs, inputs), generator=generator, dtype=torch.uint8),
        (torch.rand(shape, generator=generator) / 50 + 1e-4).half(),
        torch.randint(17, shape, generator=generator, dtype=torch.uint8),
        group,
        torch.randperm(inputs, generator=generator) if ordered else None,
    )


def quantized_rows(x):
    """Return activations [rows, inputs] rounded to 8 bits per block of 128 inputs, in float64."""
    blocks = F.pad(x.float(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    scales = blocks.abs().amax(2, keepdim=True) / 127
    inverses = torch.where(scales > 0, 1 / scales, 0)
    return ((blocks * inverses).round().double() * scales.double()).flatten(1)[:, : x.shape[1]]


@cases("group", GROUPS)
@cases(("outputs", "inputs"), [(70, 128), (33, 263)])
def test_linear_equals_product_of_dequantized_weights(native, group, outputs, inputs):
    """With a partial panel, and with partial blocks, groups and quads of inputs."""
    weight = random_weight(outputs, inputs, group)
    layer = native.linear_quantized(weight, dtype=torch.bfloat16, fp32_output=True)
    for rows in ROWS:
        x = numbers(rows, inputs, seed=rows)
        expected = quantized_rows(x) @ weight.dequantize(torch.float64).T
        assert error(layer(x).double(), expected) < 1e-6


@cases("ordered", [False, True])
def test_linear_is_close_to_weights(kernels, ordered):
    weight, bias, x = random_weight(70, 384, 64, ordered=ordered), numbers(70), numbers(29, 384, seed=1)
    layer = kernels.linear_quantized(weight, bias, dtype=torch.bfloat16, activation=Activation.QUICK_GELU)
    product = F.linear(x.float(), weight.dequantize(torch.float32), bias.float())
    assert error(layer(x), product * torch.sigmoid(1.702 * product)) < 1.5e-2


@cases("rows", [1, 40])
def test_order_of_inputs_permutes_activations(native, rows):
    weight, x = random_weight(64, 260, 32, ordered=True), numbers(rows, 2 * 260, seed=1)[:, :260]
    ordered, plain = (
        native.linear_quantized(one, dtype=torch.bfloat16) for one in (weight, weight._replace(order=None))
    )
    assert torch.equal(ordered(x), plain(x[:, weight.order]))
    assert not torch.equal(ordered(x), plain(x))


@cases(("group", "ordered"), [(32, True), (64, False), (128, False)])
def test_row_is_bit_exact_in_any_batch(native, group, ordered):
    layer = native.linear_quantized(random_weight(96, 296, group, ordered=ordered), dtype=torch.bfloat16)
    x = numbers(70, 296, seed=1)
    whole = layer(x)
    for rows in ROWS:
        assert torch.equal(layer(x[:rows]), whole[:rows])


@needs_avx512
@pytest.mark.parametrize("group", GROUPS)
def test_tiles_equal_vectors(group):
    weight, x = random_weight(70, 456, group), numbers(40, 456, seed=1)
    found, expected = (
        load_kernels(variant).linear_quantized(weight, dtype=torch.bfloat16, fp32_output=True)(x)
        for variant in (PORTABLE_TILES, AVX512)
    )
    assert torch.equal(found, expected)


def test_gated_linear(kernels):
    weight, x = random_weight(192, 256, 32), numbers(20, 256, seed=1)
    gate, up = F.linear(x.float(), weight.dequantize(torch.float32)).chunk(2, dim=-1)
    layer = kernels.linear_quantized(weight, dtype=torch.bfloat16, activation=Activation.SILU_GATE)
    assert error(layer(x), F.silu(gate) * up) < 2e-2


def test_add_to(native):
    weight, x, total = random_weight(70, 128, 64), numbers(9, 128, seed=1), numbers(9, 70, seed=2)
    layer = native.linear_quantized(weight, dtype=torch.bfloat16)
    expected = total.float() + F.linear(x.float(), weight.dequantize(torch.float32))
    layer.add_to(total, x)
    assert error(total, expected) < 1e-2


def test_scales_of_very_different_size_keep_their_precision(native):
    """fp16 alone would represent none of these scales."""
    weight = random_weight(64, 128, 32)
    scales = weight.scales.float() * 2.0 ** torch.arange(-80, 48, 2)[:64, None]
    layer = native.linear_quantized(weight._replace(scales=scales), dtype=torch.bfloat16, fp32_output=True)
    x = numbers(3, 128, seed=1)
    expected = quantized_rows(x) @ weight._replace(scales=scales).dequantize(torch.float64).T
    assert torch.allclose(layer(x).double(), expected, rtol=1e-5, atol=0)


def test_weights_of_zero_and_nonfinite_inputs(native):
    zeros = native.linear(torch.zeros(64, 256).bfloat16(), quantization=INT4)
    assert not zeros(numbers(3, 256)).any()
    layer = native.linear(numbers(64, 256) / 8, quantization=INT4)
    for rows in (3, 20, 40):
        x = numbers(rows, 256, seed=1)
        assert not layer(torch.zeros_like(x)).any()
        for broken in (torch.nan, torch.inf, -torch.inf):
            x[1, 130] = broken
            assert not layer(x)[1].isfinite().any()
            assert layer(x)[[0, 2]].isfinite().all()


def test_nonfinite_weight_makes_its_output_not_finite(kernels):
    weight, x = numbers(64, 128) / 8, numbers(3, 128, seed=1)
    weight[7, 5], weight[9, 6] = torch.nan, torch.inf
    found = kernels.linear(weight, quantization=INT4)(x)
    assert not found[:, [7, 9]].isfinite().any()
    assert found[:, [0, 8, 63]].isfinite().all()


@cases("inputs", [256, 200])
@cases("group", GROUPS)
def test_quantize_minimizes_error(group, inputs):
    """The error is that of 4 bits, and lower than that of rounding to the whole range."""
    weight = torch.randn(40, inputs, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    weight[4] = weight[4].abs() + 1
    quantized = quantize(weight, group)
    quantized.check()
    groups = F.pad(weight, (0, -inputs % group)).unflatten(1, (-1, group))
    low, high = groups.amin(2, keepdim=True).clamp(max=0), groups.amax(2, keepdim=True).clamp(min=0)
    step = ((high - low) / 15).clamp(min=1e-30)
    whole = ((groups / step).round() * step).flatten(1)[:, :inputs]
    found = error(quantized.dequantize(torch.float32), weight)
    assert found < 0.98 * error(whole, weight)
    assert found < {32: 0.08, 64: 0.09, 128: 0.1}[group]


def integers(packed):
    """Return float32 [outputs, inputs] and the scales of packed weights with integer steps, see `progressive.h`."""
    block, panel = 128, 32
    num_groups, count = block // STEP_GROUP, -(-packed.inputs // block)
    blocks = packed.weights.view(-1, count, panel * (num_groups + block // 2))
    groups = blocks[:, :, : num_groups * panel].unflatten(2, (num_groups, panel))
    both = blocks[:, :, num_groups * panel :].unflatten(2, (block // 4, panel // 2, 4))
    codes = torch.cat((both & 15, both >> 4), dim=3).permute(0, 3, 1, 2, 4).reshape(-1, count * block)
    steps, zeros = (
        each.permute(0, 3, 1, 2).reshape(len(codes), -1).float().repeat_interleave(STEP_GROUP, dim=1)
        for each in (groups & 15, groups >> 4)
    )
    return ((codes - zeros) * steps)[: packed.outputs, : packed.inputs], packed.scales[: packed.outputs, None]


@cases(("outputs", "inputs"), [(70, 128), (34, 260), (64, 2048)])
def test_progressive_weights_equal_those_of_8_bits(native, outputs, inputs):
    """With a partial panel, and with partial blocks and groups of inputs."""
    weight, bias = numbers(outputs, inputs) / 8, numbers(outputs)
    found, scales = integers(native.linear(weight, quantization=INT4).packed)
    assert 112 <= found.abs().max() <= 127
    stored = QuantizedWeight(
        (found + 128).to(torch.uint8), scales, torch.full((outputs, 1), 128, dtype=torch.int16), inputs, bits=8
    )
    for activation in (Activation.NONE, Activation.SILU_GATE, Activation.GELU):
        layer = native.linear(weight, bias, quantization=INT4, activation=activation)
        expected = native.linear_quantized(stored, bias, dtype=torch.bfloat16, activation=activation)
        for rows in (*ROWS, 200):
            x = numbers(rows, inputs, seed=rows)
            assert torch.equal(layer(x), expected(x)), (activation, rows)


@cases("inputs", [256, 300])
def test_progressive_quantization_in_c_equals_reference(native, inputs):
    """Equally good codes may differ, since sums are computed in another order."""
    weight = numbers(50, inputs) / 8
    weight[3], weight[4, :40], weight[5], weight[6] = 0, 0, weight[5].abs() + 1, -weight[6].abs()
    weight[7, 5] = 1000
    found, expected = integers(native.linear(weight, quantization=INT4).packed), quantize_progressive(weight)
    assert (found[0] == expected.integers).float().mean() > 0.99
    assert found[1].flatten().tolist() == pytest.approx(expected.scales.flatten().tolist(), rel=1e-4)
    assert expected.integers.abs().max() <= 127
    errors = [error(one[0] * one[1], weight.float()) for one in (found, expected)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-4)


@cases("bits", [8, 4])
def test_inputs_that_are_no_multiple_of_4_are_rounded(native, bits):
    weight, x = numbers(64, 258) / 8, numbers(5, 258, seed=1)
    found = native.linear(weight, quantization=Quantization(bits))(x)
    assert torch.equal(found, TorchKernels("cpu").linear(weight, quantization=Quantization(bits))(x))
    assert not torch.equal(found, TorchKernels("cpu").linear(weight)(x))


@cases("outlier", [1, 20])
def test_progressive_weights_are_closer_than_float_scales_of_larger_groups(outlier):
    weight = torch.randn(40, 512, generator=torch.Generator().manual_seed(0))
    weight[:, 7] *= outlier
    found = error(quantize_progressive(weight).dequantize(torch.float32), weight)
    assert found < 0.95 * error(quantize(weight, 32).dequantize(torch.float32), weight)


def test_linear_quantizes_weights(kernels):
    weight, x = numbers(96, 256) / 8, numbers(5, 256, seed=1)
    layer = kernels.linear(weight, quantization=INT4)
    assert error(layer(x), F.linear(x.float(), quantize_progressive(weight).dequantize(torch.float32))) < 1.5e-2
    assert error(layer(x), F.linear(x.float(), weight.float())) > 4e-2


def test_int8_without_native_kernels_rounds_weights():
    weight, x = numbers(96, 256) / 8, numbers(5, 256, seed=1)
    found = error(
        TorchKernels("cpu").linear(weight, quantization=INT8, fp32_output=True)(x), F.linear(x.float(), weight.float())
    )
    assert 3e-3 < found < 1e-2


def test_head_quantizes_weights(kernels):
    weight, x = numbers(4096, 64) / 8, numbers(5, 64, seed=1)
    head = kernels.head(weight, quantization=INT4)
    assert error(head(x), F.linear(x.float(), quantize_progressive(weight).dequantize(torch.float32))) < 1.5e-2


def test_quantization_checks_its_bits():
    with pytest.raises(ValueError, match="`bits` must be 4 or 8, got 2"):
        Quantization(2)


@cases(
    ("changes", "message"),
    [
        ({"group": 16}, "`group` must be one of 32, 64, 128, got 16"),
        ({"codes": torch.zeros(4, 64)}, r"`codes` must be uint8 \[outputs, inputs\], got float32"),
        ({"codes": torch.full((4, 64), 16, dtype=torch.uint8)}, "`codes` must be at most 15, got 16"),
        ({"zeros": torch.full((4, 2), 17, dtype=torch.uint8)}, "`zeros` must be at most 16, got 17"),
        ({"zeros": torch.zeros(4, 1, dtype=torch.uint8)}, r"`zeros` must be uint8 \[4, 2\]"),
        ({"scales": torch.ones(2, 4)}, r"`scales` must be floats \[4, 2\], got float32 \[2, 4\]"),
        ({"order": torch.zeros(64, dtype=torch.int64)}, "`order` must be a permutation of 0 to 63"),
    ],
)
def test_inconsistent_weight_is_rejected(kernels, changes, message):
    weight = random_weight(4, 64, 32)._replace(**changes)
    with pytest.raises(ValueError, match=message):
        kernels.linear_quantized(weight, dtype=torch.bfloat16)


# 8-bit weights that are quantized already -----------------------------------------------------------------------------


def random_int8(outputs, inputs, *, zero=128, group=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (outputs, -(-inputs // (group or inputs)))
    return QuantizedWeight(
        torch.randint(256, (outputs, inputs), generator=generator, dtype=torch.uint8),
        torch.rand(shape, generator=generator) / 500 + 1e-5,
        torch.full(shape, zero, dtype=torch.int16),
        group or inputs,
        bits=8,
    )


@cases(("outputs", "inputs"), [(70, 128), (33, 260)])
def test_int8_codes_are_multiplied_as_they_are(native, outputs, inputs):
    """With codes of the whole range, -128 included, which rounding to 8 bits would not produce."""
    weight = random_int8(outputs, inputs)
    layer = native.linear_quantized(weight, dtype=torch.bfloat16, fp32_output=True)
    for rows in ROWS:
        x = numbers(rows, inputs, seed=rows)
        expected = quantized_rows(x) @ weight.dequantize(torch.float64).T
        assert error(layer(x).double(), expected) < 1e-6


def test_int8_codes_equal_the_weights_that_round_to_them(native):
    weight = numbers(96, 256) / 8
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    codes = ((weight.float() * (1 / scales)).round() + 128).to(torch.uint8)
    stored = QuantizedWeight(codes, scales, torch.full((96, 1), 128, dtype=torch.int16), 256, bits=8)
    x, options = numbers(20, 256, seed=1), {"activation": Activation.SILU_GATE}
    found = native.linear_quantized(stored, dtype=torch.bfloat16, **options)(x)
    assert torch.equal(found, native.linear(weight, quantization=INT8, **options)(x))


@cases("weight", [random_int8(64, 256, zero=120), random_int8(64, 256, group=64), random_int8(64, 258)])
def test_int8_weights_without_a_kernel_are_dequantized(kernels, weight):
    """Zero points, groups, and a number of inputs that is no multiple of 4."""
    x = numbers(5, weight.codes.shape[1], seed=1)
    found = kernels.linear_quantized(weight, dtype=torch.bfloat16)(x)
    assert error(found, F.linear(x.float(), weight.dequantize(torch.float32))) < 1e-2


@cases(
    ("changes", "message"),
    [
        ({"bits": 3}, "`bits` must be 4 or 8, got 3"),
        ({"group": 0}, "`group` must be positive, got 0"),
        ({"zeros": torch.zeros(4, 1, dtype=torch.uint8)}, r"`zeros` must be int16 \[4, 1\], got uint8"),
    ],
)
def test_inconsistent_int8_weight_is_rejected(kernels, changes, message):
    with pytest.raises(ValueError, match=message):
        kernels.linear_quantized(random_int8(4, 64)._replace(**changes), dtype=torch.bfloat16)


def test_rows_can_be_selected():
    weight, rows = random_weight(8, 64, 32, ordered=True), torch.tensor([5, 0, 7])
    assert torch.equal(weight.take_rows(rows).dequantize(torch.float32), weight.dequantize(torch.float32)[rows])


def test_matrices_of_different_bits_are_not_concatenated():
    assert concatenate([random_weight(4, 64, 32), random_int8(4, 64)]) is None
