"""The cache of converted models."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dashinfer_vlm_core.errors import CheckpointError, SetupError
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from dashinfer_vlm_dashinfer.convert import ConvertedModel, WeightFormat, convert
from dashinfer_vlm_dashinfer.environment import check_space

pytestmark = pytest.mark.dashinfer

FLOAT32 = WeightFormat(dtype="float32")


@pytest.fixture
def spec(oracle):
    return read_spec(oracle.folder)


def made(path):
    return path.stat().st_mtime_ns


def test_model_is_converted_once_and_again_if_damaged(spec, environment, tmp_path):
    first = convert(spec, FLOAT32, environment=environment, cache=tmp_path)
    written, content = made(first.weights), first.weights.read_bytes()
    assert convert(spec, FLOAT32, environment=environment, cache=tmp_path) == first
    assert made(first.weights) == written
    first.weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert convert(spec, FLOAT32, environment=environment, cache=tmp_path) == first
    assert first.weights.read_bytes() == content
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".lock"]


def test_unwritable_cache_is_used_and_reported(spec, environment, tmp_path):
    """root can write anywhere, so a folder replaces the lock, and a file the folder of a conversion."""
    first = convert(spec, FLOAT32, environment=environment, cache=tmp_path)
    (lock,) = tmp_path.glob("*.lock")
    lock.unlink()
    lock.mkdir()
    assert convert(spec, FLOAT32, environment=environment, cache=tmp_path) == first
    first.weights.unlink()
    with pytest.raises(SetupError, match=f"The cache folder {tmp_path} cannot be written to: Is a directory"):
        convert(spec, FLOAT32, environment=environment, cache=tmp_path)
    lock.rmdir()
    lock.with_suffix(".partial").write_text("")
    with pytest.raises(SetupError, match=f"The cache folder {tmp_path} cannot be written to: File exists"):
        convert(spec, FLOAT32, environment=environment, cache=tmp_path)


def test_concurrent_conversions_write_once(spec, environment, tmp_path):
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(convert, spec, FLOAT32, environment=environment, cache=tmp_path) for _ in range(2)]
        first, second = (future.result() for future in both)
    assert first == second
    assert len(list(tmp_path.glob("*.lock"))) == 1


def test_other_weights_have_separate_entry(spec, environment, tmp_path):
    first = convert(spec, FLOAT32, environment=environment, cache=tmp_path)
    os.utime(spec.folder / "model.safetensors", ns=(1, 1))
    assert convert(spec, FLOAT32, environment=environment, cache=tmp_path).graph.parent != first.graph.parent


def test_other_format_has_separate_entry(spec, full_environment, tmp_path):
    first = convert(spec, FLOAT32, environment=full_environment, cache=tmp_path)
    half = convert(spec, WeightFormat(dtype="bfloat16"), environment=full_environment, cache=tmp_path)
    assert half.weights.stat().st_size < 0.6 * first.weights.stat().st_size
    assert half.graph.parent != first.graph.parent


@pytest.mark.parametrize("form", [WeightFormat(dtype="bfloat16"), WeightFormat(dtype="float32", quantization="int8")])
def test_cpu_only_environment_converts_to_float32_alone(spec, environment, tmp_path, form):
    if not environment.cpu_only:
        pytest.skip("DashInfer is installed with torch here.")
    with pytest.raises(SetupError, match="it converts only to float32, without quantization"):
        convert(spec, form, environment=environment, cache=tmp_path)


CONVERTED_BY_TORCH = "a9788e609af97e7f1e554f0cbb1d8c0b7ca6a2aea3831745318efb535c1cd4be"
"""SHA-256 of the weights of the next test, as the full environment writes them with torch 2.6."""


def test_weights_equal_those_written_by_torch(spec, environment, tmp_path):
    """With bfloat16 weights that do not depend on a library's random numbers."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(spec.folder, checkpoint)
    stored = load_file(checkpoint / "model.safetensors")
    bits = {name: torch.arange(stored[name].numel()) * 40503 % 0x7F80 for name in sorted(stored)}
    weights = {name: bits[name].to(torch.int16).view(torch.bfloat16).reshape(stored[name].shape) for name in bits}
    save_file(weights, checkpoint / "model.safetensors")
    converted = convert(read_spec(checkpoint), FLOAT32, environment=environment, cache=tmp_path / "cache")
    assert hashlib.sha256(converted.weights.read_bytes()).hexdigest() == CONVERTED_BY_TORCH


@pytest.mark.parametrize(("quantization", "share"), [("int8", 0.6), ("uint4", 0.35)])
def test_weights_are_quantized_when_written(spec, full_environment, tmp_path, quantization, share):
    """The embedding table is not quantized."""
    form = WeightFormat(dtype="bfloat16", quantization=quantization)
    small = convert(spec, form, environment=full_environment, cache=tmp_path)
    stored = (spec.folder / "model.safetensors").stat().st_size
    assert small.weights.stat().st_size < share * stored / 2


def test_failed_conversion_leaves_nothing_and_reports_output(spec, environment, tmp_path):
    elsewhere = replace(environment, python=Path(sys.executable))
    with pytest.raises(SetupError, match=r"(?s)exit status 1.*ImportError"):
        convert(spec, FLOAT32, environment=elsewhere, cache=tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_disk_space_is_checked_first(tmp_path):
    with pytest.raises(SetupError, match=r"Converting the model needs 1000000000\.0 GB"):
        check_space(tmp_path, 10**18, "Converting the model")


def test_checkpoint_without_layers_is_named(spec, environment, tmp_path):
    longer = replace(spec, folder=tmp_path, text=replace(spec.text, layers=3 * spec.text.layers[:1]))
    (tmp_path / "model.safetensors").symlink_to(spec.folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no tensor 'model.layers.2.\*'"):
        convert(longer, FLOAT32, environment=environment, cache=tmp_path / "cache")


def test_cache_paths(tmp_path):
    assert ConvertedModel.at(tmp_path).graph == tmp_path / "model.asgraph"
