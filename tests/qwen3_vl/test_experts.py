"""A mixture of experts equals transformers', and a row's result does not depend on the other rows."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextSparseMoeBlock

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.kernels.cuda import CudaKernels
from dashinfer_vlm_core.kernels.experts import GroupedExperts, MixtureOfExperts
from dashinfer_vlm_core.kernels.layers import ReferenceDecoderLayers
from dashinfer_vlm_core.kernels.quantization import INT8
from dashinfer_vlm_core.kernels.streams import HostCopy
from dashinfer_vlm_core.kernels.torch_kernels import TorchKernels
from dashinfer_vlm_core.kernels.types import Activation, Attention, DecoderLayer, DecoderShape, Mlp, Norm
from dashinfer_vlm_core.models.weights import Weights
from dashinfer_vlm_qwen3_vl import Qwen3VL
from dashinfer_vlm_torch.kv_cache import KVCache
from dashinfer_vlm_torch.model import TextModel
from dashinfer_vlm_torch.proposer import Draft
from dashinfer_vlm_torch.runner import ModelRunner
from dashinfer_vlm_torch.sampler import LaunchedArgmax
from dashinfer_vlm_torch.sequence import ScheduledChunk, SequenceState
from tests.cases import cases
from tests.kernels import load_fastest, needs_native
from tests.plugins.oracle import prompt
from tests.waiting import HANG

HIDDEN, INNER, COUNT, CHOSEN = 64, 48, 7, 3


@pytest.fixture
def native():
    return load_fastest()


@pytest.fixture(scope="module")
def block():
    """Return transformers' layer with random weights."""
    config = Qwen3VLMoeTextConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=COUNT, num_experts_per_tok=CHOSEN
    )
    torch.manual_seed(0)
    block = Qwen3VLMoeTextSparseMoeBlock(config).eval()
    with torch.no_grad():
        for weight in block.parameters():
            weight.normal_(std=1.5 * weight.shape[-1] ** -0.5)
    return block


def mixture(kernels, block, *, dtype=torch.float32, int8=False):
    experts = block.experts
    return MixtureOfExperts(
        kernels.linear(block.gate.weight.data.to(dtype), fp32_output=True),
        [
            Mlp(
                kernels.linear(gate_up.to(dtype), activation=Activation.SILU_GATE, quantization=INT8 if int8 else None),
                kernels.linear(down.to(dtype), quantization=INT8 if int8 else None),
            )
            for gate_up, down in zip(experts.gate_up_proj.data, experts.down_proj.data, strict=True)
        ],
        CHOSEN,
    )


def grouped(kernels, block, *, dtype=torch.float32):
    experts = block.experts
    return GroupedExperts(
        kernels.linear(block.gate.weight.data.to(dtype), fp32_output=True),
        experts.gate_up_proj.data.to(dtype),
        experts.down_proj.data.to(dtype),
        CHOSEN,
    )


def rows(count):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count))


@cases("create", [mixture, grouped])
@cases("count", [0, 1, 2, 40])
def test_equals_transformers(block, count, create):
    x, total = rows(count), torch.ones(count, HIDDEN)
    create(TorchKernels("cpu"), block).add_to(total, x)
    with torch.no_grad():
        expected = 1 + block(x[None])[0] if count else total
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-5)


@needs_native
@pytest.mark.parametrize("int8", [False, True])
def test_row_does_not_depend_on_the_others(native, block, int8):
    experts, x = mixture(native, block, dtype=torch.bfloat16, int8=int8), rows(60).bfloat16()
    together = torch.zeros_like(x)
    experts.add_to(together, x)
    for part in (slice(0, 1), slice(17, 20), slice(30, 60)):
        alone = torch.zeros_like(x[part])
        experts.add_to(alone, x[part].clone())
        assert torch.equal(alone, together[part])


