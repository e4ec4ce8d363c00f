"""Quantized checkpoints: their weights are those of an engine that quantizes while loading, and nothing else changes.

They are read by `tests.dequantizer`, which is written from the format's description.
"""

from __future__ import annotations

import json
import re
import shutil
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dashinfer_vlm_core.errors import CheckpointError, ConfigError
from dashinfer_vlm_core.kernels import INT4, INT8, Quantization
from dashinfer_vlm_core.kernels.quantization import quantize
from dashinfer_vlm_core.kernels.torch_kernels import TorchKernels
from dashinfer_vlm_core.models.checkpoint_quantizer import CheckpointQuantizer
from dashinfer_vlm_core.models.safetensors_writer import TensorInfo, write_safetensors
from dashinfer_vlm_core.models.weights import Weights, torch_dtype
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_torch.model import TextModel, TextQuantization
from tests import tiny
from tests.dequantizer import dequantize, read_tensors, write_dequantized
from tests.qwen3_vl import tiny_qwen3

FAMILIES = {
    "qwen2_vl": partial(tiny.write_checkpoint, num_hidden_layers=3),
    "qwen2_5_vl": partial(tiny.write_qwen2_5_vl, num_hidden_layers=4, tie_word_embeddings=True),
    "qwen3_vl": partial(tiny_qwen3.write_checkpoint, num_hidden_layers=3),
    "qwen3_vl_moe": partial(tiny_qwen3.write_checkpoint, moe=True, moe_intermediate_size=32),
}


def load_spec(folder):
    return load_plugins().family_of(folder).load_spec(folder)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folders = {}

    def original(family):
        if family not in folders:
            folders[family] = FAMILIES[family](tmp_path_factory.mktemp(family))
        return folders[family]

    return original


@pytest.fixture
def original(originals, tmp_path):
    """A copy of a checkpoint that a test may change."""
    shutil.copytree(originals("qwen2_vl"), tmp_path / "original")
    return tmp_path / "original"


def write(folder, output, quantization=INT4):
    return CheckpointQuantizer(load_spec(folder), quantization).write(output)


def loaded_matrices(folder, quantization):
    """Return the weights of all linear layers of a text model, as they are multiplied."""
    spec = load_spec(folder)
    with Weights.open(folder, spec.tensor_renames) as weights:
        options = {"device": "cpu", "dtype": torch_dtype(spec.dtype), "quantization": quantization}
        model = TextModel(weights, spec.text, TorchKernels("cpu"), **options)
    layers = [linear for layer in model._layers._layers for linear in linears(layer)]
    return [linear._weight for linear in layers] + [model._head._linear._weight]


def linears(layer):
    dense = [linear for linear in (layer.qkv, layer.output, layer.gate_up, layer.down) if linear]
    experts = layer.experts._experts if layer.experts else []
    return dense + [linear for expert in experts for linear in (expert.gate_up, expert.down)]


