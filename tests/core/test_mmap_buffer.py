"""Memory to read weights into: given back at once, whatever was made to stay meanwhile."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dashinfer_vlm_core.kernels import mmap_buffer

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
def test_what_is_not_held_is_given_back():
    """Less than the C library's own memory leaves: there this is to be seen, if it is to be seen at all."""
    printed = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True).stdout
    ours, the_c_library_s = map(int, printed.split())
    assert ours < 12  # what stays are 5 MB
    assert the_c_library_s > 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("shape", [[0], [3], [0, 7], [1024, 2048], [3, 5, 100_003]])
def test_it_is_a_tensor_like_any_other(shape, dtype):
    tensor = mmap_buffer.empty(shape, dtype)
    assert (list(tensor.shape), tensor.dtype) == (shape, dtype)
    assert tensor.is_contiguous()
    expected = torch.arange(tensor.numel()).view(*shape).to(dtype)
    assert torch.equal(tensor.copy_(expected), expected)
    assert torch.equal(torch.cat(torch.split(tensor, 1)) if tensor.numel() else tensor, expected)


def test_two_never_share_memory():
    tensors = [mmap_buffer.empty([1 << 20], torch.float32).fill_(number) for number in range(4)]
    assert [float(tensor.sum()) for tensor in tensors] == [number * 2.0**20 for number in range(4)]
