"""The vision encoder equals transformers', all levels of visual tokens included."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from dashinfer_vlm_core import Engine
from dashinfer_vlm_core.concurrency.compute import THREAD_NAME
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import CheckpointError
from dashinfer_vlm_core.media import Grid
from dashinfer_vlm_core.models.qwen2_vl.vit import patch_positions
from dashinfer_vlm_qwen3_vl import Qwen3VL, vision_model
from dashinfer_vlm_qwen3_vl.position_table import PositionTable
from tests.conversations import data_url
from tests.kernels import selector
from tests.patches import random_patches
from tests.waiting import HANG

from .tiny_qwen3 import write_checkpoint

IMAGES = [(1, 8, 6), (1, 4, 4), (1, 6, 8), (1, 2, 2), (1, 2, 12)]
MIXED = [(2, 4, 4), (1, 8, 6), (3, 4, 10), (1, 4, 4)]
GRIDS = {"image": IMAGES[:1], "images": IMAGES, "video": [(3, 4, 6)], "mixed": MIXED}


def batch_of(grids):
    return [random_patches(*grid, seed=index, side=16) for index, grid in enumerate(grids)]


def load(folder, dtype="float32", **options):
    family, config = Qwen3VL(), EngineConfig(**{"device": "cpu", "dtype": dtype} | options)
    return family.load_vision_encoder(family.load_spec(folder), config, selector(config))


@pytest.fixture(scope="module")
def encoder(dense):
    return load(dense)


@torch.no_grad()
def reference(oracle, batch):
    """Return transformers' rows: for each item, the embedding followed by its levels."""
    tower = oracle.model.model.visual
    pixels = torch.cat([(torch.tensor(item.pixels) / 255 - 0.5) / 0.5 for item in batch])
    out = tower(pixels, torch.tensor([item.grid for item in batch]))
    rows = torch.cat([out.pooler_output, *out.deepstack_features], dim=1)
    return torch.split(rows, [item.tokens for item in batch])


def assert_close(ours, theirs, *, rtol):
    """Assert that each pair of tensors differs by at most `rtol` of the largest value."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert (one.float() - other.float()).abs().max() <= rtol * other.float().abs().max()


def test_positions_are_computed_on_compute_thread(dense, monkeypatch):
    """Otherwise OpenMP would create a second team of threads, which slows down every step."""
    seen = []

    class Recorded(PositionTable):
        def __init__(self, *arguments, **options):
            seen.append(threading.current_thread().name)
            super().__init__(*arguments, **options)

        def __call__(self, grids):
            seen.append(threading.current_thread().name)
            return super().__call__(grids)

    monkeypatch.setattr(vision_model, "PositionTable", Recorded)
    config = EngineConfig(model=str(dense), dtype="float32", device="cpu", media_workers=0, kv_cache_mib=64)
    picture = {"type": "image_url", "image_url": {"url": data_url(Image.new("RGB", (64, 64), "red"))}}
    with Engine(config) as engine:
        request = {"messages": [{"role": "user", "content": [picture]}], "max_tokens": 1}
        engine.submit(request).result(timeout=HANG)
    assert seen == [THREAD_NAME, THREAD_NAME]


@pytest.mark.parametrize("name", GRIDS)
def test_all_levels_equal_transformers(encoder, oracle, name):
    batch = batch_of(GRIDS[name])
    expected = reference(oracle, batch)
    assert expected[0].shape[1] == 3 * 64
    assert_close(encoder.encode(batch), expected, rtol=1e-5)


def test_pass_reads_nothing_from_the_device(dense):
    """On the device `meta`, which has no values, reading one is an error. On a GPU, it would be a wait."""
    batch = batch_of(GRIDS["mixed"])
    found = load(dense, device="meta").encode(batch)
    assert [len(rows) for rows in found] == [item.tokens for item in batch]


def test_batched_equals_alone(encoder):
    batch = batch_of(MIXED)
    alone = [encoder.encode([item])[0] for item in batch]
    assert_close(encoder.encode(batch), alone, rtol=1e-5)
    assert_close(encoder.encode(batch[::-1])[::-1], alone, rtol=1e-5)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_bfloat16_is_close_to_float32(dense, encoder, kernels):
    batch = batch_of(MIXED)
    rows = load(dense, "bfloat16", cpu_kernels=kernels).encode(batch)
    assert all(item.dtype == torch.bfloat16 for item in rows)
    assert_close(rows, encoder.encode(batch), rtol=0.05)


def test_moe_checkpoint_has_the_same_encoder(moe, encoder):
    batch = batch_of(MIXED)
    assert [rows.shape for rows in load(moe).encode(batch)] == [rows.shape for rows in encoder.encode(batch)]


@pytest.mark.parametrize(("h", "w"), [(2, 2), (6, 6), (4, 10), (10, 2), (14, 22)])
def test_positions_are_interpolated_with_align_corners(h, w):
    table = torch.randn(49, 8, generator=torch.Generator().manual_seed(0))
    square = table.T.view(1, 8, 7, 7)
    expected = F.interpolate(square, size=(h, w), mode="bilinear", align_corners=True)[0].permute(1, 2, 0)
    rows, columns = patch_positions(h, w, 2).unbind(1)
    found = PositionTable(table, merge=2)([Grid(2, h, w)])
    torch.testing.assert_close(found, expected[rows, columns].repeat(2, 1), rtol=0, atol=1e-5)


def test_missing_level_is_named(tmp_path):
    write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["deepstack_visual_indexes"] = [0, 1, 2]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"visual\.deepstack_merger_list\.2"):
        load(tmp_path)


@pytest.mark.slow
def test_importing_the_plugin_does_not_import_torch():
    script = (
        "import sys, dashinfer_vlm_qwen3_vl, dashinfer_vlm_qwen3_vl.image_processor,"
        " dashinfer_vlm_qwen3_vl.prompt_layout; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
