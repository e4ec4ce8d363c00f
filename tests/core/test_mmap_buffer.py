"""Buffers for reading weights: freed at once, regardless of allocations made in between."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dashinfer_vlm_core.kernels import mmap_buffer
from tests.cases import cases

PROGRAM = """
import random, torch
from dashinfer_vlm_core.kernels import mmap_buffer

def held():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) // 1024

def grown(make):
    before, kept, last, source = held(), [], None, random.Random(0)
    for turn in range(60):  # as weights are read: a matrix, its next layout, and something small that stays
        matrix = make([source.randrange(2 << 20, 8 << 20)], torch.uint8).fill_(1)
        kept.append(torch.empty(source.randrange(1000, 20000)).fill_(1))
        last = make([matrix.numel()], torch.uint8).fill_(1)
        kept.append(torch.empty(source.randrange(1000, 20000)).fill_(1))
    del matrix, last
    return held() - before

print(grown(mmap_buffer.empty), grown(lambda shape, dtype: torch.empty(*shape, dtype=dtype)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux how much memory is held")
def test_unreferenced_buffer_is_freed():
    """Small allocations would keep memory of the C library's allocator, where the effect is visible if at all."""
    printed = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True).stdout
    ours, the_c_library_s = map(int, printed.split())
    assert ours < 12  # 5 MB remain allocated
    assert the_c_library_s > 20


@cases("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@cases("shape", [[0], [3], [0, 7], [1024, 2048], [3, 5, 100_003]])
def test_buffer_behaves_like_any_tensor(shape, dtype):
    tensor = mmap_buffer.empty(shape, dtype)
    assert (list(tensor.shape), tensor.dtype) == (shape, dtype)
    assert tensor.is_contiguous()
    expected = torch.arange(tensor.numel()).view(*shape).to(dtype)
    assert torch.equal(tensor.copy_(expected), expected)
    assert torch.equal(torch.cat(torch.split(tensor, 1)) if tensor.numel() else tensor, expected)


def test_buffers_do_not_share_memory():
    tensors = [mmap_buffer.empty([1 << 20], torch.float32).fill_(number) for number in range(4)]
    assert [float(tensor.sum()) for tensor in tensors] == [number * 2.0**20 for number in range(4)]
