"""A model family defined by a test plugin gives the same output as its reference implementation."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.errors import InvalidParameter, UnsupportedParameter
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_dashinfer import DashInferFactory
from tests.lora_folders import merge_lora, write_lora
from tests.models import contrast_vl
from tests.models.reference_vl import Reference
from tests.samples import data_url, encode, encode_video, noise
from tests.waiting import HANG

COUNT = 12


def image(height, width, seed=0):
    return Image.fromarray(noise(height, width, seed))


def frames(count, seed=0):
    """Return a video as a list of images, sampled at one frame per second."""
    return [(float(index), image(20, 30, seed + index)) for index in range(count)]


REQUESTS = {
    "text": ["What is there?"],
    "image": [image(40, 24), "Describe it."],
    "images": ["First ", image(16, 16, 1), " then ", image(100, 64, 2), "!"],
    "video": [frames(3), "What moves?"],
    "all": [image(17, 33, 3), "and", frames(2, 5), "and", image(17, 33, 3), "?"],
    "long": ["word " * 60, image(48, 48, 4), "end"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return contrast_vl.write_checkpoint(tmp_path_factory.mktemp("contrast"))


@pytest.fixture(scope="module")
def expected(folder):
    reference = Reference(folder)
    return {name: reference.generate(parts, COUNT) for name, parts in REQUESTS.items()}


@pytest.fixture(scope="module")
def start(folder):
    def start(**options):
        registry = load_plugins()
        registry.add_plugin(contrast_vl, name="contrast_vl")
        config = EngineConfig(
            **{"model": str(folder), "decoder": "torch", "device": "cpu", "kv_cache_mib": 64, **options}
        )
        return Engine(config, registry=registry)

    return start


@pytest.fixture(scope="module")
def engine(start):
    with start(prefill_chunk=16) as engine:
        yield engine


def request(parts):
    content = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        elif isinstance(part, list):
            urls = [data_url(encode(np.asarray(frame))) for _, frame in part]
            content.append({"type": "video_url", "video_url": {"url": urls}})
        else:
            content.append({"type": "image_url", "image_url": {"url": data_url(encode(np.asarray(part)))}})
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}


def generate(engine, body):
    """Return the response with its token ids."""
    return engine.submit(body).result(timeout=HANG)


def output_ids(engine, parts):
    return list(generate(engine, request(parts)).token_ids[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUESTS)
def test_output_equals_reference(engine, expected, name):
    assert output_ids(engine, REQUESTS[name]) == expected[name]


def test_output_depends_on_every_part(expected):
    """Otherwise the comparison would prove nothing."""
    assert len(set(map(tuple, expected.values()))) == len(expected)


def test_batched_output_equals_reference(start, expected):
    with start(prefix_cache=False) as engine, ThreadPoolExecutor(len(REQUESTS)) as threads:
        answers = threads.map(lambda parts: output_ids(engine, parts), REQUESTS.values())
        assert dict(zip(REQUESTS, answers, strict=True)) == expected


@pytest.mark.slow
def test_lora_equals_merged_weights(start, folder, tmp_path):
    """This family stores queries and keys in another order than the kernels rotate them."""
    lora = write_lora(tmp_path / "adapter", folder, ("query", "key", "value", "gate"))
    merged = merge_lora(tmp_path / "merged", folder, lora)
    body = request(REQUESTS[min(REQUESTS)])
    with start(lora={"mine": str(lora)}) as engine, start(model=str(merged)) as other:
        found = [generate(engine, {**body, "model": name}).token_ids for name in ("mine", folder.name)]
        assert found[0] == generate(other, body).token_ids != found[1]


def test_cached_output_equals_reference(engine, expected):
    output_ids(engine, REQUESTS["all"])
    before = engine.stats()
    assert output_ids(engine, REQUESTS["all"]) == expected["all"]
    after = engine.stats()
    assert after.decoder.cached_tokens > before.decoder.cached_tokens
    assert after.vision.encoded == before.vision.encoded


@pytest.mark.slow
def test_equal_frames_at_other_times_share_embedding_not_prompt(engine, folder):
    """The embedding depends on the content only; the prompt contains the timestamps."""
    body = [video(encode_video(4, fps=fps), "video/mp4", num_frames=4) for fps in (1, 2)]
    first, second = (prompt_text(engine, folder, request) for request in body)
    assert "<3.0 seconds>" in first
    assert "<1.5 seconds>" in second
    generate(engine, body[0])
    before = engine.stats().vision.encoded
    generate(engine, body[1])
    assert engine.stats().vision.encoded == before


def video(data, kind, **options):
    part = {"type": "video_url", "video_url": {"url": data_url(data, kind), **options}}
    return request([]) | {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "When?"}]}]}


def prompt_text(engine, folder, body):
    ids = list(generate(engine, body).prompt_token_ids)
    return Reference(folder).tokenizer.decode(ids, skip_special_tokens=False)


def test_more_frames_than_family_allows_are_rejected(engine):
    with pytest.raises(InvalidParameter, match="1 to 5 frames"):
        output_ids(engine, [frames(6)])


def test_preview_uses_the_familys_resizing(engine):
    preview = engine.preview(request([image(40, 25), frames(2)]))
    assert [(item.size, item.cells, item.frame_count) for item in preview.items] == [
        ((24, 40), (1, 5, 3), 1),
        ((24, 16), (2, 2, 3), 2),
    ]


@pytest.mark.parametrize("width", [contrast_vl.HIDDEN, 3 * contrast_vl.HIDDEN])
def test_embeddings_input_has_the_familys_width(start, width):
    rows = base64.b64encode(save({"image_embeds": np.zeros((2, width), np.float32)})).decode()
    part = {"type": "image_embeds", "image_embeds": {"image_embeds": rows, "image_grid_thw": [1, 1, 2]}}
    body = request([]) | {"messages": [{"role": "user", "content": [part]}]}
    with start(enable_mm_embeds=True) as engine:
        if width == 3 * contrast_vl.HIDDEN:
            assert len(generate(engine, body).token_ids[0]) == COUNT
        else:
            with pytest.raises(InvalidParameter, match=r"\[tokens, 144\]"):
                generate(engine, body)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"up": {"type": "boolean"}},
                "required": ["up"],
                "additionalProperties": False,
            },
        },
    }
]


def test_tool_calls_have_the_familys_format(engine, folder):
    body = request(["Look."]) | {"tools": TOOLS, "tool_choice": "required", "max_tokens": 100, "ignore_eos": False}
    done = generate(engine, body)
    (call,) = done.completion.choices[0].message.tool_calls[:1]
    assert call.function.name == "look"
    assert list(json.loads(call.function.arguments)) == ["up"]
    tokenizer = Reference(folder).tokenizer
    assert tokenizer.decode(list(done.token_ids[0])).startswith("<use>\n{")
    prompt = tokenizer.decode(list(done.prompt_token_ids))
    assert "within <use></use> XML tags:\n<use>\n" in prompt
    assert "<tool_call>" not in prompt


def test_dashinfer_reports_unsupported_family(folder):
    spec = contrast_vl.ContrastVL().load_spec(folder)
    support = DashInferFactory().check_support(spec, EngineConfig())
    assert support.score == 0
    assert "contrast_vl" in support.reason
    assert "RMSNorm" in support.reason


def test_family_without_known_coordinates_rejects_them(engine):
    with pytest.raises(UnsupportedParameter, match="models of the type contrast_vl") as caught:
        engine.chat({**request(REQUESTS["image"]), "coordinates": "original"})
    assert caught.value.param == "coordinates"
