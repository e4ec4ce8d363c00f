"""Ours = transformers, batched = alone, chunked = whole, cached = uncached; greedy, float32, through an engine."""

from __future__ import annotations

import asyncio
import base64
import statistics

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save

from dashinfer_vlm_core import VLM, Engine, EngineConfig, SamplingParams
from dashinfer_vlm_core.media import READERS
from dashinfer_vlm_core.media import Image as DecodedImage
from dashinfer_vlm_core.media.decoder import MediaDecoder
from dashinfer_vlm_core.protocol import MediaPart
from dashinfer_vlm_qwen3_vl import Qwen3VL
from tests.conversations import CONVERSATIONS, as_openai, blurred_image, user
from tests.kernels import needs_native, selector
from tests.lora_folders import ATTENTION, MLP, merge_lora, write_lora
from tests.recorder import Recorder
from tests.samples import data_url, encode_video
from tests.waiting import HANG

from .oracle import Clip, Oracle
from .tiny_qwen3 import write_checkpoint

TOKENS = 16
REQUESTS = {
    **CONVERSATIONS,
    "video after text": [user("Look at this: ", [blurred_image(seed, 70, 130) for seed in range(20, 25)])],
    "two videos and an image": [
        user([blurred_image(30), blurred_image(31)], [blurred_image(seed, 50, 90) for seed in (32, 33, 34)]),
        {"role": "assistant", "content": "A circle."},
        user(blurred_image(35, 64, 190), "Is it in the second video?"),
    ],
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


@pytest.mark.supports("text", backend="torch-cpu", family="qwen3_vl")
@pytest.mark.supports("images", backend="torch-cpu", family="qwen3_vl")
@pytest.mark.supports("videos", backend="torch-cpu", family="qwen3_vl")
@pytest.mark.supports("logprobs", backend="torch-cpu", family="qwen3_vl")
def test_tokens_and_logprobs_equal_transformers(folder, expected):
    engine, recorder = start(folder)
    with engine:
        for name, (ids, logprobs) in expected.items():
            done = engine.chat(body(name, logprobs=True))
            assert recorder.tokens[done.id] == ids, name
            theirs = logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(recorder.logprobs[done.id]), theirs, rtol=0, atol=2e-4)


@pytest.mark.supports("batching", backend="torch-cpu", family="qwen3_vl")
def test_batched_equals_alone(folder, expected):
    engine, recorder = start(folder, prefix_cache=False)

    async def all_at_once():
        return await asyncio.gather(*(engine.achat(body(name)) for name in expected))

    with engine:
        for name, done in zip(expected, asyncio.run(all_at_once()), strict=True):
            assert recorder.tokens[done.id] == expected[name][0], name


@pytest.mark.supports("chunked-prefill", backend="torch-cpu", family="qwen3_vl")
@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 13])
def test_chunk_boundaries_inside_visual_spans(folder, expected, chunk):
    engine, recorder = start(folder, prefill_chunk=chunk, prefix_cache=False)
    with engine:
        for name in ("one picture", "picture and video", "two videos and an image"):
            assert recorder.tokens[engine.chat(body(name)).id] == expected[name][0], name


@pytest.mark.supports("prefix-cache", backend="torch-cpu", family="qwen3_vl")
@pytest.mark.slow
def test_cached_equals_uncached(folder, expected):
    """The second time, visual tokens with all levels and the keys and values come from the caches."""
    engine, recorder = start(folder)
    without, other_recorder = start(folder, vision_cache_mib=0, prefix_cache=False)
    with engine, without:
        for name in ("one picture", "two videos and an image"):
            engine.chat(body(name))
            before = engine.stats().vision.encoded
            done = engine.chat(body(name))
            assert recorder.tokens[done.id] == expected[name][0], name
            assert done.usage.prompt_tokens_details.cached_tokens > 0
            assert engine.stats().vision.encoded == before
            assert other_recorder.tokens[without.chat(body(name)).id] == expected[name][0], name


@pytest.mark.slow
def test_prefix_with_one_of_two_images_is_reused(folder):
    """The additions of the second image are prefilled after a cached prefix with those of the first."""
    engine, recorder = start(folder)
    without, other_recorder = start(folder, prefix_cache=False)
    image, other, cached = blurred_image(40, 190, 190), blurred_image(41, 190, 190), []
    with engine, without:
        for pair in ([image, image], [image, other], [other, image]):
            request = {"messages": as_openai([user(*pair, "Compare.")]), "temperature": 0, "max_tokens": 8}
            done = engine.chat(request)
            assert recorder.tokens[done.id] == other_recorder.tokens[without.chat(request).id]
            cached.append(done.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 44, 0]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"fps": 4.0}, {"num_frames": 5}])
