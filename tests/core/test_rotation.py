"""Rotated hidden states: matrices, and whole checkpoints, whose predictions stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dashinfer_vlm_cli.divergence import compare
from dashinfer_vlm_cli.quantize import load_spec
from dashinfer_vlm_cli.recorded_engine import RecordedEngine, Request, record_logits
from dashinfer_vlm_core import VLM, Engine, EngineConfig, LoRARequest
from dashinfer_vlm_core.errors import ConfigError, InvalidParameter
from dashinfer_vlm_core.kernels.quantization import quantize
from dashinfer_vlm_core.models.pooling import PoolingSpec
from dashinfer_vlm_core.models.quantizing.gptq import Compensator
from dashinfer_vlm_core.models.quantizing.rotation import CheckpointRotator, hadamard, rotation
from tests.cases import cases
from tests.pictures_of_requests import picture_request
from tests.qwen3_5 import tiny_qwen3_5
from tests.qwen3_vl import tiny_qwen3
from tests.tiny import write_checkpoint, write_qwen2_5_vl

WRITERS = {
    "qwen2_vl": write_checkpoint,
    "tied": lambda folder: write_checkpoint(folder, tie_word_embeddings=True),
    "qwen2_5_vl": write_qwen2_5_vl,
    "qwen3_vl": tiny_qwen3.write_checkpoint,
    "qwen3_5": tiny_qwen3_5.write_checkpoint,
}


def heavy_tailed(outputs, inputs):
    """Return weights with Student's t distribution of 3 degrees of freedom, some inputs of which are larger."""
    torch.manual_seed(0)
    weight = torch.distributions.StudentT(3.0).sample((outputs, inputs))
    weight[:, ::37] *= 8
    return weight


def config_of(folder):
    return EngineConfig(model=str(folder), device="cpu", media_workers=0)


def rotate(folder, target):
    target.mkdir()
    CheckpointRotator(load_spec(config_of(folder))).write(target)
    return target


@pytest.fixture(scope="module")
def rotated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rotated")
    return rotate(write_checkpoint(folder / "original"), folder / "rotated")


@cases("size", [1, 8, 12, 96, 256])
def test_matrix_is_orthogonal_and_even(size):
    matrix = rotation(size, 0).double()
    assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-6)
    assert hadamard(size).abs().max() * size**0.5 < 2**0.5 + 1e-9


@cases("group", [32, 128])
def test_rotation_reduces_errors_of_heavy_tailed_weights(group):
    weight = heavy_tailed(64, 512)
    matrix = rotation(512, 0)
    plain = (quantize(weight, group).dequantize(torch.float32) - weight).norm()
    rotated = (quantize(weight @ matrix, group).dequantize(torch.float32) @ matrix.T - weight).norm()
    assert rotated < 0.8 * plain


@cases("count", [4096, 20])
def test_compensation_reduces_errors_of_outputs(count):
    """With correlated inputs, also with fewer of them than columns."""
    weight = heavy_tailed(48, 256)
    x = torch.randn(count, 32) @ torch.randn(32, 256) + 0.1 * torch.randn(count, 256)
    found = Compensator(x.T @ x).quantize(weight, 64)
    found.check()
    errors = [(x @ (one.dequantize(torch.float32) - weight).T).norm() for one in (found, quantize(weight, 64))]
    assert errors[0] < 0.5 * errors[1]


def test_compensation_without_inputs_rounds():
    weight = heavy_tailed(16, 64)
    assert torch.equal(Compensator(torch.zeros(64, 64)).quantize(weight, 32).zeros, quantize(weight, 32).zeros)


@pytest.mark.parametrize("name", WRITERS)
def test_predictions_stay_the_same(name, tmp_path):
    original = WRITERS[name](tmp_path / "original")
    target = rotate(original, tmp_path / "rotated")
    request = Request("request", picture_request("Describe the picture."))
    with RecordedEngine.open(config_of(original)) as opened:
        answers = [opened.answer(request)]
        expected = record_logits(opened, load_spec(config_of(original)), [request], answers)
    with RecordedEngine.open(config_of(target)) as opened:
        found = record_logits(opened, load_spec(config_of(target)), [request], answers)
    assert not torch.allclose(expected.hidden[0], found.hidden[0], atol=1e-2)
    assert torch.allclose(expected.logits(0), found.logits(0), atol=2e-3)
    result = compare(expected, found)
    assert (result.same_token, result.tokens) == (1, answers[0].length)


@cases(
    ("changes", "reason"),
    [
        ({"rotated": True}, "rotated already"),
        ({"visual_outputs": ()}, "does not name the layers that write visual tokens"),
        ({"pooling": PoolingSpec(task="embed", instruction="")}, "its task is embed"),
    ],
)
def test_what_cannot_be_rotated_is_rejected(tiny_checkpoint, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        CheckpointRotator(replace(load_spec(config_of(tiny_checkpoint)), **changes))


def test_mixture_of_experts_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="mixture of experts"):
        CheckpointRotator(load_spec(config_of(tiny_qwen3.write_checkpoint(tmp_path / "moe", moe=True))))


@cases(("options", "param"), [({"lora": ["a=b"]}, "lora"), ({"task": "embed"}, "task")])
def test_rotated_model_rejects_what_reads_hidden_states(rotated, options, param):
    config = EngineConfig(model=str(rotated), device="cpu", media_workers=0, **options)
    with pytest.raises(ConfigError, match="are rotated") as caught:
        Engine(config).start()
    assert caught.value.param == param


def test_rotated_model_rejects_adapters_of_requests(rotated):
    with VLM(engine=Engine(config_of(rotated))) as vlm, pytest.raises(InvalidParameter, match="are rotated"):
        vlm.chat([{"role": "user", "content": "Hello"}], use_tqdm=False, lora_request=LoRARequest("a", 1, "b"))
