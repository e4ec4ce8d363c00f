"""Qwen3-VL and Qwen3.5: ours = transformers, batched = alone, chunked = whole, cached = uncached; greedy, float32,
through an engine."""

from __future__ import annotations

import asyncio
import base64
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.numpy import save

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.engine.remote import RemoteEngine
from dashinfer_vlm_core.media import Image
from dashinfer_vlm_core.models.interface import ModelFamily
from dashinfer_vlm_qwen3_vl import Qwen3VL, Qwen35
from tests.conversations import CONVERSATIONS, as_openai, assistant, blurred_image, user
from tests.kernels import needs_native, selector
from tests.lora_folders import ATTENTION, MLP, merge_lora, write_lora
from tests.qwen3_5 import tiny_qwen3_5
from tests.qwen3_vl import tiny_qwen3
from tests.qwen3_vl.oracle import Oracle
from tests.recorder import recorded_engine
from tests.server.conftest import serving

TOKENS = 16
REQUESTS = {
    **CONVERSATIONS,
    "video after text": [user("Look at this: ", [blurred_image(seed, 70, 130) for seed in range(20, 25)])],
    "images of odd sizes": [user(blurred_image(30, 131, 77), "and", blurred_image(31, 60, 190), "Compare them.")],
    "two videos and an image": [
        user([blurred_image(30), blurred_image(31)], [blurred_image(seed, 50, 90) for seed in (32, 33, 34)]),
        assistant("A circle."),
        user(blurred_image(35, 64, 190), "Is it in the second video?"),
    ],
    "a text of several chunks": [user("Read this: " + "one two three four " * 40)],
}
LINEARS = (
    *ATTENTION, *MLP, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "shared_expert_gate",
    "qkv", "linear_fc1", "linear_fc2",
)  # fmt: skip
"""Linear layers of text models and vision encoders, with the mergers of all levels of visual tokens."""


class Model(NamedTuple):
    """A random model.

    Attributes:
        family: its column in docs/support.md.
        kind: its family.
        write: writes the checkpoint.
        cached_from: prompts with at least this many tokens have a prefix that is cached.
    """

    family: str
    kind: type[ModelFamily]
    write: Callable[..., Path]
    cached_from: int


DENSE = {
    "qwen3_vl": Model("qwen3_vl", Qwen3VL, tiny_qwen3.write_checkpoint, 2),
    "qwen3_5": Model("qwen3_5", Qwen35, tiny_qwen3_5.write_checkpoint, 128),
}
MODELS = DENSE | {
    f"{name}_moe": model._replace(write=functools.partial(model.write, moe=True)) for name, model in DENSE.items()
}


def covers(*features, models=MODELS):
    """Run a test with models, and record what it shows for docs/support.md. Those with experts are slow."""
    params = []
    for name, model in models.items():
        marks = [pytest.mark.supports(feature, backend="torch-cpu", family=model.family) for feature in features]
        params.append(pytest.param(name, marks=[*marks, pytest.mark.slow] if name not in DENSE else marks))
    return pytest.mark.parametrize("name", params)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a function that writes the checkpoint of a model on first use."""
    return functools.cache(lambda name: MODELS[name].write(tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def expected(folder):
    """Return a function that returns transformers' completions: token ids and log probabilities of each step."""

    @functools.cache
    def expected(name):
        reference = Oracle(folder(name))
        done = {title: reference.generate(messages, TOKENS) for title, messages in REQUESTS.items()}
        return {title: (ids, logits.log_softmax(-1)) for title, (ids, logits) in done.items()}

    return expected


def body(title, **options):
    return {"messages": as_openai(REQUESTS[title]), "temperature": 0, "max_tokens": TOKENS, **options}


@pytest.mark.slow
@covers()
def test_outputs_are_distinct(expected, name):
    """Otherwise the comparisons would prove nothing."""
    assert len({tuple(ids) for ids, _ in expected(name).values()}) == len(REQUESTS)


@covers("text", "images", "videos", "logprobs", "prefix-cache")
def test_tokens_and_logprobs_equal_transformers(folder, expected, name):
    """The second time, visual tokens and prefixes come from the caches."""
    engine, recorder = recorded_engine(folder(name))
    with engine:
        for is_cached in (False, True):
            encoded = engine.stats().vision.encoded
            for title, (ids, logprobs) in expected(name).items():
                done = engine.chat(body(title, logprobs=True))
                assert recorder.tokens[done.id] == ids, title
                theirs = logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0]
                found = torch.tensor(recorder.logprobs[done.id])
                torch.testing.assert_close(found, theirs, rtol=0, atol=2e-4)
                if is_cached and done.usage.prompt_tokens >= MODELS[name].cached_from:
                    assert done.usage.prompt_tokens_details.cached_tokens > 0, title
            assert (engine.stats().vision.encoded == encoded) == is_cached


@pytest.mark.slow
@covers("batching", "chunked-prefill")
@pytest.mark.parametrize("chunk", [64, 1024])
def test_batched_equals_alone(folder, expected, name, chunk):
    engine, recorder = recorded_engine(folder(name), prefix_cache=False, vision_cache_mib=0, prefill_chunk=chunk)

    async def all_at_once():
        return await asyncio.gather(*(engine.achat(body(title)) for title in REQUESTS))

    with engine:
        for title, done in zip(REQUESTS, asyncio.run(all_at_once()), strict=True):
            assert recorder.tokens[done.id] == expected(name)[title][0], title


