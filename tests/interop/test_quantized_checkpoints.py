"""Quantized checkpoints in vLLM and in transformers: those that `quantize` wrote, and published layouts.

For the former, the reference is this project's engine with the dequantized weights in float32, which
`tests.dequantizer` reads.
"""

from __future__ import annotations

import base64
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from benchmarks.environments import SetupMissing
from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.kernels import INT4, INT8
from dashinfer_vlm_core.models.checkpoint import find_model
from dashinfer_vlm_core.models.checkpoint_quantizer import CheckpointQuantizer
from dashinfer_vlm_core.plugins import load_plugins
from tests import tiny
from tests.dequantizer import write_dequantized
from tests.interop import peers
from tests.quantized_checkpoints import LAYOUTS, layouts, write_config, write_quantized
from tests.qwen3_vl import tiny_qwen3

pytestmark = pytest.mark.interop

TOKENS = 32
GAIN, RIDGE = 8.0, 4.0
"""What is added to the logits of certain predictions, and the strength of the regularization."""
MIN_MARGIN = 0.6
"""Required difference of the two largest log-probabilities, well above vLLM's rounding errors in bfloat16."""
MAX_DIFFERENCE = 0.4
"""Maximum difference of a log-probability: vLLM rounds to bfloat16, and the inputs of 8-bit layers to 8 bits."""

TEXT = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
"""vLLM's kernels for CPUs require multiples of 32 inputs and outputs, and heads of at least 32."""
ROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 6, 6]}
INTERLEAVED = {**ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}

FP8_SIZES = {**TEXT, "head_dim": 32, "rope_parameters": INTERLEAVED}
"""transformers requires multiples of the blocks."""

PICTURE = Path(__file__).parents[2] / "examples" / "pictures" / "three.png"


QUESTIONS = ("Which shapes do you know?", "What do you see?")
CERTAIN_QUESTIONS = {"qwen2_vl": ("Which colors do you know?", "Describe the image in detail.")}
"""Questions whose completions are certain in the bundled model with 4 and with 8 bits."""


def conversations(questions=QUESTIONS):
    """Return two prompts: a question, and one about an image."""
    url = f"data:image/png;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}"
    text, question = questions
    picture = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    return [[{"role": "user", "content": content}] for content in (text, picture)]


def demo(_folder):
    """The bundled model, whose predictions are certain."""
    return find_model("demo", registered=load_plugins().models)


def random_model(write, folder, **options):
    """Write a random model in bfloat16 whose predictions are certain."""
    return make_certain(tiny.to_bfloat16(write(folder, **TEXT, **options)))


def make_certain(folder):
    """Change the output layer of a checkpoint so that it predicts the same tokens with large margins."""
    with Engine(EngineConfig(model=str(folder), dtype="float32", device="cpu")) as engine:
        completions = [greedy(engine, messages) for messages in conversations()]
    file = folder / "model.safetensors"
    tensors = load_file(file)
    head = tensors["lm_head.weight"].float()
    logits = torch.cat([logits for _, _, logits in completions])
    # Add GAIN to the logits of the greedy tokens, and nothing to others: ridge regression on the hidden states.
    hidden = torch.linalg.lstsq(head, logits.T).solution.T
    targets = GAIN * F.one_hot(logits.argmax(1), len(head)).float()
    ridge = hidden.T @ hidden + RIDGE * torch.eye(hidden.shape[1])
    tensors["lm_head.weight"] = (head + torch.linalg.solve(ridge, hidden.T @ targets).T).bfloat16()
    save_file(tensors, file, {"format": "pt"})
    return folder


MODELS = {
    "qwen2_vl": demo,
    "qwen2_5_vl": partial(random_model, tiny.write_qwen2_5_vl, rope_parameters=ROPE, seed=3),
    "qwen3_vl": partial(random_model, tiny_qwen3.write_checkpoint, rope_parameters=INTERLEAVED, head_dim=32, seed=3),
}


@pytest.fixture(params=MODELS)
def family(request):
    return request.param


@pytest.fixture
def prompts(family):
    return conversations(CERTAIN_QUESTIONS.get(family, QUESTIONS))


@pytest.fixture
def original(family, tmp_path):
    return MODELS[family](tmp_path / "original")


