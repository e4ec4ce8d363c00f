"""Memory for weights: nobody else's, aligned, given back."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from dashinfer_vlm_core.kernels import huge_pages

MIB = 1 << 20


def test_tensors_share_nothing_and_begin_at_cache_lines():
    counts = [1, 63, 64, 65, 5 * MIB, 5 * MIB + 1, 7 * MIB, 3, 20 * MIB, 2 * MIB]
    tensors = [huge_pages.empty(count, torch.uint8) for count in counts]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (tensor, count) in enumerate(zip(tensors, counts, strict=True)):
        assert len(tensor) == count
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == number).all())


def test_numbers_of_several_bytes():
    tensor = huge_pages.empty(1000, torch.bfloat16).fill_(1.5)
    assert tensor.dtype == torch.bfloat16
    assert float(tensor.float().sum()) == 1500


def test_none_at_all():
    assert huge_pages.empty(0, torch.uint8).shape == (0,)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells how much memory is taken")
def test_memory_is_free_again_when_its_last_tensor_is():
    def taken():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = taken()
    tensors = [huge_pages.empty(size * MIB, torch.uint8).zero_() for size in (5, 5, 5, 5, 40, 5)]
    assert taken() > before + 60 * MIB
    del tensors
    assert taken() < before + 10 * MIB
