"""`quantize` and `divergence`: written checkpoints, their precision, and rejected options."""

from __future__ import annotations

import json

import click
import pytest
import torch
from safetensors.torch import load_file

from dashinfer_vlm_cli.quantize import load_spec
from dashinfer_vlm_cli.recorded_engine import RecordedEngine, Request
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import CheckpointError, ConfigError
from dashinfer_vlm_core.kernels.quantization import quantize
from dashinfer_vlm_core.models.quantizing import rotation
from dashinfer_vlm_core.models.quantizing.checkpoint_quantizer import CheckpointQuantizer
from dashinfer_vlm_core.models.weights import Weights
from dashinfer_vlm_core.plugins import load_plugins
from tests.cases import cases
from tests.core.test_reasoning import TEMPLATE
from tests.pictures_of_requests import picture_request
from tests.pooling.checkpoints import write_embedding, write_reranker
from tests.tiny import to_bfloat16, write_checkpoint

NAME = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return to_bfloat16(write_checkpoint(tmp_path_factory.mktemp("original"), num_hidden_layers=3))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "requests.jsonl"
    bodies = [picture_request(text) for text in ("Describe the picture.", "What is in the center?", "Which color?")]
    bodies[0] |= {"model": "another", "max_completion_tokens": 5}  # a file that was written for another server
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def weight_of(folder, module, shape):
    spec = load_plugins().load_spec(folder)
    weights = Weights(spec.folder, spec.tensor_renames, spec.quantization)
    return weights.matrix([module], [shape[0]], shape[1], device="cpu", dtype=torch.bfloat16)


def test_written_weights_are_the_rounded_ones(run, original, tmp_path):
    target = tmp_path / "out"
    assert f"{target}: 21 matrices quantized" in run("quantize", original, "-o", target).stdout
    stored = next(name for name in load_file(original / "model.safetensors") if name.endswith("1.mlp.down_proj.weight"))
    weight = load_file(original / "model.safetensors")[stored]
    expected = quantize(weight, 32)
    found = weight_of(target, NAME, weight.shape)
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.dequantize(torch.float32), expected.dequantize(torch.float32))
    assert weight_of(target, "model.layers.0.mlp.down_proj", weight.shape).bits == 8


def test_groups_without_kernels_are_rejected(original):
    with pytest.raises(ValueError, match="`group` must be one of 32, 64, 128, got 48"):
        CheckpointQuantizer(load_plugins().load_spec(original), 48)


@pytest.mark.parametrize("write", [write_embedding, write_reranker])
def test_pooling_model_stays_one(run, original, tmp_path, write):
    source = write(original, tmp_path / "source")
    run("quantize", source, "-o", tmp_path / "out")
    expected, found = (load_spec(EngineConfig(model=str(tmp_path / name))).pooling for name in ("source", "out"))
    assert expected is not None
    assert found == expected


def test_calibration_and_rotation_reduce_divergence(run, original, data, tmp_path):
    found = {}
    for name, options in {"plain": (), "best": ("--rotate", "--calibrate", data)}.items():
        run("quantize", original, "-o", tmp_path / name, *options)
        output = run("divergence", tmp_path / name, "--original", original, "--data", data, "--json").stdout
        found[name] = json.loads(output)
    assert found["plain"]["tokens"] == found["best"]["tokens"] > 3
    assert 0 < found["best"]["mean_kl"] < found["plain"]["mean_kl"]


def test_model_does_not_diverge_from_itself(run, original, data):
    output = run("divergence", original, "--original", original, "--data", data).stdout
    assert "100.0% of" in output
    assert "0.00e+00 nats on average" in output


@pytest.mark.parametrize("options", [("--quantization", "int8"), ("--vision-quantization", "int8")])
def test_weights_that_are_rounded_at_start_diverge(run, original, data, options):
    output = run("divergence", original, "--original", original, "--data", data, "--json", *options).stdout
    assert 0 < json.loads(output)["mean_kl"] < 0.03


def test_reasoning_is_compared(original, tmp_path):
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    request = Request("first", {"messages": [{"role": "user", "content": "Why?"}]})
    with RecordedEngine.open(EngineConfig(model=str(original), chat_template=tmp_path / "template.jinja")) as opened:
        answer = opened.answer(request)
        assert answer.message["reasoning_content"]
        assert len(opened.hidden(request, answer)) == answer.length


@cases(
    ("options", "message"),
    [
        (("--quantization", "int8"), "`quantization` int8 rounds weights while they are loaded"),
        (("--group-size", "64"), "`--group-size` 64 does not divide the 96 inputs"),
    ],
)
def test_options_that_do_not_fit_are_rejected(run, original, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        run("quantize", original, "-o", tmp_path / "out", *options)
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_kept(run, original, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="exists, and is not overwritten"):
        run("quantize", original, "-o", tmp_path)
    assert (tmp_path / "file").exists()


def test_quantized_checkpoint_is_rejected(run, original, tmp_path):
    run("quantize", original, "-o", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"quantized weights already \(compressed-tensors\)"):
        run("quantize", tmp_path / "out", "-o", tmp_path / "again")


def test_failed_request_is_named(run, original, tmp_path):
    body = {"messages": [{"role": "user", "content": "Hello"}], "repetition_penalty": -1}
    line = {"custom_id": "first", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "data.jsonl").write_text(json.dumps(line))
    with pytest.raises(ConfigError, match=r"request 'first' failed: .*repetition_penalty"):
        run("quantize", original, "-o", tmp_path / "out", "--calibrate", tmp_path / "data.jsonl")
    assert not (tmp_path / "out").exists()


def test_requests_are_checked_before_the_rotation(run, original, tmp_path, monkeypatch):
    monkeypatch.setattr(rotation, "CheckpointRotator", None)
    (tmp_path / "data.jsonl").write_text("{")
    with pytest.raises(ConfigError, match="line 1 is not valid JSON"):
        run("quantize", original, "-o", tmp_path / "out", "--rotate", "--calibrate", tmp_path / "data.jsonl")


def test_output_is_required(run, original):
    result = run("quantize", original)
    assert result.exit_code == 2
    assert "Missing option '-o' / '--output'" in click.unstyle(result.stderr)
