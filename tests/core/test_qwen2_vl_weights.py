from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2VLForConditionalGeneration

from dashinfer_vlm_core.errors import CheckpointError, ConfigError
from dashinfer_vlm_core.models.placement import resolve_device, resolve_dtype
from dashinfer_vlm_core.models.qwen2_vl.config import TENSOR_RENAMES
from dashinfer_vlm_core.models.weights import Weights, torch_dtype
from tests.tiny import write_checkpoint

NORM = "model.norm.weight"


def read(folder, name, shape, dtype=torch.float32):
    with Weights(folder, TENSOR_RENAMES) as weights:
        return weights.tensor(name, shape, device="cpu", dtype=dtype)


def assert_holds(folder, expected):
    """Assert that `folder` has exactly the tensors of `expected`, bit by bit."""
    with Weights(folder, TENSOR_RENAMES) as weights:
        assert weights.names == expected.keys()
        for name, tensor in expected.items():
            found = weights.tensor(name, tensor.shape, device="cpu", dtype=tensor.dtype)
            assert torch.equal(found, tensor), name


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def published(tied):
    """Return the tensors of the tied checkpoint by their published names."""
    return load_file(tied / "model.safetensors")


def test_single_file(tied, published):
    assert "lm_head.weight" not in published
    assert {"visual.patch_embed.proj.weight", "model.embed_tokens.weight", NORM} < published.keys()
    assert_holds(tied, published)


def test_shards(tied, published, tmp_path):
    Qwen2VLForConditionalGeneration.from_pretrained(tied).save_pretrained(tmp_path, max_shard_size="200KB")

    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_holds(tmp_path, published)


@pytest.mark.parametrize(
    ("modules", "dtype", "is_view"),
    [
        (["model.layers.0.mlp.down_proj"], torch.float32, True),
        (["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"], torch.float32, True),
        (["model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"], torch.float32, False),
        (["model.layers.0.mlp.down_proj"], torch.bfloat16, False),
    ],
)
def test_matrix_is_a_view_of_the_file_where_it_is_stored_in_this_form(tied, published, modules, dtype, is_view):
    stored = [published[f"{module}.weight"] for module in modules]
    outputs = [len(tensor) for tensor in stored]
    with Weights(tied, TENSOR_RENAMES) as weights:
        inputs = stored[0].shape[1]
        view = weights._view(modules, [(count, inputs) for count in outputs], dtype)
        matrix = weights.matrix(modules, outputs, inputs, device="cpu", dtype=dtype, mapped=True)
    assert (view is not None) == is_view
    assert torch.equal(matrix, torch.cat(stored).to(dtype))


@pytest.mark.parametrize("tied", [True, False])
def test_output_layer_is_stored_unless_it_is_tied(tmp_path, tied):
    with Weights(write_checkpoint(tmp_path, tie_word_embeddings=tied)) as weights:
        assert ("lm_head.weight" in weights.names) is not tied


def test_names_of_newer_layouts(published, tmp_path):
    newer = {
        f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in published.items()
    }
    save_file(newer, tmp_path / "model.safetensors")

    assert_holds(tmp_path, published)


def test_converted_tensor_is_not_a_view_of_the_file(tied, published):
    found = read(tied, NORM, (64,), torch.bfloat16)

    assert torch.equal(found, published[NORM].bfloat16())
    read(tied, NORM, (64,)).zero_()
    assert torch.equal(read(tied, NORM, (64,)), published[NORM])


MEASURE = """
import sys, torch
from pathlib import Path
from dashinfer_vlm_core.models.qwen2_vl.config import TENSOR_RENAMES
from dashinfer_vlm_core.models.weights import Weights

def peak():  # not ru_maxrss: a child inherits that of its parent
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak()
with Weights(Path(sys.argv[1])) as weights:
    tensors = [weights.tensor(name, (512, 2048), device="cpu", dtype=torch.float32) for name in weights.names]
print((peak() - before) / sum(tensor.nbytes for tensor in tensors))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_loading_is_below_125_percent(tmp_path):
    save_file({f"model.layers.{n}.w": torch.ones(512, 2048) for n in range(32)}, tmp_path / "model.safetensors")

    run = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, check=True)

    assert 0.9 < float(run.stdout) < 1.25


def test_missing_tensor_is_named(tiny_checkpoint):
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.2\.input_layernorm\.weight'"):
        read(tiny_checkpoint, "model.layers.2.input_layernorm.weight", (64,))


def test_wrong_shape_is_named_with_expected_shape(tied):
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is \[64\], but .* \[32\]"):
        read(tied, NORM, (32,))


def test_missing_shard_is_named(tmp_path):
    save_file({NORM: torch.ones(4)}, tmp_path / "model-00001-of-00002.safetensors")
    shards = {NORM: "model-00001-of-00002.safetensors", "lm_head.weight": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))

    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00002\.safetensors"):
        Weights(tmp_path)


NESTED = pytest.param("[" * 100_000, id="nested")


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": []}', NESTED])
def test_broken_index_is_named(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)

    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        Weights(tmp_path)


def test_shards_are_searched_only_in_folder(tmp_path):
    save_file({NORM: torch.ones(4)}, tmp_path / "elsewhere.safetensors")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')

    with pytest.raises(CheckpointError, match="lacks elsewhere"):
        Weights(folder)


def test_truncated_file_is_named(tied, tmp_path):
    whole = (tied / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])

    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        Weights(tmp_path)


def test_pickles_are_rejected_with_conversion_hint(tmp_path):
    torch.save({NORM: torch.ones(4)}, tmp_path / "pytorch_model.bin")

    with pytest.raises(CheckpointError, match="save_pretrained"):
        Weights(tmp_path)


def test_folder_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        Weights(tmp_path)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_torch_dtype(name):
    assert str(torch_dtype(name)) == f"torch.{name}"


def test_torch_dtype_of_another_name():
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        torch_dtype("int8")


@pytest.mark.parametrize(
    ("dtype", "stored", "device", "resolved"),
    [
        ("auto", "bfloat16", "cpu", "bfloat16"),
        ("auto", "float32", "cuda:0", "float32"),
        ("auto", "float16", "cuda", "float16"),
        ("auto", "float16", "cpu", "float32"),
        ("float16", "float32", "cpu", "float16"),
    ],
)
def test_resolve_dtype(dtype, stored, device, resolved):
    assert resolve_dtype(dtype, stored, device) == resolved


def test_resolve_device():
    assert resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device("cpu") == "cpu"


@pytest.mark.parametrize("device", ["abacus", "cuda:99"])
def test_missing_device_is_named(device):
    with pytest.raises(ConfigError, match=device) as error:
        resolve_device(device)

    assert error.value.param == "device"


@pytest.mark.parametrize(
    ("dtype", "stored", "device", "resolved"),
    [
        ("auto", "float16", "cpu", "bfloat16"),
        ("auto", "float16", "cuda", "float16"),
        ("float32", "float16", "cpu", "float32"),
    ],
)
def test_resolve_dtype_of_quantized_checkpoint(dtype, stored, device, resolved):
    assert resolve_dtype(dtype, stored, device, quantized=True) == resolved


def test_stored_integers_are_not_read_as_weights(tmp_path):
    save_file({"layer.weight": torch.ones(2, 4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'layer\.weight' is I8, but its module has no scales"):
        read(tmp_path, "layer.weight", (2, 4))
