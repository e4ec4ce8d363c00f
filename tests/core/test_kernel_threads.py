"""The number of threads changes no bit, neither that which packs weights nor that which multiplies.

The matrices have fewer panels of 32 outputs than the largest number of threads, as many, and more.
"""

from __future__ import annotations

import pytest
import torch

from dashinfer_vlm_core.kernels.quantization import INT4, INT8
from dashinfer_vlm_core.kernels.types import Activation, KVSpan, KVSpans
from tests.kernels import QUANTIZED_PARAMS, VARIANT_PARAMS, load_kernels

THREADS = (1, 2, 3, 16, 64)
ROWS = (1, 2, 8, 13, 40, 200, 400)
FORMATS = {"16 bits": None, "8 bits": INT8, "4 bits": INT4}


@pytest.fixture(params=VARIANT_PARAMS)
def native(request):
    return load_kernels(request.param)


@pytest.fixture
def with_threads():
    """Return a function that computes with each number of threads, and returns the results."""
    before = torch.get_num_threads()

    def results(compute):
        found = []
        for count in THREADS:
            torch.set_num_threads(count)
            found.append(compute())
        return found

    yield results
    torch.set_num_threads(before)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def all_equal(results):
    return all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize("native", QUANTIZED_PARAMS, indirect=True)
@pytest.mark.parametrize("quantization", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("outputs", [70, 512, 2112])
def test_linear_layers_are_equal(native, with_threads, quantization, outputs):
    weight, inputs = numbers(outputs, 256) / 16, [numbers(rows, 256, seed=rows) for rows in ROWS]

    def compute():
        layer = native.linear(weight, activation=Activation.SILU_GATE, quantization=quantization)
        return torch.cat([layer(x) for x in inputs])

    assert all_equal(with_threads(compute))


def test_weights_without_compression_are_equal(native, with_threads):
    weight = (10 ** (torch.rand(1056, 256, generator=torch.Generator().manual_seed(0)) * 60 - 30)).bfloat16()
    x = numbers(3, 256)
    assert all_equal(with_threads(lambda: native.linear(weight, fp32_output=True)(x)))


def test_large_matrix_that_is_packed_in_blocks_is_equal(native, with_threads, monkeypatch):
    monkeypatch.setattr("dashinfer_vlm_cpu.native_linear.BLOCK_WEIGHTS", 7 * 32 * 256)
    weight, x = numbers(2112, 256), numbers(2, 256)

    def compute():
        head = native.head(weight)
        columns = head.argmax(x)
        assert columns is not None
        return torch.cat([head(x).flatten(), columns.float()])

    assert all_equal(with_threads(compute))


def test_attention_is_equal(native, with_threads):
    q, k, v = (numbers(300, heads, 64, seed=heads) for heads in (4, 2, 2))
    spans = KVSpans([KVSpan(0, 1, 0, 300, 299), KVSpan(1, 299, 0, 299, 0)])
    keys, values = (x.transpose(0, 1).contiguous() for x in (k, v))
    assert all_equal(with_threads(lambda: native.attend(q, keys, values, spans)))
