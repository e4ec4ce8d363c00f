"""The vision encoder equals transformers' and does not depend on the rest of the batch."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLForConditionalGeneration, Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import get_vision_position_ids

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import CheckpointError, ConfigError
from dashinfer_vlm_core.media import Grid
from dashinfer_vlm_core.models.interface import Patches
from dashinfer_vlm_core.models.qwen2_vl import Qwen2VL, vit
from dashinfer_vlm_core.models.qwen2_vl.vit import patch_positions
from tests.kernels import needs_native, selector
from tests.patches import random_patches
from tests.tiny import write_checkpoint

PICTURE = [(1, 8, 6)]
PICTURES = [(1, 8, 6), (1, 4, 4), (1, 6, 8), (1, 2, 2), (1, 4, 4), (1, 2, 8)]
VIDEO = [(3, 4, 6)]
MIXED = [(2, 4, 4), (1, 8, 6), (3, 4, 4), (1, 4, 4), (5, 2, 2)]
GRIDS = {"picture": PICTURE, "pictures": PICTURES, "video": VIDEO, "mixed": MIXED}


def load(folder, dtype="float32", **options):
    family, config = Qwen2VL(), EngineConfig(**{"device": "cpu", "dtype": dtype} | options)
    return family.load_vision_encoder(family.load_spec(folder), config, selector(config))


@pytest.fixture(scope="module")
def encoder(tiny_checkpoint):
    return load(tiny_checkpoint)


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint):
    return Oracle(tiny_checkpoint)


class Oracle:
    """transformers' vision encoder; encodes a batch of patches into one tensor per item."""

    def __init__(self, folder, dtype=torch.float32):
        self.tower = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=dtype).model.visual.eval()
        self.dtype = dtype

    @torch.no_grad()
    def encode(self, batch):
        mean, std = (
            torch.tensor(values).repeat_interleave(2 * 14 * 14)
            for values in (Qwen2VLImageProcessorPil.image_mean, Qwen2VLImageProcessorPil.image_std)
        )
        pixels = torch.cat([(torch.tensor(item.pixels) / 255 - mean) / std for item in batch]).to(self.dtype)
        rows = self.tower(pixels, torch.tensor([item.grid for item in batch])).pooler_output
        return torch.split(rows, [item.tokens for item in batch])


def batch_of(grids):
    return [random_patches(*grid, seed=index) for index, grid in enumerate(grids)]


def assert_close(ours, theirs, *, rtol):
    """Assert that each pair of tensors differs by at most `rtol` of the largest value."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert (one.float() - other.float()).abs().max() <= rtol * other.float().abs().max()


@pytest.mark.parametrize("name", GRIDS)
def test_equals_transformers(encoder, oracle, name):
    batch = batch_of(GRIDS[name])

    assert_close(encoder.encode(batch), oracle.encode(batch), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_equals_transformers_in_half_precision(tiny_checkpoint, dtype):
    batch = batch_of(MIXED)
    ours = load(tiny_checkpoint, dtype).encode(batch)

    assert all(item.dtype == getattr(torch, dtype) for item in ours)
    assert_close(ours, Oracle(tiny_checkpoint, getattr(torch, dtype)).encode(batch), rtol=0.02)


def test_pass_reads_nothing_from_the_device(tiny_checkpoint):
    """On the device `meta`, which has no values, reading one is an error. On a GPU, it would be a wait."""
    batch = batch_of(GRIDS["mixed"])
    found = load(tiny_checkpoint, device="meta").encode(batch)
    assert [len(rows) for rows in found] == [item.tokens for item in batch]


def test_auto_dtype_is_stored_dtype(tiny_checkpoint):
    family, config = Qwen2VL(), EngineConfig()
    encoder = family.load_vision_encoder(family.load_spec(tiny_checkpoint), config, selector(config))

    assert encoder.encode(batch_of(PICTURE))[0].dtype == torch.float32


def test_half_precision_is_close_to_full_precision(tiny_checkpoint, encoder):
    batch = batch_of(MIXED)

    assert_close(load(tiny_checkpoint, "bfloat16").encode(batch), encoder.encode(batch), rtol=0.05)


@needs_native
def test_int8_is_close_and_bit_exact_in_any_batch(tiny_checkpoint, encoder):
    batch = batch_of(MIXED)
    int8 = load(tiny_checkpoint, "bfloat16", vision_quantization="int8")
    found = int8.encode(batch)

    assert_close(found, encoder.encode(batch), rtol=0.08)
    assert not torch.equal(found[0], load(tiny_checkpoint, "bfloat16").encode(batch)[0])
    for item, rows in zip(batch, found, strict=True):
        assert torch.equal(int8.encode([item])[0], rows)


@needs_native
def test_mlp_of_many_patches_in_parts_is_bit_exact(tiny_checkpoint, monkeypatch):
    batch = batch_of(MIXED)
    encoder = load(tiny_checkpoint, "bfloat16")
    whole = encoder.encode(batch)
    monkeypatch.setattr(vit, "MLP_PATCHES_CPU", 7)
    assert all(map(torch.equal, whole, encoder.encode(batch)))


@needs_native
def test_vision_quantization_follows_quantization_by_default(tiny_checkpoint):
    batch = batch_of(PICTURE)
    plain, int8, follows, explicit = (
        load(tiny_checkpoint, "bfloat16", **options).encode(batch)[0]
        for options in (
            {},
            {"vision_quantization": "int8"},
            {"quantization": "int8"},
            {"quantization": "int8", "vision_quantization": "none"},
        )
    )

    assert torch.equal(follows, int8)
    assert torch.equal(explicit, plain)


def test_int8_is_used_by_default_only_where_kernels_support_it(tiny_checkpoint, encoder):
    """With DashInfer on CUDA, for example, `quantization` concerns only the text model."""
    batch = batch_of(PICTURE)

    assert torch.equal(load(tiny_checkpoint, quantization="int8").encode(batch)[0], encoder.encode(batch)[0])
    with pytest.raises(
        ConfigError, match="`vision_quantization` int8 is not supported by the kernels 'torch'"
    ) as caught:
        load(tiny_checkpoint, vision_quantization="int8")
    assert caught.value.param == "vision_quantization"


def test_gelu_tower_equals_transformers(tmp_path, tiny_checkpoint):
    model = Qwen2VLForConditionalGeneration.from_pretrained(tiny_checkpoint)
    model.config.vision_config.hidden_act = "gelu"
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_bytes((tiny_checkpoint / "preprocessor_config.json").read_bytes())
    batch = batch_of(MIXED)

    assert_close(load(tmp_path).encode(batch), Oracle(tmp_path).encode(batch), rtol=1e-5)


def test_image_through_transformers_image_processor(encoder, oracle):
    """Normalizing the processor's patches gives the processor's values."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (112, 84, 3), dtype=np.uint8))
    processor = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=168 * 168)
    expected = processor(picture, return_tensors="pt")
    cut = processor(picture, do_rescale=False, do_normalize=False, return_tensors="np")
    grid = Grid(*cut["image_grid_thw"][0].tolist())
    item = random_patches(*grid)
    item = Patches(
        pixels=cut["pixel_values"].astype(np.uint8),
        grid=grid,
        tokens=item.tokens,
        kind="image",
        path=item.path,
        digest=item.digest,
    )

    assert_close([encoder.normalize(torch.tensor(item.pixels))], [expected["pixel_values"]], rtol=1e-6)
    with torch.no_grad():
        theirs = oracle.tower(expected["pixel_values"], expected["image_grid_thw"]).pooler_output
    assert_close(encoder.encode([item]), [theirs], rtol=1e-5)