@pytest.fixture(params=[INT4, INT8], ids=["int4", "int8"])
def quantized(request, original, tmp_path):
    spec = load_plugins().family_of(original).load_spec(original)
    return CheckpointQuantizer(spec, request.param).write(tmp_path / "quantized").folder


@pytest.fixture
def reference(quantized, tmp_path):
    """An engine with the dequantized weights."""
    folder = write_dequantized(quantized, tmp_path / "dequantized")
    with Engine(EngineConfig(model=str(folder), dtype="float32", device="cpu")) as engine:
        yield engine


def greedy(engine, messages):
    """Return the tokens of prompt and completion, and the logits [tokens, vocab_size]."""
    body = {"messages": messages, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    generation = engine.submit(body).result()
    (token_ids,) = generation.token_ids
    return list(generation.prompt_token_ids), list(token_ids), torch.from_numpy(engine.logits(body, token_ids))


def test_vllm_generates_same_tokens(vllm, quantized, reference, prompts):
    compare_with_vllm(vllm, quantized, reference, prompts)


@pytest.mark.parametrize("name", ["awq", "gptq", "int4", "int8"])
def test_vllm_generates_same_tokens_from_published_layouts(vllm, name, tmp_path):
    """The layouts for which vLLM has kernels for CPUs."""
    source = tiny.to_bfloat16(tiny.write_qwen2_5_vl(tmp_path / "source", **TEXT, rope_parameters=ROPE, seed=3))
    folder = make_certain(write_quantized(source, tmp_path, LAYOUTS[name]).quantized)
    with Engine(EngineConfig(model=str(folder), dtype="float32", device="cpu")) as engine:
        compare_with_vllm(vllm, folder, engine, conversations())


def compare_with_vllm(vllm, folder, reference, prompts):
    request = {"model": str(folder), "conversations": prompts, "max_tokens": TOKENS}
    for messages, output in zip(prompts, vllm.run("generate_vllm.py", request), strict=True):
        prompt, token_ids, logits = greedy(reference, messages)
        first, second = logits.log_softmax(1).topk(2).values.T
        assert float((first - second).min()) > MIN_MARGIN  # otherwise, the test would depend on rounding errors
        assert output["prompt_token_ids"] == prompt
        assert output["token_ids"] == token_ids
        assert float((torch.tensor(output["logprobs"]) - first).abs().max()) < MAX_DIFFERENCE


def test_transformers_predicts_same_tokens(vllm, quantized, reference, prompts):
    """transformers is in the environment of vLLM."""
    prompt, token_ids, logits = greedy(reference, prompts[0])
    found = score(vllm, quantized, prompt, token_ids, "bfloat16")
    assert found.argmax(1).tolist() == token_ids
    first, expected = (part.log_softmax(1).max(1).values for part in (found, logits))
    assert float((first - expected).abs().max()) < MAX_DIFFERENCE


def test_transformers_dequantizes_fp8_to_same_logits(tmp_path):
    """On a CPU. transformers 5.23 ignores the scales of experts in one tensor, so there are none here."""
    try:
        peer = peers.transformers()
    except SetupMissing as error:
        pytest.skip(f"accelerate, which transformers needs for FP8, is not available: {error}")
    source = tiny_qwen3.write_checkpoint(tmp_path / "source", **FP8_SIZES)
    layout = layouts(group=32, block=(32, 32))["fp8-block"]
    folder = write_quantized(source, tmp_path, layout).quantized
    write_config(folder, quantization_config=layout.config | {"modules_to_not_convert": ["model.visual", "lm_head"]})
    with Engine(EngineConfig(model=str(folder), dtype="float32", device="cpu")) as engine:
        prompt, token_ids, logits = greedy(engine, conversations()[0])
    found = score(peer, folder, prompt, token_ids, "float32")
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-3)


def score(peer, folder, prompt, token_ids, dtype):
    """Return transformers' logits of the tokens of a completion."""
    file = folder.with_name("logits.npy")
    request = {"model": str(folder), "token_ids": prompt + token_ids, "dtype": dtype, "logits": str(file)}
    peer.run("score_transformers.py", request)
    return torch.from_numpy(np.load(file))[len(prompt) - 1 : -1]