@pytest.mark.parametrize("quantization", [INT4, INT8], ids=["int4", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_equal_those_quantized_while_loading(originals, family, quantization, tmp_path):
    folder = originals(family)
    write(folder, tmp_path / "quantized", quantization)
    dequantized = write_dequantized(tmp_path / "quantized", tmp_path / "dequantized")
    expected = loaded_matrices(folder, TextQuantization(quantization, INT8))
    unquantized = loaded_matrices(folder, TextQuantization())
    for matrix, same, other in zip(
        loaded_matrices(dequantized, TextQuantization()), expected, unquantized, strict=True
    ):
        assert torch.equal(matrix, same)
        assert torch.equal(same, other) == (matrix is None or len(matrix) == 320)  # only the head is not quantized


@pytest.mark.parametrize("family", FAMILIES)
def test_other_tensors_and_files_are_copied(originals, family, tmp_path):
    folder = originals(family)
    write(folder, tmp_path / "quantized")
    before, after = read_tensors(folder), read_tensors(tmp_path / "quantized")
    kept = {name for name in before if "visual" in name or "norm" in name or "embed" in name or "lm_head" in name}
    kept |= {name for name in before if name.endswith(("bias", "mlp.gate.weight"))}
    assert {name for name in before if name in after and after[name].dtype == before[name].dtype} == kept
    assert all(torch.equal(before[name], after[name]) for name in kept)
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            assert (tmp_path / "quantized" / file.name).read_bytes() == file.read_bytes()
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert config == json.loads((folder / "config.json").read_text())


def test_first_and_last_layer_of_int4_have_8_bits(original, tmp_path):
    write(original, tmp_path / "quantized")
    tensors = read_tensors(tmp_path / "quantized")
    groups = json.loads((tmp_path / "quantized" / "config.json").read_text())["quantization_config"]["config_groups"]
    (target,) = groups["group_0"]["targets"]
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight_scale"):
            module = name.removesuffix(".weight_scale")
            is_outer = re.match(target.removeprefix("re:"), module) is not None
            assert is_outer == (tensor.shape[1] == 1) == (".layers.1." not in module)


def test_group_size_sets_number_of_scales(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "original", num_hidden_layers=1, intermediate_size=128)
    write(folder, tmp_path / "quantized", Quantization(4, 64))
    scales = {t.shape[1] for name, t in read_tensors(tmp_path / "quantized").items() if name.endswith("weight_scale")}
    assert scales == {1, 2}  # 64 and 128 inputs


def test_group_size_that_does_not_divide_inputs_is_rejected(original, tmp_path):
    with pytest.raises(ConfigError, match=r"size 64 does not divide the 96 inputs of .*down_proj") as caught:
        write(original, tmp_path / "quantized", Quantization(4, 64))
    assert caught.value.param == "group_size"
    assert not (tmp_path / "quantized").exists()


def test_number_of_outputs_need_not_be_multiple_of_eight(tmp_path):
    """The zero points of eight outputs share an int32."""
    folder = tiny.write_checkpoint(tmp_path / "original", num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("k_proj.weight"))
    tensors[name] = tensors[name][:12].clone()
    save_file(tensors, folder / "model.safetensors")
    write(folder, tmp_path / "quantized")
    assert read_tensors(tmp_path / "quantized")[f"{name}_zero_point"].shape == (2, 2)
    assert torch.equal(dequantize(tmp_path / "quantized")[name], quantize(tensors[name], 32).dequantize(torch.float32))


def test_shards_keep_names_and_index(original, tmp_path):
    tensors = load_file(original / "model.safetensors")
    (original / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, original / file)
    index = {name: file for file, part in halves.items() for name in part}
    (original / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    written = write(original, tmp_path / "quantized")
    index = json.loads((tmp_path / "quantized" / "model.safetensors.index.json").read_text())
    for file in halves:
        stored = load_file(tmp_path / "quantized" / file)
        assert set(stored) == {name for name, location in index["weight_map"].items() if location == file}
    total = sum(tensor.nbytes for tensor in read_tensors(tmp_path / "quantized").values())
    assert index["metadata"]["total_size"] == written.quantized_bytes == total
    assert written.omitted == ()


def test_other_weights_and_folders_are_not_copied(original, tmp_path):
    (original / "pytorch_model.bin").write_bytes(b"pickle")
    (original / "onnx").mkdir()
    (original / "README.md").write_text("Read me.")
    written = write(original, tmp_path / "quantized")
    assert written.omitted == ("onnx", "pytorch_model.bin")
    assert (tmp_path / "quantized" / "README.md").read_text() == "Read me."
    assert not (tmp_path / "quantized" / "pytorch_model.bin").exists()


@pytest.mark.parametrize("existing", ["file", "folder", "link"])
def test_existing_output_is_not_overwritten(original, existing, tmp_path):
    output = tmp_path / "quantized"
    if existing == "file":
        output.write_text("mine")
    elif existing == "folder":
        output.mkdir()
        (output / "mine").touch()
    else:
        output.symlink_to(tmp_path / "missing")
    with pytest.raises(ConfigError, match="exists, and is not overwritten"):
        write(original, output)


def test_empty_output_folder_is_used(original, tmp_path, monkeypatch):
    (tmp_path / "quantized").mkdir()
    monkeypatch.chdir(tmp_path / "quantized")
    write(original, Path())
    assert (tmp_path / "quantized" / "config.json").exists()


def test_failure_leaves_no_output(original, tmp_path):
    """A tensor is not finite: this is found after a part of the files was written."""
    tensors = load_file(original / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.2.mlp.down_proj.weight"))
    tensors[name][3, 5] = torch.inf
    save_file(tensors, original / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"Tensor '{name}' has values that are not finite"):
        write(original, tmp_path / "quantized")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["original"]


def test_draft_of_another_process_is_kept(original, tmp_path):
    draft = tmp_path / ".quantized.partial"
    draft.mkdir()
    with pytest.raises(ConfigError, match=r"\.quantized\.partial exists: another process is writing it, or was killed"):
        write(original, tmp_path / "quantized")
    assert draft.exists()


def test_missing_tensor_is_named(original, tmp_path):
    tensors = load_file(original / "model.safetensors")
    del tensors[next(name for name in tensors if name.endswith("layers.1.self_attn.k_proj.weight"))]
    save_file(tensors, original / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.1\.self_attn\.k_proj\.weight'"):
        write(original, tmp_path / "quantized")


def test_progress_counts_tensors(original, tmp_path):
    quantizer, calls = CheckpointQuantizer(load_spec(original), INT8), []
    quantizer.write(tmp_path / "quantized", lambda: calls.append(1))
    assert len(calls) == quantizer.num_tensors == len(read_tensors(original))


def test_written_safetensors_equal_those_of_library(tmp_path):
    tensors = {
        "matrix": torch.randn(3, 5).bfloat16(), "scalar": torch.tensor(7), "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False]), "transposed": torch.arange(6).view(2, 3).T,
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
    }  # fmt: skip
    infos = [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_safetensors(tmp_path / "file.safetensors", infos, tensors.values())
    loaded = load_file(tmp_path / "file.safetensors")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].float(), tensor.float())


def test_writer_does_not_keep_tensors(tmp_path):
    def tensors():
        written = []
        for index in range(4):
            tensor = torch.full((8,), index)
            written.append(weakref.ref(tensor))
            yield tensor
            del tensor
            assert all(reference() is None for reference in written)

    write_safetensors(tmp_path / "file", [TensorInfo(str(i), torch.int64, (8,)) for i in range(4)], tensors())
    assert {name: tensor[0].item() for name, tensor in load_file(tmp_path / "file").items()} == {
        "0": 0, "1": 1, "2": 2, "3": 3
    }  # fmt: skip