@pytest.mark.parametrize("name", ["pictures", "mixed"])
def test_batched_equals_alone(encoder, name):
    batch = batch_of(GRIDS[name])
    alone = [encoder.encode([item])[0] for item in batch]

    assert_close(encoder.encode(batch), alone, rtol=1e-5)
    assert_close(encoder.encode(batch[::-1])[::-1], alone, rtol=1e-5)


def test_frames_do_not_attend_to_each_other(encoder):
    """A video is encoded frame by frame; time enters through the text model's positions, not in the encoder."""
    video = random_patches(3, 4, 6)
    frames = [
        Patches(pixels=pixels, grid=Grid(1, 4, 6), tokens=6, kind="image", path=video.path, digest=bytes([index]) * 32)
        for index, pixels in enumerate(np.split(video.pixels, 3))
    ]

    assert_close(encoder.encode([video]), [torch.cat(encoder.encode(frames))], rtol=1e-5)


def test_embeddings_of_a_batch_do_not_share_memory(encoder):
    """Keeping one item of a batch must not keep the others alive."""
    for item in encoder.encode(batch_of(PICTURES)):
        assert item.untyped_storage().nbytes() == item.nbytes


@pytest.mark.parametrize(("h", "w"), [(2, 2), (4, 6), (6, 4), (8, 2)])
def test_patch_positions_equal_transformers(h, w):
    assert torch.equal(patch_positions(h, w, 2), get_vision_position_ids(torch.tensor([[1, h, w]]), 2))


def test_tensor_of_another_shape_is_rejected(tmp_path):
    write_checkpoint(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"mlp_ratio": 2', '"mlp_ratio": 4'))

    with pytest.raises(CheckpointError, match=r"visual\.blocks\.0\.mlp\.fc1\.(weight|bias)"):
        load(tmp_path)


@pytest.mark.slow
def test_importing_the_plugin_does_not_import_torch():
    script = "import sys, dashinfer_vlm_core.models.qwen2_vl; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize(
    ("device", "seconds", "ends"), [("cpu", math.inf, False), ("cpu", 0, True), ("meta", math.inf, True)]
)
def test_part_takes_minimum_time_on_cpu(monkeypatch, device, seconds, ends):
    """Other devices compute asynchronously, so that time says nothing."""
    monkeypatch.setattr(vit, "MIN_EXCLUSIVE_SECONDS", seconds)
    divider = vit.PartDivider(vit.EXCLUSIVE_FLOP / 2, torch.device(device))
    for _ in range(2):
        assert not divider.ends()  # half of the operations
        assert divider.ends() is ends
        divider.begin()
