"""Published layouts of quantized checkpoints in vLLM and in transformers: both predict what this engine predicts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from benchmarks.environments import SetupMissing
from dashinfer_vlm_core import Engine, EngineConfig
from tests import tiny
from tests.conversations import as_openai, user
from tests.interop import interpreters
from tests.quantized_checkpoints import LAYOUTS, layouts, write_config, write_quantized
from tests.qwen3_vl import tiny_qwen3
from tests.transformers_engine import TransformersEngine

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

IMAGE = Path(__file__).parents[2] / "examples" / "pictures" / "three.png"


QUESTIONS = ("Which shapes do you know?", "What do you see?")


def conversations():
    """Return two prompts in the format of transformers: a question, and one about an image."""
    text, question = QUESTIONS
    return [[user(text)], [user(Image.open(IMAGE).convert("RGB"), question)]]


@torch.inference_mode()
def make_certain(written):
    """Change the output layer of a quantized checkpoint so that it predicts the same tokens with large margins."""
    model = TransformersEngine(written.twin)  # transformers needs further packages for quantized ones
    options = {"max_new_tokens": TOKENS, "return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    completions = [model.model.generate(**model.inputs([messages]), **options) for messages in conversations()]
    logits = torch.cat([step for completion in completions for step in completion.logits])
    file = written.quantized / "model.safetensors"
    tensors = load_file(file)
    head = tensors["lm_head.weight"].float()
    # Add GAIN to the logits of the greedy tokens, and nothing to others: ridge regression on the hidden states.
    hidden = torch.linalg.lstsq(head, logits.T).solution.T
    targets = GAIN * F.one_hot(logits.argmax(1), len(head)).float()
    ridge = hidden.T @ hidden + RIDGE * torch.eye(hidden.shape[1])
    tensors["lm_head.weight"] = (head + torch.linalg.solve(ridge, hidden.T @ targets).T).bfloat16()
    save_file(tensors, file, {"format": "pt"})
    return written.quantized


class Greedy(NamedTuple):
    """A completion.

    Attributes:
        prompt: tokens of the prompt.
        tokens: those of the completion.
        shown: indices of the tokens that have text: not special ones, and not those that the tokenizer lacks.
        logprobs: the two largest log probabilities of each of them: [2, shown].
    """

    prompt: list[int]
    tokens: list[int]
    shown: list[int]
    logprobs: torch.Tensor


def greedy(engine, messages):
    options = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": True, "top_logprobs": 2}
    generation = engine.submit({"messages": as_openai(messages), **options}).result()
    (token_ids,) = generation.token_ids
    tokens = generation.completion.choices[0].logprobs.content
    logprobs = torch.tensor([[candidate.logprob for candidate in token.top_logprobs] for token in tokens]).T
    tokenizer = AutoTokenizer.from_pretrained(engine.model_spec().folder)
    shown = [index for index, token in enumerate(token_ids) if tokenizer.decode([token], skip_special_tokens=True)]
    return Greedy(list(generation.prompt_token_ids), list(token_ids), shown, logprobs)


@pytest.mark.parametrize("name", ["awq", "gptq", "int4", "int8"])
def test_vllm_generates_same_tokens_from_published_layouts(vllm, name, tmp_path):
    """The layouts for which vLLM has kernels for CPUs."""
    source = tiny.to_bfloat16(tiny.write_qwen2_5_vl(tmp_path / "source", **TEXT, rope_parameters=ROPE, seed=3))
    folder = make_certain(write_quantized(source, tmp_path, LAYOUTS[name]))
    with Engine(EngineConfig(model=str(folder), dtype="float32", device="cpu")) as engine:
        compare_with_vllm(vllm, folder, engine)


def compare_with_vllm(vllm, folder, reference):
    prompts = conversations()
    request = {"model": str(folder), "conversations": list(map(as_openai, prompts)), "max_tokens": TOKENS}
    for messages, output in zip(prompts, vllm.run("generate_vllm.py", request), strict=True):
        expected = greedy(reference, messages)
        first, second = expected.logprobs
        assert float((first - second).min()) > MIN_MARGIN  # otherwise, the test would depend on rounding errors
        assert output["prompt_token_ids"] == expected.prompt
        assert output["token_ids"] == expected.tokens
        assert float((torch.tensor(output["logprobs"])[expected.shown] - first).abs().max()) < MAX_DIFFERENCE


def test_transformers_dequantizes_fp8_to_same_log_probabilities(tmp_path):
    """On a CPU. transformers 5.23 ignores the scales of experts in one tensor, so there are none here."""
    try:
        interpreter = interpreters.transformers()
    except SetupMissing as error:
        pytest.skip(f"accelerate, which transformers needs for FP8, is not available: {error}")
    source = tiny_qwen3.write_checkpoint(tmp_path / "source", **FP8_SIZES)
    layout = layouts(group=32, block=(32, 32))["fp8-block"]
    folder = write_quantized(source, tmp_path, layout).quantized
    write_config(folder, quantization_config=layout.config | {"modules_to_not_convert": ["model.visual", "lm_head"]})
    with Engine(EngineConfig(model=str(folder), dtype="float32", device="cpu")) as engine:
        expected = greedy(engine, conversations()[0])
    found = score(interpreter, folder, expected.prompt, expected.tokens, "float32").log_softmax(1).topk(2)
    assert found.indices[:, 0].tolist() == expected.tokens
    torch.testing.assert_close(found.values[expected.shown].T, expected.logprobs, rtol=0, atol=1e-3)


def score(interpreter, folder, prompt, token_ids, dtype):
    """Return transformers' logits of the tokens of a completion."""
    file = folder.with_name("logits.npy")
    request = {"model": str(folder), "token_ids": prompt + token_ids, "dtype": dtype, "logits": str(file)}
    interpreter.run("score_transformers.py", request)
    return torch.from_numpy(np.load(file))[len(prompt) - 1 : -1]
