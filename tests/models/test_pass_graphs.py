"""Recorded passes of the vision encoder: the same visual tokens, and nothing that a CUDA graph could not contain.

On a CPU, a recorded pass is repeated by computing it again from its fixed inputs.
"""

from __future__ import annotations

import pytest
import torch

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.kernels.choice import KernelSelector
from dashinfer_vlm_core.kernels.cuda import CudaKernels
from dashinfer_vlm_core.kernels.torch_kernels import TorchKernels
from dashinfer_vlm_core.models.qwen2_vl import pass_graphs
from dashinfer_vlm_core.models.qwen2_vl.pass_graphs import MIN_PASSES, PassGraphs
from dashinfer_vlm_core.models.qwen2_vl.vit import Qwen2VLEncoder
from dashinfer_vlm_core.plugins import load_plugins
from tests.patches import random_patches
from tests.plugins.test_torch_decode_graphs import CudaFactory
from tests.qwen3_5 import tiny_qwen3_5
from tests.qwen3_vl import tiny_qwen3
from tests.recording import check_recordable, repeat
from tests.tiny import write_checkpoint, write_qwen2_5_vl

WRITERS = {
    "qwen2_vl": write_checkpoint,
    "qwen2_5_vl": write_qwen2_5_vl,
    "qwen3_vl": tiny_qwen3.write_checkpoint,
    "qwen3_5": tiny_qwen3_5.write_checkpoint,
}
GRIDS = [(1, 8, 6), (2, 4, 4), (1, 6, 8)]
FAMILY = pytest.mark.parametrize("family", WRITERS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: write(tmp_path_factory.mktemp(name)) for name, write in WRITERS.items()}


def load(folder, graphs, device="cpu"):
    """Return an encoder whose passes are recorded by `graphs`, and the same without them."""
    config = EngineConfig(device=device, dtype="float32")
    family = load_plugins().family_of(folder)
    spec = family.load_spec(folder)
    encoder = family.load_vision_encoder(spec, config, KernelSelector([CudaFactory()], config))
    return Qwen2VLEncoder(encoder.model, spec.pixels, graphs=graphs), encoder


def batch_of(grids, family="qwen2_vl", seed=0):
    side = 16 if family in ("qwen3_vl", "qwen3_5") else 14
    return [random_patches(*grid, seed=seed + number, side=side) for number, grid in enumerate(grids)]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


@FAMILY
def test_recorded_passes_equal_computed_ones(folders, family):
    graphs = PassGraphs(repeat, "cpu")
    recording, plain = load(folders[family], graphs)
    batches = [batch_of(grids, family, seed) for seed, grids in enumerate([GRIDS] * 4 + [GRIDS[::-1]])]
    found, counts = [], []
    for batch in batches:
        found.append(recording.encode(batch))
        counts.append(len(graphs))
    assert counts == [0] * (MIN_PASSES - 1) + [1] * 3
    for rows, batch in zip(found, batches, strict=True):  # earlier results are not overwritten
        assert_equal(rows, plain.encode(batch))


@FAMILY
def test_recorded_pass_copies_nothing_from_the_cpu(folders, family):
    graphs = PassGraphs(check_recordable, "meta")
    encoder, _ = load(folders[family], graphs, "meta")
    batch = batch_of(GRIDS, family)
    for _ in range(MIN_PASSES):
        found = encoder.encode(batch)
    assert len(graphs) == 1
    assert [len(rows) for rows in found] == [item.tokens for item in batch]


def test_number_and_size_of_recorded_passes_are_limited(folders, monkeypatch):
    monkeypatch.setattr(pass_graphs, "MAX_GRAPHS", 2)
    monkeypatch.setattr(pass_graphs, "MAX_PATCHES", 48)
    graphs = PassGraphs(repeat, "cpu")
    recording, plain = load(folders["qwen2_vl"], graphs)
    recorded = []
    for grids in ([(1, 10, 8)], [(1, 4, 4)] * 2, [(1, 8, 6)], [(1, 4, 4)]):
        batch = batch_of(grids)
        for _ in range(MIN_PASSES):
            assert_equal(recording.encode(batch), plain.encode(batch))
        recorded.append(len(graphs))
    assert recorded == [0, 1, 2, 2]


def test_pass_is_computed_if_it_cannot_be_recorded(folders, caplog):
    calls = []

    def fail(work):
        calls.append(work)
        raise RuntimeError("no memory")

    recording, plain = load(folders["qwen2_vl"], PassGraphs(fail, "cpu"))
    batch = batch_of(GRIDS)
    for _ in range(MIN_PASSES + 1):
        assert_equal(recording.encode(batch), plain.encode(batch))
    assert len(calls) == 1
    assert "A pass of the vision encoder could not be recorded as a CUDA graph" in caplog.text


@pytest.mark.parametrize(
    ("options", "kernels", "device"),
    [({}, CudaKernels, "cpu"), ({"cuda_graphs": False}, CudaKernels, "cuda"), ({}, TorchKernels, "cuda")],
    ids=["cpu", "disabled", "other kernels"],
)
def test_passes_are_recorded_only_on_cuda(options, kernels, device):
    assert pass_graphs.pass_graphs(EngineConfig(**options), kernels("cpu"), device) is None
