"""The kernels for CUDA on a CPU: what FlashAttention is given, and what replaces it."""

from __future__ import annotations

import math

import pytest
import torch

from dashinfer_vlm_core.concurrency.compute import CPU_EXECUTOR
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.kernels.cuda import MAX_PADDED_KEYS, CudaKernels, compute_capability
from dashinfer_vlm_core.kernels.streams import HIGH_PRIORITY, stream_executor, to_device
from dashinfer_vlm_core.kernels.torch_kernels import TorchKernels
from dashinfer_vlm_core.kernels.types import KVSpan, KVSpans
from tests.cases import cases
from tests.kernels import selector

SINGLE = [KVSpan(0, 1, 5, 700, 699), KVSpan(1, 1, 900, 1, 0), KVSpan(2, 1, 5, 701, 700), KVSpan(3, 1, 706, 190, 189)]
MIXED = [KVSpan(0, 50, 0, 50, 0), KVSpan(50, 1, 900, 70, 69), KVSpan(51, 30, 100, 600, 570), KVSpan(81, 1, 990, 1, 0)]
FRAMES = [KVSpan(0, 36, 0, 36), KVSpan(36, 16, 36, 16), KVSpan(52, 30, 52, 30)]
SHAPES = [(4, 2, 16), (6, 1, 24), (3, 3, 128)]  # query heads, key heads, channels


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(spans, heads, kv_heads, width):
    """Return queries, keys and values, with NaN in rows outside of all spans."""
    if spans[0].start < 0:
        kv_heads = heads  # as in vision encoders
    keys = torch.full((2 * kv_heads, 1000, width), torch.nan)
    for span in spans:
        rows = slice(span.first_key, span.first_key + span.num_keys)
        keys[:, rows] = numbers(2 * kv_heads, 1000, width, seed=1)[:, rows]
    return numbers(sum(span.num_queries for span in spans), heads, width), *keys.chunk(2)


def varlen_attention(q, k, v, ranges):
    """Compute what FlashAttention documents for `cu_seqlens_q`, `cu_seqlens_k`, `seqused_k`, and a causal mask that is
    aligned with the last query and the last key."""
    parts = []
    for number, count in enumerate(ranges.num_keys.tolist()):
        start, stop = ranges.query_starts[number : number + 2].tolist()
        first = int(ranges.first_keys[number])
        assert stop - start <= ranges.max_queries
        assert count <= ranges.max_keys
        keys, values = (x[:, first : first + count].repeat_interleave(q.shape[1] // len(k), dim=0) for x in (k, v))
        scores = torch.einsum("qhd,hkd->hqk", q[start:stop], keys) / math.sqrt(q.shape[2])
        if ranges.is_causal:
            hidden = torch.ones(stop - start, count, dtype=torch.bool).triu(count - (stop - start) + 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        parts.append(torch.einsum("hqk,hkd->qhd", scores.softmax(-1), values).flatten(1))
    return torch.cat(parts)


@cases("shape", SHAPES)
@cases("spans", [SINGLE, MIXED, FRAMES])
def test_ranges_describe_spans(spans, shape):
    q, k, v = inputs(spans, *shape)
    found = KVSpans(spans).ranges
    assert found.query_starts.dtype == found.first_keys.dtype == found.num_keys.dtype == torch.int32
    assert len(found.query_starts) == len(found.first_keys) == len(spans) + 1
    torch.testing.assert_close(
        varlen_attention(q, k, v, found), TorchKernels("cpu").attend(q, k, v, KVSpans(spans)), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    "spans",
    [[], [KVSpan(0, 2, 0, 9, 5)], [KVSpan(0, 4, 0, 4), KVSpan(4, 1, 0, 9, 8)]],
    ids=["none", "keys after the last query", "with and without a mask"],
)
def test_other_spans_have_no_ranges(spans):
    assert KVSpans(spans).ranges is None


@cases("shape", SHAPES)
@cases("spans", [SINGLE, MIXED, FRAMES])
def test_attention_equals_other_kernels(spans, shape):
    q, k, v = inputs(spans, *shape)
    found, expected = (kernels("cpu").attend(q, k, v, KVSpans(spans)) for kernels in (CudaKernels, TorchKernels))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_queries_in_a_batch_equal_alone(dtype):
    q, k, v = (part.to(dtype) for part in inputs(SINGLE, 6, 2, 64))
    kernels = CudaKernels("cpu")
    together = kernels.attend(q, k, v, KVSpans(SINGLE))
    alone = [
        kernels.attend(q[span.first_query, None], k, v, KVSpans([span._replace(first_query=0)])) for span in SINGLE
    ]
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(together, torch.cat(alone), atol=tolerance, rtol=tolerance)


def test_keys_are_gathered_in_parts():
    """More keys than one part may have, with a number of spans that the parts do not divide."""
    spans = [KVSpan(number, 1, number, 900 - 8 * number, 899 - 8 * number) for number in range(101)]
    assert len(spans) * spans[0].num_keys > MAX_PADDED_KEYS
    q, (k, v) = numbers(101, 2, 8), numbers(2, 1000, 8, seed=1).chunk(2)
    found, expected = (kernels("cpu").attend(q, k, v, KVSpans(spans)) for kernels in (CudaKernels, TorchKernels))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_torch_has_the_arguments_of_flash_attention():
    """The operator is registered without a GPU too."""
    arguments = {argument.name for argument in torch.ops.aten._flash_attention_forward.default._schema.arguments}
    positional = {"query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k"}
    assert positional | {"dropout_p", "is_causal", "return_debug_mask", "seqused_k"} <= arguments


@pytest.mark.parametrize(
    "device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.skipif("torch.version.cuda"))]
)
def test_capability_is_that_of_nvidia_gpus(device):
    assert compute_capability(device) == (0, 0)
    assert not CudaKernels(device).groups_experts(torch.bfloat16, [64])


def test_kernels_are_selected_for_cuda():
    assert selector(EngineConfig()).choose("cuda:1", torch.bfloat16).name == "cuda"
    assert selector(EngineConfig(cpu_kernels="torch")).choose("cuda", torch.bfloat16).name == "torch"
    assert selector(EngineConfig(cpu_kernels="cuda")).choose("cpu", torch.float32).name == "torch"


def test_cpu_has_no_streams_and_no_copies():
    tensor = torch.zeros(3)
    assert to_device(tensor, "cpu") is tensor
    assert stream_executor("cpu", priority=HIGH_PRIORITY) is CPU_EXECUTOR
