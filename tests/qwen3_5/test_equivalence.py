"""Ours = transformers, batched = alone, cached = uncached; greedy, float32, through an engine."""

from __future__ import annotations

import asyncio
import base64
import json
import statistics

import pytest
import torch
from safetensors.numpy import save
from transformers import AutoTokenizer

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.engine.remote import RemoteEngine
from dashinfer_vlm_core.media import Image
from dashinfer_vlm_qwen3_vl import Qwen35
from tests.conversations import CONVERSATIONS, as_openai, blurred_image, user
from tests.kernels import needs_native, selector
from tests.lora_folders import ATTENTION, MLP, merge_lora, write_lora
from tests.quantized_checkpoints import LAYOUTS, write_quantized
from tests.qwen3_vl.oracle import Oracle
from tests.recorder import Recorder
from tests.server.conftest import serving
from tests.waiting import HANG

from .test_text_model import PUBLISHED_MODULES
from .tiny_qwen3_5 import write_checkpoint

TOKENS = 16
REQUESTS = {
    **CONVERSATIONS,
    "video after text": [user("Look at this: ", [blurred_image(seed, 70, 130) for seed in range(20, 25)])],
    "images of odd sizes": [user(blurred_image(30, 131, 77), "and", blurred_image(31, 60, 190), "Compare them.")],
    "a text of several chunks": [user("Read this: " + "one two three four " * 40)],
}


@pytest.fixture(scope="module", params=["dense", pytest.param("moe", marks=pytest.mark.slow)])
def folder(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def expected(folder):
    """Return transformers' completions: token ids and log probabilities of each step."""
    reference = Oracle(folder)
    done = {name: reference.generate(messages, TOKENS) for name, messages in REQUESTS.items()}
    return {name: (ids, logits.log_softmax(-1)) for name, (ids, logits) in done.items()}


def start(folder, **options):
    """Return an engine that is not started, and the recorder of its tokens."""
    recorder = Recorder()
    options = {"dtype": "float32", "media_workers": 0} | options
    config = EngineConfig(model=str(folder), device="cpu", decoder="recorded", kv_cache_mib=64, **options)
    return Engine(config, registry=recorder.registry()), recorder


def body(name, **options):
    return {"messages": as_openai(REQUESTS[name]), "temperature": 0, "max_tokens": TOKENS, **options}


@pytest.mark.slow
def test_outputs_are_distinct(expected):
    """Otherwise the comparisons would prove nothing."""
    assert len({tuple(ids) for ids, _ in expected.values()}) == len(expected)


@pytest.mark.slow
@pytest.mark.supports("text", backend="torch-cpu", family="qwen3_5")
@pytest.mark.supports("images", backend="torch-cpu", family="qwen3_5")
@pytest.mark.supports("videos", backend="torch-cpu", family="qwen3_5")
@pytest.mark.supports("logprobs", backend="torch-cpu", family="qwen3_5")
@pytest.mark.supports("prefix-cache", backend="torch-cpu", family="qwen3_5")
def test_tokens_and_logprobs_equal_transformers(folder, expected):
    """The second time, prefixes come from the cache."""
    engine, recorder = start(folder)
    with engine:
        for name, (ids, logprobs) in [*expected.items()] * 2:
            done = engine.chat(body(name, logprobs=True))
            assert recorder.tokens[done.id] == ids, name
            theirs = logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(recorder.logprobs[done.id]), theirs, rtol=0, atol=1e-3)
        assert done.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.slow
@pytest.mark.supports("batching", backend="torch-cpu", family="qwen3_5")
@pytest.mark.supports("chunked-prefill", backend="torch-cpu", family="qwen3_5")
@pytest.mark.parametrize("chunk", [64, 1024])
def test_batched_equals_alone(folder, expected, chunk):
    engine, recorder = start(folder, prefix_cache=False, prefill_chunk=chunk)

    async def all_at_once():
        return await asyncio.gather(*(engine.achat(body(name)) for name in expected))

    with engine:
        for name, done in zip(expected, asyncio.run(all_at_once()), strict=True):
            assert recorder.tokens[done.id] == expected[name][0], name


@pytest.mark.slow
def test_media_workers_process_like_threads(dense):
    engine, recorder = start(dense)
    workers, other_recorder = start(dense, media_workers=2)
    with engine, workers:
        for name in ("one picture", "video"):
            assert recorder.tokens[engine.chat(body(name)).id] == other_recorder.tokens[workers.chat(body(name)).id]


def test_tied_output_layer_equals_transformers(tmp_path):
    write_checkpoint(tmp_path, seed=3, tie_word_embeddings=True)
    ids, _ = Oracle(tmp_path).generate(REQUESTS["one picture"], TOKENS)
    engine, recorder = start(tmp_path)
    with engine:
        assert recorder.tokens[engine.chat(body("one picture")).id] == ids


@pytest.mark.slow
def test_bfloat16_is_close_to_float32(folder, expected):
    """With the C kernels if this machine has them: the log probability of the first token."""
    engine, recorder = start(folder, dtype="bfloat16")
    errors = []
    with engine:
        for name, (_, logprobs) in expected.items():
            done = engine.chat(body(name, max_tokens=1, logprobs=True))
            (token,), (found,) = recorder.tokens[done.id], recorder.logprobs[done.id]
            errors.append(abs(found - logprobs[0, token].item()))
    assert statistics.median(errors) < 0.2
    assert max(errors) < 1