def test_video_file_equals_transformers(dense, oracle, options):
    data = encode_video(23, fps=10, height=96, width=64)
    spec, part = Qwen3VL().load_spec(dense), MediaPart(kind="video", path="here", url="data:", **options)
    decoder = MediaDecoder(config=EngineConfig(), readers=READERS, policy=spec.video)
    video = decoder.decode(part, [data], lambda: None)
    indices = (
        oracle.videos.sample_frames(
            Clip([], 10.0, [22]).metadata, num_frames=options.get("num_frames"), fps=options.get("fps")
        )
        if "num_frames" not in options
        else np.linspace(0, 22, 5).round().astype(int)
    )
    assert video.times == tuple(index / 10 for index in indices.tolist())
    clip = Clip([Image.fromarray(frame) for frame in video.frames], 10.0, indices.tolist())
    ids, _ = oracle.generate([{"role": "user", "content": [{"type": "video", "video": clip}]}], TOKENS)
    engine, recorder = start(dense)
    url = {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4"), **options}}
    with engine:
        done = engine.chat({"messages": [{"role": "user", "content": [url]}], "temperature": 0, "max_tokens": TOKENS})
    assert recorder.tokens[done.id] == ids


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


@needs_native
@pytest.mark.supports("int8", backend="torch-cpu", family="qwen3_vl")
def test_int8_is_close_to_bfloat16(folder):
    found = []
    for quantization in ("none", "int8"):
        engine, _ = start(folder, dtype="bfloat16", quantization=quantization)
        with engine:
            done = engine.chat(body("one picture", max_tokens=1, logprobs=True, top_logprobs=20))
        found.append({token.token: token.logprob for token in done.choices[0].logprobs.content[0].top_logprobs})
    exact, quantized = found
    assert exact != quantized
    assert max(abs(exact[token] - quantized[token]) for token in list(exact)[:3]) < 1.0


@pytest.mark.slow
@pytest.mark.supports("lora", backend="torch-cpu", family="qwen3_vl")
def test_lora_equals_merged_weights(dense, tmp_path):
    """It changes the text model and the vision encoder, with the mergers of all levels."""
    lora = write_lora(tmp_path / "adapter", dense, (*ATTENTION, *MLP, "qkv", "linear_fc1", "linear_fc2"))
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


@pytest.mark.supports("embeddings", backend="torch-cpu", family="qwen3_vl")
def test_embeddings_replace_an_image(dense):
    """The rows of all levels, as the vision encoder computes them, give the response of the image."""
    request = body("one picture")
    family, config = Qwen3VL(), EngineConfig(device="cpu", dtype="float32")
    spec = family.load_spec(dense)
    image = DecodedImage(image=REQUESTS["one picture"][0]["content"][0]["image"], path="here")
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


@pytest.mark.supports("structured-output", backend="torch-cpu", family="qwen3_vl")
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


def test_frames_with_metadata_equal_transformers(dense, oracle):
    """As qwen-vl-utils returns them with `return_video_metadata`: the times are those of the original video."""
    frames, indices = [blurred_image(seed, 64, 96) for seed in range(50, 54)], [0, 3, 7, 10]
    messages = [{"role": "user", "content": [{"type": "video", "video": Clip(frames, 10.0, indices)}]}]
    ids, _ = oracle.generate(messages, TOKENS)
    metadata = {"fps": 10.0, "frames_indices": indices, "total_num_frames": 11, "video_backend": "decord"}
    prompt = {
        "prompt": oracle.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),
        "multi_modal_data": {"video": [(frames, metadata)]},
        "mm_processor_kwargs": {"do_sample_frames": False},
    }
    engine, _ = start(dense)
    with engine:
        (output,) = VLM(engine=engine).generate(prompt, SamplingParams(temperature=0, max_tokens=TOKENS))
    assert list(output.prompt_token_ids) == oracle.inputs(messages)["input_ids"][0].tolist()
    assert list(output.outputs[0].token_ids) == ids