@pytest.mark.slow
@covers("chunked-prefill")
@pytest.mark.parametrize("chunk", [1, 13])
def test_chunk_boundaries_inside_visual_spans(folder, expected, name, chunk):
    engine, recorder = recorded_engine(folder(name), prefill_chunk=chunk, prefix_cache=False)
    with engine:
        for title in ("one picture", "picture and video", "two videos and an image"):
            assert recorder.tokens[engine.chat(body(title)).id] == expected(name)[title][0], title


@pytest.mark.slow
@covers(models=DENSE)
def test_media_workers_process_like_threads(folder, name):
    engine, recorder = recorded_engine(folder(name))
    workers, other_recorder = recorded_engine(folder(name), media_workers=2)
    with engine, workers:
        for title in ("one picture", "video"):
            assert recorder.tokens[engine.chat(body(title)).id] == other_recorder.tokens[workers.chat(body(title)).id]


@pytest.mark.slow
@covers()
def test_tokens_through_a_remote_engine_equal_local_ones(folder, expected, name):
    engine, recorder = recorded_engine(folder(name))
    with engine, serving(engine) as server, RemoteEngine(f"{server.url}/v1") as remote:
        for title in ("one picture", "picture and video"):
            done = remote.chat(body(title))
            assert recorder.tokens[done.id] == expected(name)[title][0], title
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in remote.stream(body(title)))
            assert streamed == done.choices[0].message.content


@covers(models=DENSE)
def test_tied_output_layer_equals_transformers(tmp_path, name):
    MODELS[name].write(tmp_path, seed=3, tie_word_embeddings=True)
    ids, _ = Oracle(tmp_path).generate(REQUESTS["one picture"], TOKENS)
    engine, recorder = recorded_engine(tmp_path)
    with engine:
        assert recorder.tokens[engine.chat(body("one picture")).id] == ids


@pytest.mark.slow
@covers()
def test_bfloat16_is_close_to_float32(folder, expected, name):
    """With the C kernels if this machine has them: the log probability of the first token."""
    engine, recorder = recorded_engine(folder(name), dtype="bfloat16")
    errors = []
    with engine:
        for title, (_, logprobs) in expected(name).items():
            done = engine.chat(body(title, max_tokens=1, logprobs=True))
            (token,), (found,) = recorder.tokens[done.id], recorder.logprobs[done.id]
            errors.append(abs(found - logprobs[0, token].item()))
    assert statistics.median(errors) < 0.2
    assert max(errors) < 1


@needs_native
@covers("int8")
def test_int8_is_close_to_bfloat16(folder, name):
    found = []
    for quantization in ("none", "int8"):
        engine, _ = recorded_engine(folder(name), dtype="bfloat16", quantization=quantization)
        with engine:
            done = engine.chat(body("one picture", max_tokens=1, logprobs=True, top_logprobs=20))
        found.append({token.token: token.logprob for token in done.choices[0].logprobs.content[0].top_logprobs})
    exact, quantized = found
    assert exact != quantized
    assert max(abs(exact[token] - quantized[token]) for token in list(exact)[:3]) < 1.0


@pytest.mark.slow
@covers("lora")
def test_lora_equals_merged_weights(folder, tmp_path, name):
    """It changes the text model and the vision encoder."""
    lora = write_lora(tmp_path / "adapter", folder(name), LINEARS)
    engine, recorder = recorded_engine(folder(name), lora={"adapted": str(lora)})
    merged, other_recorder = recorded_engine(merge_lora(tmp_path / "merged", folder(name), lora))
    with engine, merged:
        for title in ("one picture", "picture and video"):
            plain, adapted = (engine.chat(body(title, **fields)) for fields in ({}, {"model": "adapted"}))
            found, expected = recorder.tokens[adapted.id], other_recorder.tokens[merged.chat(body(title)).id]
            assert found == expected != recorder.tokens[plain.id]


@covers("embeddings", models=DENSE)
def test_embeddings_replace_an_image(folder, name):
    """The rows of all levels, as the vision encoder computes them, give the response of the image."""
    request = body("one picture")
    family, config = MODELS[name].kind(), EngineConfig(device="cpu", dtype="float32")
    spec = family.load_spec(folder(name))
    image = Image(image=REQUESTS["one picture"][0]["content"][0]["image"], path="here")
    patches = family.image_processor(spec, config).process(image)
    (rows,) = family.load_vision_encoder(spec, config, selector(config)).encode([patches])
    stored = base64.b64encode(save({"image_embeds": rows.numpy()})).decode()
    part = {"type": "image_embeds", "image_embeds": {"image_embeds": stored, "image_grid_thw": list(patches.grid)}}
    content = [part, *request["messages"][0]["content"][1:]]
    engine, recorder = recorded_engine(folder(name), enable_mm_embeds=True)
    with engine:
        expected = engine.chat(request)
        done = engine.chat(request | {"messages": [{"role": "user", "content": content}]})
    assert recorder.tokens[done.id] == recorder.tokens[expected.id]


@covers("structured-output")
def test_guided_decoding_follows_the_schema(folder, name):
    schema = {
        "type": "object",
        "properties": {"red": {"type": "boolean"}},
        "required": ["red"],
        "additionalProperties": False,
    }
    engine, _ = recorded_engine(folder(name))
    request = body("one picture", max_tokens=60) | {
        "response_format": {"type": "json_schema", "json_schema": {"name": "color", "strict": True, "schema": schema}}
    }
    with engine:
        assert engine.chat(request).choices[0].message.content.replace(" ", "") in ('{"red":true}', '{"red":false}')