@pytest.mark.slow
@needs_native
@pytest.mark.supports("int8", backend="torch-cpu", family="qwen3_5")
@pytest.mark.supports("int4", backend="torch-cpu", family="qwen3_5")
@pytest.mark.supports("int8-kv-cache", backend="torch-cpu", family="qwen3_5")
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}])
def test_8_and_4_bits_are_close_to_bfloat16(dense, options):
    found = []
    for changes in ({}, options):
        engine, _ = start(dense, dtype="bfloat16", **changes)
        with engine:
            done = engine.chat(body("one picture", max_tokens=1, logprobs=True, top_logprobs=20))
        found.append({token.token: token.logprob for token in done.choices[0].logprobs.content[0].top_logprobs})
    exact, quantized = found
    assert exact != quantized
    assert max(abs(exact[token] - quantized.get(token, -20)) for token in list(exact)[:3]) < 2.0


@pytest.mark.slow
@pytest.mark.supports("quantized-checkpoints", backend="torch-cpu", family="qwen3_5")
@pytest.mark.parametrize("layout", ["awq", "fp8-block"])
def test_quantized_checkpoint_equals_transformers(dense, tmp_path, layout):
    written = write_quantized(dense, tmp_path, LAYOUTS[layout], modules=PUBLISHED_MODULES)
    ids, _ = Oracle(written.twin).generate(REQUESTS["one picture"], TOKENS)
    engine, recorder = start(written.quantized)
    with engine:
        assert recorder.tokens[engine.chat(body("one picture")).id] == ids


@pytest.mark.slow
@pytest.mark.supports("lora", backend="torch-cpu", family="qwen3_5")
def test_lora_equals_merged_weights(dense, tmp_path):
    """It changes both mixers, the MLPs and the vision encoder."""
    linears = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "qkv", "linear_fc1", "linear_fc2")
    lora = write_lora(tmp_path / "adapter", dense, (*ATTENTION, *MLP, *linears))
    folder = merge_lora(tmp_path / "merged", dense, lora)
    options = {"device": "cpu", "dtype": "float32", "media_workers": 0, "kv_cache_mib": 64}

    def tokens(engine, name, **fields):
        return list(engine.submit(body(name, **fields)).result(timeout=HANG).token_ids[0])

    with (
        Engine(EngineConfig(model=str(dense), lora={"adapted": str(lora)}, **options)) as engine,
        Engine(EngineConfig(model=str(folder), **options)) as merged,
    ):
        for name in ("one picture", "picture and video"):
            assert tokens(engine, name, model="adapted") == tokens(merged, name) != tokens(engine, name)


@pytest.mark.supports("embeddings", backend="torch-cpu", family="qwen3_5")
def test_embeddings_replace_an_image(dense):
    request = body("one picture")
    family, config = Qwen35(), EngineConfig(device="cpu", dtype="float32")
    spec = family.load_spec(dense)
    image = Image(image=REQUESTS["one picture"][0]["content"][0]["image"], path="here")
    patches = family.image_processor(spec, config).process(image)
    (rows,) = family.load_vision_encoder(spec, config, selector(config)).encode([patches])
    stored = base64.b64encode(save({"image_embeds": rows.numpy()})).decode()
    part = {"type": "image_embeds", "image_embeds": {"image_embeds": stored, "image_grid_thw": list(patches.grid)}}
    content = [part, *request["messages"][0]["content"][1:]]
    engine, recorder = start(dense, enable_mm_embeds=True)
    with engine:
        expected = engine.chat(request)
        done = engine.chat(request | {"messages": [{"role": "user", "content": content}]})
    assert recorder.tokens[done.id] == recorder.tokens[expected.id]


@pytest.mark.supports("structured-output", backend="torch-cpu", family="qwen3_5")
def test_guided_decoding_follows_the_schema(folder):
    schema = {
        "type": "object",
        "properties": {"red": {"type": "boolean"}},
        "required": ["red"],
        "additionalProperties": False,
    }
    engine, _ = start(folder)
    request = body("one picture", max_tokens=60) | {
        "response_format": {"type": "json_schema", "json_schema": {"name": "color", "strict": True, "schema": schema}}
    }
    with engine:
        assert engine.chat(request).choices[0].message.content.replace(" ", "") in ('{"red":true}', '{"red":false}')


TOOL = {
    "type": "function",
    "function": {
        "name": "paint",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "color": {"type": "string", "maxLength": 5},
                "sizes": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2},
            },
            "required": ["color", "sizes"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.slow
def test_forced_tool_call_is_written_in_xml(folder):
    engine, recorder = start(folder)
    request = body("one picture", max_tokens=200, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    with engine:
        done = engine.chat(request)
        chunks = [chunk.choices[0].delta.tool_calls or [] for chunk in engine.stream(request)]
    (call,) = done.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    text = AutoTokenizer.from_pretrained(folder).decode(recorder.tokens[done.id])
    assert text.startswith(
        f"<tool_call>\n<function=paint>\n<parameter=color>\n{arguments['color']}\n</parameter>\n<parameter=sizes>\n"
    )
    assert len(arguments["sizes"]) == 2
    assert "".join(part.function.arguments or "" for calls in chunks for part in calls) == call.function.arguments


@pytest.mark.slow
def test_tokens_through_a_remote_engine_equal_local_ones(folder, expected):
    engine, recorder = start(folder)
    with engine, serving(engine) as server, RemoteEngine(f"{server.url}/v1") as remote:
        for name in ("one picture", "picture and video"):
            done = remote.chat(body(name))
            assert recorder.tokens[done.id] == expected[name][0], name
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in remote.stream(body(name)))
            assert streamed == done.choices[0].message.content