@needs_native
@pytest.mark.parametrize("int8", [False, True])
def test_c_kernels_are_close_to_float32(native, block, int8):
    """Rows whose last two experts are about equally likely may get another expert; few do."""
    x, found, expected = rows(60), torch.zeros(60, HIDDEN).bfloat16(), torch.zeros(60, HIDDEN)
    mixture(native, block, dtype=torch.bfloat16, int8=int8).add_to(found, x.bfloat16())
    mixture(TorchKernels("cpu"), block).add_to(expected, x)
    errors = (found.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < 0.03


@needs_native
def test_layers_with_experts_use_reference_layers(native, block):
    heads = {"qkv": (3 * HIDDEN, HIDDEN), "output": (HIDDEN, HIDDEN)}
    linears = {name: native.linear(torch.zeros(shape).bfloat16()) for name, shape in heads.items()}
    norm = Norm(torch.ones(HIDDEN).bfloat16())
    layer = DecoderLayer(
        input_norm=norm,
        mixer=Attention(**linears),
        mlp_norm=norm,
        mlp=mixture(native, block, dtype=torch.bfloat16),
    )
    assert isinstance(native.decoder_layers([layer], DecoderShape(1, 1, HIDDEN, 1e-6)), ReferenceDecoderLayers)


def first_tokens(folder):
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", media_workers=0, kv_cache_mib=64)
    with Engine(config) as engine:
        request = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8}
        return list(engine.submit(request).result(timeout=HANG).token_ids[0])


def test_weights_stored_in_either_orientation_are_read_alike(moe, tmp_path):
    """Published checkpoints store [experts, inputs, outputs]; transformers 5 computes with the other order."""
    for file in moe.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(moe / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if ".experts." in name}
    assert json.loads((moe / "config.json").read_text())["text_config"]["mlp_only_layers"] == [1]
    assert {shape[0] for shape in shapes.values()} == {6}
    assert len(shapes) == 2 * 3
    turned = {
        name: tensor.transpose(1, 2).contiguous() if name in shapes else tensor for name, tensor in tensors.items()
    }
    save_file(turned, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert first_tokens(tmp_path) == first_tokens(moe)


class GroupingKernels(CudaKernels):
    """The kernels for CUDA, which group experts also where torch loops over them."""

    def groups_experts(self, dtype, inputs):
        return True


class LogitsRunner(ModelRunner):
    """Keeps the logits of the last step."""

    def _sample(self, x, batch):
        self.logits = self._model.logits(x)
        ids = self.logits.argmax(dim=-1)
        return LaunchedArgmax(ids, HostCopy(ids))


@torch.inference_mode()
def logits(folder, kernels):
    spec = Qwen3VL().load_spec(folder)
    with Weights(spec.folder, spec.tensor_renames) as weights:
        model = TextModel(weights, spec.text, kernels, device="cpu", dtype=torch.float32, quantization=None)
    runner = LogitsRunner(model, KVCache(spec.text, 40, device="cpu", dtype=torch.float32))
    sequence = SequenceState(prompt(1, 30), ())
    sequence.first_row = 0
    runner.executor.run(lambda: runner.step([ScheduledChunk(sequence, 0, sequence.prompt_length, Draft((5, 6)))]))
    return model, runner.logits


def test_grouped_experts_are_read_and_used(moe):
    (looped, expected), (model, found) = (logits(moe, kernels("cpu")) for kernels in (CudaKernels, GroupingKernels))
    assert (looped.loops_over_experts, model.loops_over_experts) == (True, False)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_grouped_experts_read_nothing_from_the_device(block):
    """On the device `meta`, which has no values, reading one is an error. On a GPU, it would be a wait."""
    experts, x = (
        grouped(TorchKernels("cpu"), copy.deepcopy(block).to("meta"), dtype=torch.bfloat16),
        rows(3).bfloat16().to("meta"),
    )
    total = torch.zeros_like(x)
    experts.add_to(total, x)
    assert total.shape == x.shape
