"""VLM: many in-process prompts and conversations, with objects instead of URLs."""

from __future__ import annotations

import asyncio
import re
import threading
import time
import weakref
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tqdm.auto import tqdm

from dashinfer_vlm_core import VLM, Engine, SamplingParams, StructuredOutputsParams
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import (
    ConfigError,
    DecoderFailed,
    EngineClosed,
    InvalidParameter,
    MediaRefused,
    MediaUndecodable,
    QueueFull,
    RequestError,
    UnsupportedParameter,
)
from dashinfer_vlm_core.offline import batch
from dashinfer_vlm_core.offline.batch import OfflineBatch
from dashinfer_vlm_core.testing import Script, scripted_engine, scripted_registry
from dashinfer_vlm_demo import CHECKPOINT
from tests.cases import cases
from tests.conversations import CONVERSATIONS, blurred_image, data_url, user
from tests.samples import encode_video, label
from tests.transformers_engine import TransformersEngine
from tests.waiting import until

TOKENS = 24
DESCRIBE = {"type": "text", "text": "Describe the picture."}
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
CIRCLE = Path(__file__).parents[2] / "examples" / "pictures" / "circle.png"
PROMPT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|>"
    "<|vision_end|>Describe the picture.<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module", params=["tiny", pytest.param("demo", marks=pytest.mark.slow)])
def checkpoint(request, tiny_checkpoint):
    return tiny_checkpoint if request.param == "tiny" else CHECKPOINT


@pytest.fixture(scope="module")
def oracle(checkpoint):
    return TransformersEngine(checkpoint)


@pytest.fixture(scope="module")
def expected(oracle):
    return {name: tuple(oracle.generate([messages])[0][0][:TOKENS]) for name, messages in CONVERSATIONS.items()}


@pytest.fixture(scope="module")
def vlm_fp32(checkpoint):
    """Return a VLM of the oracle's model in float32."""
    with VLM(checkpoint, dtype="float32") as vlm:
        yield vlm


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Return the bundled model with a readable local folder."""
    folder = tmp_path_factory.mktemp("allowed")
    (folder / "circle.png").write_bytes(CIRCLE.read_bytes())
    (folder / "film.mp4").write_bytes(encode_video(height=112, width=168))
    with VLM("demo", allowed_local_media_path=folder) as vlm:
        yield vlm


@pytest.fixture
def scripted(tiny_checkpoint):
    """Start a VLM whose decoder plays a script; return both."""
    engines = []

    def scripted(*answers, delay=0.0, **options):
        script = Script(*answers, delay=delay)
        config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted", **options)
        engines.append(Engine(config, registry=scripted_registry(script)))
        return VLM(engine=engines[-1]), script

    yield scripted
    for engine in engines:
        engine.close()


def tokens(output):
    assert output.error is None
    return output.outputs[0].token_ids


def texts(outputs):
    return [output.outputs[0].text if output.outputs else output.error for output in outputs]


def prompt_with(media):
    return {"prompt": PROMPT, "multi_modal_data": media}


def with_uuids(uuids):
    return {**prompt_with({"image": blurred_image(1)}), "multi_modal_uuids": {"image": uuids}}


# Same results as transformers


@pytest.mark.slow
def test_conversations_with_objects_equal_transformers(vlm_fp32, expected):
    outputs = vlm_fp32.chat(list(CONVERSATIONS.values()), GREEDY)
    assert dict(zip(expected, map(tokens, outputs), strict=True)) == expected


def rendered(oracle, messages):
    """Return a conversation's rendered prompt and its media."""
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    media = {kind: [part[kind] for part in parts if part["type"] == kind] for kind in ("image", "video")}
    text = oracle.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return {"prompt": text, "multi_modal_data": {kind: found for kind, found in media.items() if found}}


@pytest.mark.slow
def test_rendered_prompts_equal_transformers(vlm_fp32, oracle, expected):
    outputs = vlm_fp32.generate([rendered(oracle, messages) for messages in CONVERSATIONS.values()], GREEDY)
    assert dict(zip(expected, map(tokens, outputs), strict=True)) == expected


def test_token_ids_are_accepted_as_prompt(vlm_fp32, oracle, expected):
    prompt = rendered(oracle, CONVERSATIONS["one picture"])
    ids = oracle.tokenizer(prompt["prompt"], add_special_tokens=False)["input_ids"]
    media = prompt["multi_modal_data"]
    (output,) = vlm_fp32.generate({"prompt_token_ids": ids, "multi_modal_data": media}, GREEDY)
    assert tokens(output) == expected["one picture"]
    assert output.prompt is None
    text = oracle.tokenizer("Hello there.", add_special_tokens=False)["input_ids"]
    assert vlm_fp32.generate(text, GREEDY)[0].prompt_token_ids == tuple(text)


@pytest.mark.supports("videos", backend="torch-cpu")
def test_images_and_videos_may_alternate_in_prompt(vlm_fp32, oracle):
    """Media are passed by kind; the prompt's placeholders determine their order."""
    messages = [
        user(
            [blurred_image(1), blurred_image(2)],
            blurred_image(3),
            "then",
            [blurred_image(4), blurred_image(5)],
            blurred_image(6),
        )
    ]
    (expected,) = oracle.generate([messages])[0]
    (output,) = vlm_fp32.generate(rendered(oracle, messages), GREEDY)
    assert tokens(output) == tuple(expected[:TOKENS])


def embed_part(oracle, part):
    """Replace the media of a part by the output of transformers' vision encoder."""
    kind = part["type"]
    if kind not in {"image", "video"}:
        return part
    inputs = oracle.inputs([[{"role": "user", "content": [part]}]])
    grid = inputs[f"{kind}_grid_thw"]
    with torch.no_grad():
        if kind == "image":
            found = oracle.model.get_image_features(inputs["pixel_values"], grid)
        else:
            found = oracle.model.get_video_features(inputs["pixel_values_videos"], grid)
    rows = found.pooler_output[0]
    return {"type": kind, kind: {f"{kind}_embeds": rows, f"{kind}_grid_thw": grid}}


@pytest.mark.supports("embeddings", backend="torch-cpu")
def test_embeddings_give_same_tokens_as_pixels(vlm_fp32, oracle, expected):
    names = [name for name, messages in CONVERSATIONS.items() if isinstance(messages[0]["content"], list)]
    conversations = [
        [
            message
            if isinstance(message["content"], str)
            else {**message, "content": [embed_part(oracle, part) for part in message["content"]]}
            for message in CONVERSATIONS[name]
        ]
        for name in names
    ]
    assert [tokens(output) for output in vlm_fp32.chat(conversations, GREEDY)] == [expected[name] for name in names]
    prompts = [rendered(oracle, messages) for messages in conversations]
    assert [tokens(output) for output in vlm_fp32.generate(prompts, GREEDY)] == [expected[name] for name in names]


def test_embedding_rows_determine_the_output(demo):
    """Otherwise the test above might pass with outputs that ignore the embeddings."""
    oracle, outputs = TransformersEngine(CHECKPOINT), []
    for name in ("circle", "pair"):
        part = embed_part(oracle, {"type": "image", "image": Image.open(CIRCLE.parent / f"{name}.png").convert("RGB")})
        outputs += texts(demo.chat([{"role": "user", "content": [part, DESCRIBE]}], GREEDY))
    assert outputs[0] == "A red circle." != outputs[1]


# Types of images and videos


@cases(
    "content",
    [
        Image.open(CIRCLE),
        Image.open(CIRCLE).convert("RGBA"),
        np.asarray(Image.open(CIRCLE).convert("RGB")),
        torch.from_numpy(np.array(Image.open(CIRCLE).convert("RGB"))).permute(2, 0, 1),
        "circle.png",
        Path("circle.png"),
        data_url(Image.open(CIRCLE).convert("RGB")),
        {"image": Image.open(CIRCLE), "max_pixels": 28_224},
        {"type": "image", "image": "circle.png", "min_pixels": 3136},
    ],
)
def test_every_image_type_gives_same_output(demo, content):
    (output,) = demo.generate(prompt_with({"image": content}), GREEDY)
    assert output.outputs[0].text == "A red circle."
    part = content if isinstance(content, dict) else {"image": content}
    (output,) = demo.chat(
        [{"role": "user", "content": [{**part, "type": "image"}, DESCRIBE]}],
        GREEDY,
    )
    assert output.outputs[0].text == "A red circle."


@pytest.mark.parametrize(
    ("content", "num_tokens"),
    [
        ("film.mp4", 2 * 24),
        ({"video": Path("film.mp4"), "fps": 8.0}, 4 * 24),
        ({"video": "film.mp4", "max_pixels": 10_000}, 2 * 8),
        ({"video": "film.mp4", "nframes": 2}, 24),
    ],
)
def test_video_file_is_sampled(demo, content, num_tokens):
    prompt = {"prompt": PROMPT.replace("image", "video"), "multi_modal_data": {"video": content}}
    (output,) = demo.generate(prompt, GREEDY)
    assert output.usage.prompt_tokens_details.video_tokens == num_tokens


def test_decord_reader_gives_the_output_of_its_file(demo):
    decord = pytest.importorskip("decord")
    reader = decord.VideoReader(str(demo.engine.config.allowed_local_media_path / "film.mp4"))
    prompts = [
        {"prompt": PROMPT.replace("image", "video"), "multi_modal_data": {"video": content}}
        for content in ("film.mp4", reader, [reader])
    ]
    outputs = demo.generate(prompts, GREEDY)
    assert len({tokens(output) for output in outputs}) == 1
    assert len({output.usage.prompt_tokens_details.video_tokens for output in outputs} - {0}) == 1


def test_list_of_images_is_one_video_and_nested_lists_several(demo):
    frames = [blurred_image(seed) for seed in range(4)]
    one = demo.generate({"prompt": PROMPT.replace("image", "video"), "multi_modal_data": {"video": frames}}, GREEDY)
    same = demo.generate(
        {
            "prompt": PROMPT.replace("image", "video"),
            "multi_modal_data": {"video": np.stack([np.asarray(f) for f in frames])},
        },
        GREEDY,
    )
    two = demo.generate(
        {"prompt": PROMPT.replace("image", "video") * 2, "multi_modal_data": {"video": [frames, frames]}}, GREEDY
    )
    count = one[0].usage.prompt_tokens_details.video_tokens
    assert same[0].outputs == one[0].outputs
    assert two[0].usage.prompt_tokens_details.video_tokens == 2 * count > 0


def test_mm_processor_kwargs_bound_media_sizes(demo):
    large = blurred_image(1, 224, 224)
    plain = demo.generate(prompt_with({"image": large}), GREEDY)[0].usage.prompt_tokens_details.image_tokens
    small = {**prompt_with({"image": large}), "mm_processor_kwargs": {"max_pixels": 28 * 28 * 16}}
    assert demo.generate(small, GREEDY)[0].usage.prompt_tokens_details.image_tokens <= 16 < plain
    chat = demo.chat([user(large, "?")], GREEDY, mm_processor_kwargs={"max_pixels": 28 * 28 * 16})
    assert chat[0].usage.prompt_tokens_details.image_tokens <= 16


# Local files


def test_local_files_are_read_by_default(tiny_checkpoint, tmp_path, monkeypatch):
    """The caller can read them in any case. Relative paths refer to the current folder."""
    (tmp_path / "circle.png").write_bytes(CIRCLE.read_bytes())
    monkeypatch.chdir(tmp_path)
    with VLM(tiny_checkpoint) as vlm:
        paths = ["circle.png", Path("circle.png"), str(CIRCLE), CIRCLE.as_uri()]
        outputs = vlm.generate([prompt_with({"image": path}) for path in paths], GREEDY)
        by_url = {"type": "image_url", "image_url": {"url": "circle.png"}}
        assert vlm.chat([user_of(by_url)], GREEDY)[0].error is None
    assert len({tokens(output) for output in outputs}) == 1


def test_missing_file_is_named_to_the_caller_only(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with VLM(tiny_checkpoint) as vlm:
        for name in ("missing.png", tmp_path / "missing.png", tmp_path):
            (output,) = vlm.generate([prompt_with({"image": name})], GREEDY)
            assert str((tmp_path / name).resolve()) in str(output.error)
            assert "/" not in output.error.message


def test_invalid_file_is_named_to_the_caller_only(tiny_checkpoint, tmp_path):
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.png").write_text("words")
    problems = {"empty.png": "has 0 bytes", "text.png": "not a complete PNG"}
    with VLM(tiny_checkpoint) as vlm:
        for name, problem in problems.items():
            file = str(tmp_path / name)
            image = {"type": "image_url", "image_url": {"url": file}}
            frames = {"type": "video_url", "video_url": {"url": [str(CIRCLE), file]}}
            for output in vlm.chat([[user_of(image)], [user_of(frames)]], GREEDY):
                assert str(output.error).endswith(f"Its path is {file!r}.")
                assert problem in output.error.message
                assert "/" not in output.error.message


def test_refusal_of_local_file_names_the_option(tiny_checkpoint, monkeypatch):
    disallowed = VLM(tiny_checkpoint, allowed_local_media_path=None)
    monkeypatch.setenv("DASHINFER_VLM_ALLOWED_LOCAL_MEDIA_PATH", "/nowhere")
    for vlm in (disallowed, VLM(tiny_checkpoint)):
        with vlm, pytest.raises(MediaRefused, match="`allowed_local_media_path`"):
            vlm.generate(prompt_with({"image": str(CIRCLE)}), GREEDY)


# Defaults of all requests


def test_mm_processor_kwargs_of_vlm_are_defaults(tiny_checkpoint):
    large = prompt_with({"image": blurred_image(1, 168, 168)})
    with VLM(tiny_checkpoint, mm_processor_kwargs={"max_pixels": 28 * 28 * 9}) as vlm:
        small = vlm.generate(large, GREEDY)[0].usage.prompt_tokens_details.image_tokens
        own = {**large, "mm_processor_kwargs": {"max_pixels": 28 * 28 * 16}}
        assert small <= 9 < vlm.generate(own, GREEDY)[0].usage.prompt_tokens_details.image_tokens
    with pytest.raises(InvalidParameter) as caught:
        VLM(tiny_checkpoint, mm_processor_kwargs={"crop": 1})
    assert caught.value.param == "mm_processor_kwargs.crop"


def test_seed_makes_random_completions_reproducible(tiny_checkpoint):
    params, prompts = SamplingParams(max_tokens=8), ["Hello"] * 3
    found = []
    for seed in (1, 1, 2):
        with VLM(tiny_checkpoint, seed=seed) as vlm:
            found.append([tokens(output) for output in vlm.generate(prompts, params)])
    assert found[0] == found[1] != found[2]
    assert len(set(found[0])) == 3


# UUIDs


def test_uuid_references_previously_sent_image(demo):
    circle = Image.open(CIRCLE)
    first = {**prompt_with({"image": circle}), "multi_modal_uuids": {"image": ["circle"]}}
    again = {**prompt_with({"image": None}), "multi_modal_uuids": {"image": ["circle"]}}
    left_out = {"prompt": PROMPT, "multi_modal_uuids": {"image": "circle"}}
    unnamed = {**prompt_with({"image": [circle]}), "multi_modal_uuids": {"image": [None]}}
    for prompt in (first, again, left_out, unnamed):
        assert texts(demo.generate(prompt, GREEDY)) == ["A red circle."]
    part = {"type": "image_pil", "image_pil": None, "uuid": "circle"}
    conversation = [{"role": "user", "content": [part, DESCRIBE]}]
    assert texts(demo.chat(conversation, GREEDY)) == ["A red circle."]


@pytest.mark.parametrize(
    ("media", "uuids", "code"),
    [(None, "never seen", "uuid_not_cached"), (blurred_image(2), "taken", "uuid_conflict")],
)
def test_uuid_is_bound_to_its_content(demo, media, uuids, code):
    demo.generate({**prompt_with({"image": blurred_image(1)}), "multi_modal_uuids": {"image": ["taken"]}}, GREEDY)
    with pytest.raises(InvalidParameter) as caught:
        demo.generate({**prompt_with({"image": [media]}), "multi_modal_uuids": {"image": [uuids]}}, GREEDY)
    assert caught.value.code == code
    assert caught.value.param == "multi_modal_data.image[0].uuid"


# Errors


@cases(
    ("prompt", "error", "param"),
    [
        ({"prompt": "x", "images": []}, InvalidParameter, None),
        ({}, InvalidParameter, "prompt"),
        ({"prompt": "x", "prompt_token_ids": [1]}, InvalidParameter, "prompt"),
        ({"prompt_token_ids": [1, True]}, InvalidParameter, "prompt"),
        ({"prompt_token_ids": [1, -1]}, InvalidParameter, "prompt_token_ids"),
        ("", InvalidParameter, "prompt"),
        (prompt_with([1]), InvalidParameter, "multi_modal_data"),
        (prompt_with({"audio": "x.wav"}), UnsupportedParameter, "multi_modal_data.audio"),
        (prompt_with({"image": [blurred_image(1), 3]}), InvalidParameter, "multi_modal_data.image[1]"),
        (prompt_with({"image": [None]}), InvalidParameter, "multi_modal_data.image[0].image_url"),
        (prompt_with({"image": "/etc/hostname"}), MediaRefused, "multi_modal_data.image[0]"),
        (prompt_with({"image": Path("../outside.png")}), MediaRefused, "multi_modal_data.image[0]"),
        (prompt_with({"image": "film.mp4"}), MediaUndecodable, "multi_modal_data.image[0]"),
        (prompt_with({"image": "http://127.0.0.1:9/x.png"}), MediaRefused, "multi_modal_data.image[0]"),
        (prompt_with({"image": {"image": blurred_image(1), "resized_height": 9}}), InvalidParameter,
         "multi_modal_data.image[0]"),
        (prompt_with({"image": {"image": blurred_image(1), "fps": 1}}), InvalidParameter, "multi_modal_data.image[0]"),
        (prompt_with({"image": {"image": blurred_image(1), "max_pixels": 0}}), InvalidParameter,
         "multi_modal_data.image[0].image_url.max_pixels"),
        (prompt_with({"video": {"video": [blurred_image(1)] * 2, "num_frames": 2}}), InvalidParameter,
         "multi_modal_data.video[0].num_frames"),
        (prompt_with({"video": {"video": "film.mp4", "num_frames": 99}}), InvalidParameter,
         "multi_modal_data.video[0].num_frames"),
        (with_uuids(["a", "b"]), InvalidParameter, "multi_modal_uuids.image"),
        (with_uuids(5), InvalidParameter, "multi_modal_uuids.image"),
        (with_uuids([5]), InvalidParameter, "multi_modal_data.image[0].uuid"),
        ({**prompt_with({"image": blurred_image(1)}), "mm_processor_kwargs": {"crop": 1}}, InvalidParameter,
         "mm_processor_kwargs.crop"),
        ({"prompt": PROMPT}, InvalidParameter, "prompt"),
        (prompt_with({"image": [blurred_image(1), blurred_image(2)]}), InvalidParameter, "prompt"),
        (prompt_with({"video": [blurred_image(1), blurred_image(2)]}), InvalidParameter, "prompt"),
    ],
)  # fmt: skip
def test_invalid_prompt_is_named(demo, prompt, error, param):
    with pytest.raises(error) as caught:
        demo.generate(prompt, GREEDY)
    assert caught.value.param == param


ROWS = torch.zeros(16, 256)


@cases(
    ("rows", "grid", "options"),
    [
        (ROWS[:, :99], (1, 8, 8), {}),
        (ROWS[:15], (1, 8, 8), {}),
        (ROWS, (1, 7, 8), {}),
        (ROWS * torch.nan, (1, 8, 8), {}),
        (ROWS + torch.inf, (1, 8, 8), {}),
        (ROWS + 1e5, (1, 8, 8), {}),
        (ROWS, (1, 8, 8), {"max_pixels": 784}),
    ],
)
def test_invalid_embeddings_are_rejected_and_valid_ones_work(demo, rows, grid, options):
    wrong = {"type": "image_embeds", "image_embeds": {"image_embeds": rows, "image_grid_thw": grid}, **options}
    right = {"type": "image_embeds", "image_embeds": {"image_embeds": ROWS, "image_grid_thw": (1, 8, 8)}}
    first, second = demo.chat([[{"role": "user", "content": [part]}] for part in (wrong, right)], GREEDY)
    assert isinstance(first.error, RequestError)
    assert first.error.param.startswith("messages[0].content[0]")
    assert second.error is None


@cases(
    ("part", "param"),
    [
        ({"type": "image_pil", "image_pil": blurred_image(1), "colour": 1}, "messages[0].content[0]"),
        ({"type": "image_pil", "image_pil": 3}, "messages[0].content[0]"),
        ({"type": "image_pil"}, "messages[0].content[0].image_url"),
        ({"type": "image_pil", "image_pil": blurred_image(1), "min_pixels": 9, "max_pixels": 8},
         "messages[0].content[0].image_url.min_pixels"),
        ({"type": "video", "video": [blurred_image(1), "x"]}, "messages[0].content[0][1]"),
        ({"type": "audio_url"}, "messages[0].content[0].type"),
        ({"type": "image_url", "image_url": {"url": "/etc/hostname"}}, "messages[0].content[0]"),
        ({"type": "image_url", "image_url": {"max_pixls": 1}}, "messages[0].content[0].image_url.max_pixls"),
        (3, "messages[0].content[0]"),
    ],
)  # fmt: skip
def test_invalid_part_is_named(demo, part, param):
    with pytest.raises(RequestError) as caught:
        demo.chat([{"role": "user", "content": [part]}], GREEDY)
    assert caught.value.param == param


def test_invalid_item_fails_alone(demo):
    good = prompt_with({"image": Image.open(CIRCLE)})
    outputs = demo.generate([good, {"prompt": "x", "unknown": 1}, prompt_with({"image": "no.png"}), good], GREEDY)
    assert [output.error is None for output in outputs] == [True, False, False, True]
    assert [output.outputs[0].text for output in (outputs[0], outputs[3])] == ["A red circle."] * 2
    assert (outputs[1].outputs, outputs[1].usage, outputs[1].prompt) == ((), None, "x")
    assert "unknown" in outputs[1].error.message
    assert len({output.request_id for output in outputs}) == 4


def test_single_list_item_error_is_not_raised(demo):
    (output,) = demo.generate([{"prompt": PROMPT}], GREEDY)
    assert isinstance(output.error, InvalidParameter)
    (output,) = demo.chat([[{"role": "nobody", "content": "x"}]], GREEDY)
    assert output.error.param == "messages[0].role"


# Sampling


@cases(
    ("options", "error", "param"),
    [
        ({"temperature": -1.0}, InvalidParameter, "temperature"),
        ({"top_p": -0.1}, InvalidParameter, "top_p"),
        ({"max_tokens": 0}, InvalidParameter, "max_tokens"),
        ({"logprobs": 21}, InvalidParameter, "top_logprobs"),
        ({"logit_bias": {"x": 1.0}}, InvalidParameter, "logit_bias"),
        ({"n": 17}, InvalidParameter, "n"),
    ],
)
def test_invalid_sampling_params_are_rejected(options, error, param):
    with pytest.raises(error) as caught:
        SamplingParams(**options)
    assert caught.value.param == param


def test_special_tokens_are_text_on_request(scripted):
    vlm, _ = scripted("<|im_start|>red")
    for skip, text in ((True, "red"), (False, "<|im_start|>red")):
        (output,) = vlm.generate("Hello", SamplingParams(skip_special_tokens=skip))
        assert output.outputs[0].text == text


def test_all_sampling_params_reach_decoder(scripted):
    vlm, script = scripted("ok")
    params = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, max_tokens=5, min_tokens=1, stop=["q"], stop_token_ids=[3],
        seed=4, presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1, logit_bias={5: 2.0}, logprobs=2,
        ignore_eos=True, no_repeat_ngram_size=3, extra_args={"window_size": 50},
    )  # fmt: skip
    vlm.generate("Hello", params)
    found = script.requests[0].sampling
    for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "presence_penalty",
                 "ignore_eos", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs",
                 "no_repeat_ngram_size"):  # fmt: skip
        assert getattr(found, name) == getattr(params, name), name
    assert found.no_repeat_ngram_window == 50
    assert found.stop_token_ids == (3,)


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        (StructuredOutputsParams(choice=["small", "large"]), "small|large"),
        (StructuredOutputsParams(regex="[A-Z]{2}-[0-9]{3}"), "[A-Z]{2}-[0-9]{3}"),
        (StructuredOutputsParams(json={"enum": ["small", "large"]}), '"(small|large)"'),
        ({"json": '{"const": 3}'}, "3"),
    ],
    ids=label,
)
def test_structured_outputs_are_enforced(demo, given, pattern):
    params = SamplingParams(structured_outputs=given, seed=1)
    (rendered,) = demo.generate({"prompt": "Hello"}, params)
    (chatted,) = demo.chat([{"role": "user", "content": "Hello"}], params)
    for output in (rendered, chatted):
        assert re.fullmatch(pattern, output.outputs[0].text)
        assert output.outputs[0].finish_reason == "stop"


def test_stop_reason_length_and_logprobs_are_returned(scripted):
    vlm, _ = scripted("One two three.")
    (stopped,) = vlm.generate("x", SamplingParams(stop=" two"))
    assert (stopped.outputs[0].text, stopped.outputs[0].finish_reason) == ("One", "stop")
    (cut,) = vlm.generate("x", SamplingParams(max_tokens=2, logprobs=1))
    assert cut.outputs[0].finish_reason == "length"
    assert len(cut.outputs[0].token_ids) == len(cut.outputs[0].logprobs) == cut.usage.completion_tokens == 2
    assert cut.outputs[0].logprobs[0].logprob == 0.0


def test_each_prompt_may_have_its_own_sampling_params(scripted):
    vlm, _ = scripted("One two three.")
    params = [SamplingParams(max_tokens=count) for count in (1, 2, 3)]
    assert [output.usage.completion_tokens for output in vlm.generate(["a", "b", "c"], params)] == [1, 2, 3]
    for prompts in (["a", "b"], (text for text in "abc"), "abc"):
        with pytest.raises(InvalidParameter) as caught:
            vlm.generate(prompts, params)
        assert caught.value.param == "sampling_params"


def test_wrong_type_of_arguments_is_named(scripted):
    vlm, script = scripted("ok")
    message = {"role": "user", "content": "Hello"}
    calls = [
        ("messages", lambda: vlm.chat("Hello")),
        ("messages", lambda: vlm.chat(message)),
        ("sampling_params", lambda: vlm.chat([message], {"temperature": 0})),
        ("sampling_params", lambda: vlm.generate(["a", "b"], [GREEDY, {"temperature": 0}])),
    ]
    for param, call in calls:
        with pytest.raises(InvalidParameter) as caught:
            call()
        assert caught.value.param == param
    assert script.requests == []


# Batches


def test_outputs_are_in_order_and_batch_stays_full(scripted):
    vlm, script = scripted(lambda request: "x" * (1 + len(request.token_ids) % 7), delay=0.05, max_batch_size=4)

    def prompts():
        for index in range(60):
            if script.running >= 4:
                script.delay = 0.001
            yield "a" * (1 + index)

    outputs = vlm.generate(prompts(), GREEDY)
    assert [len(output.prompt) for output in outputs] == list(range(1, 61))
    assert [len(output.outputs[0].text) for output in outputs] == [
        1 + len(output.prompt_token_ids) % 7 for output in outputs
    ]
    assert [int(output.request_id) for output in outputs] == list(range(60))
    assert script.delay == 0.001, "four requests never ran at the same time"


@pytest.mark.slow
def test_generator_of_prompts_is_read_lazily(scripted):
    vlm, _ = scripted("ok", max_batch_size=2, max_waiting=1)
    seen, alive = [], []

    def prompts():
        for seed in range(40):
            image = blurred_image(seed)
            seen.append(weakref.ref(image))
            alive.append(sum(reference() is not None for reference in seen))
            yield prompt_with({"image": image})
            del image

    assert texts(vlm.generate(prompts(), GREEDY)) == ["ok"] * 40
    assert max(alive) <= 6  # three in flight, plus references held by the generator, the batch and a thread


def test_empty_input_gives_empty_output(scripted):
    vlm, _ = scripted("ok")
    assert vlm.generate([]) == []
    assert vlm.chat([]) == []


def test_full_queue_is_retried(scripted):
    vlm, script = scripted(QueueFull("Busy.", retry_after=0.01), QueueFull("Busy.", retry_after=0.01), "ok")
    assert texts(vlm.generate(["a", "b", "c"], GREEDY)) == ["ok"] * 3
    assert len(script.requests) == 5


def test_rejected_requests_wait_together(monkeypatch):
    delays = []
    monkeypatch.setattr(batch, "time", SimpleNamespace(sleep=delays.append))
    outcomes = [QueueFull("Busy.", retry_after=1.0), QueueFull("Busy.", retry_after=2.0), None, None]

    def submit(_):
        future = Future()
        if error := outcomes.pop(0):
            future.set_exception(error)
        else:
            future.set_result("ok")
        return future

    requests = OfflineBatch(SimpleNamespace(submit=submit), limit=2, on_done=lambda: None)
    assert requests.run([lambda: None] * 2) == ["ok"] * 2
    assert delays == [2.0]


def test_threads_share_vlm(scripted):
    vlm, _ = scripted(lambda request: "x" * len(request.token_ids), delay=0.001, max_batch_size=2)
    found = {}

    def generate(size):
        found[size] = vlm.generate(["a" * size] * 5, SamplingParams(max_tokens=99), use_tqdm=False)

    threads = [threading.Thread(target=generate, args=(size,)) for size in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all({output.prompt for output in outputs} == {"a" * size} for size, outputs in found.items())
    assert len({output.request_id for outputs in found.values() for output in outputs}) == 15


@pytest.mark.client("vllm-style", "cancel")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_interruption_cancels_running_requests(scripted, error):
    vlm, script = scripted("A long answer that goes on. " * 20, delay=0.05)

    def prompts():
        yield from ("a", "b")
        until(lambda: script.running == 2)
        raise error

    with pytest.raises(error):
        vlm.generate(prompts())
    until(lambda: script.running == 0)
    assert vlm.generate("a", SamplingParams(max_tokens=1))[0].error is None


def test_generate_works_inside_event_loop(scripted):
    vlm, _ = scripted("ok")

    async def notebook():
        return vlm.generate("a", GREEDY)

    assert texts(asyncio.run(notebook())) == ["ok"]


def test_progress_bar_can_be_disabled(scripted, capsys):
    vlm, _ = scripted("ok")
    vlm.generate(["a"] * 7, GREEDY, use_tqdm=False)
    vlm.chat([{"role": "user", "content": "a"}], GREEDY, False)  # positional in vLLM, too
    assert capsys.readouterr() == ("", "")
    vlm.generate(["a"] * 7, GREEDY)
    assert "7/7" in capsys.readouterr().err
    bars = []
    vlm.generate(
        ["a"] * 7, GREEDY, use_tqdm=lambda **options: bars.append(tqdm(**{**options, "disable": True})) or bars[0]
    )
    assert (len(bars), bars[0].total) == (1, 7)


# Attributes and methods of vLLM


def test_outputs_have_attributes_of_vllm(scripted):
    vlm, _ = scripted("One two three.")
    (output,) = vlm.generate("x", SamplingParams(max_tokens=2, logprobs=1))
    assert output.finished
    assert output.num_cached_tokens == output.usage.prompt_tokens_details.cached_tokens
    assert output.outputs[0].finished()
    assert output.outputs[0].cumulative_logprob == 0.0
    assert vlm.generate("x", SamplingParams(max_tokens=2))[0].outputs[0].cumulative_logprob is None
    (failed,) = vlm.generate([{"prompt": PROMPT}], GREEDY)
    assert (failed.num_cached_tokens, failed.metrics, failed.lora_request) == (None, None, None)
    assert vlm.get_default_sampling_params() == SamplingParams()


def test_metrics_are_in_the_order_of_events(scripted):
    vlm, _ = scripted("One two three.")
    before, start = time.time(), time.monotonic()
    (output,) = vlm.generate("x", SamplingParams(n=2, seed=1))
    metrics = output.metrics
    assert metrics.num_generation_tokens == sum(len(choice.token_ids) for choice in output.outputs)
    assert before <= metrics.arrival_time <= time.time()
    assert start <= metrics.queued_ts <= metrics.first_token_ts < metrics.last_token_ts <= time.monotonic()
    assert 0 < metrics.first_token_latency <= metrics.first_token_ts - start


def test_stop_reason_is_what_ended_the_completion(scripted):
    vlm, _ = scripted("One two three.")
    (first,) = vlm.generate("x", GREEDY)
    *_, token, end = first.outputs[0].token_ids
    cases = [
        (SamplingParams(), None),
        (SamplingParams(max_tokens=2), None),
        (SamplingParams(stop=[" two", "two three"]), " two"),
        (SamplingParams(stop=["two", " two"], n=2), " two"),
        (SamplingParams(stop_token_ids=[end]), None),
        (SamplingParams(stop_token_ids=[end], ignore_eos=True), end),
        (SamplingParams(stop_token_ids=[token]), None),  # a script continues after it
    ]
    assert first.outputs[0].stop_reason is None
    for params, expected in cases:
        (output,) = vlm.generate("x", params)
        assert [completion.stop_reason for completion in output.outputs] == [expected] * params.n, params


def test_chat_template_kwargs_reach_the_template(scripted, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}{{ '!' if loud else '?' }}")
    vlm, _ = scripted("ok", chat_template=template)
    messages = [{"role": "user", "content": "Hello"}]
    (quiet,), (loud,) = (vlm.chat(messages, GREEDY, chat_template_kwargs={"loud": loud}) for loud in (False, True))
    assert quiet.prompt_token_ids != loud.prompt_token_ids
    with pytest.raises(InvalidParameter) as caught:
        vlm.chat(messages, GREEDY, chat_template_kwargs={"calm": True})
    assert caught.value.param == "chat_template_kwargs.calm"


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_tool_calls_are_text(scripted):
    """The loop of vLLM's example: the result follows the text of the call."""
    vlm, script = scripted(f"I look.\n{CALL}", "It is sunny.", CALL.replace("weather", "clock"), CALL)
    messages = [{"role": "user", "content": "How is the weather in Rome?"}]
    (output,) = vlm.chat(messages, tools=[WEATHER])
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == (f"I look.\n{CALL}", "stop")
    messages += [
        {"role": "assistant", "content": output.outputs[0].text},
        {"role": "tool", "content": "Sunny.", "tool_call_id": "1"},
    ]
    (answer,) = vlm.chat(messages, tools=[WEATHER])
    assert answer.outputs[0].text == "It is sunny."
    assert len(answer.prompt_token_ids) > len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
    with pytest.raises(DecoderFailed, match="violates the requested format"):
        vlm.chat(messages, tools=[WEATHER])
    without = len(vlm.chat(messages[:1])[0].prompt_token_ids)
    assert len(script.requests[0].token_ids) > without
    with pytest.raises(InvalidParameter) as caught:
        vlm.chat(messages, tools=[{"type": "function", "function": {"name": "a b"}}])
    assert caught.value.param == "tools[0].function.name"


def test_coordinates_of_the_original_image(scripted):
    vlm, _ = scripted("(500,500)")
    messages = [user(blurred_image(1, 300, 200), "Where is it?")]
    for coordinates, text in (("original", "(150,100)"), ("model", "(500,500)")):
        assert texts(vlm.chat(messages, GREEDY, coordinates=coordinates)) == [text]


def test_reasoning_is_returned_next_to_the_text(scripted, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}<think>\n")
    vlm, _ = scripted("It has wheels.\n</think>\n\nA car.", "A car.", chat_template=template)
    (output,) = vlm.chat([{"role": "user", "content": "What is it?"}])
    assert (output.outputs[0].reasoning_content, output.outputs[0].text) == ("It has wheels.", "A car.")
    (rendered,) = vlm.generate("What is it?")
    assert (rendered.outputs[0].reasoning_content, rendered.outputs[0].text) == (None, "A car.")


def test_get_tokenizer_renders_prompts(demo):
    tokenizer = demo.get_tokenizer()
    messages = [{"role": "user", "content": [{"type": "image"}, DESCRIBE]}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    (output,) = demo.generate({"prompt": prompt, "multi_modal_data": {"image": Image.open(CIRCLE)}}, GREEDY)
    assert output.outputs[0].text == "A red circle."


@pytest.mark.parametrize(
    ("name", "next_step"),
    [("classify", "`embed`, `encode` or `score`"), ("beam_search", "with `n`"), ("sleep", "`close`")],
)
def test_unavailable_methods_of_vllm_are_refused(scripted, name, next_step):
    vlm, _ = scripted("ok")
    with pytest.raises(AttributeError, match=next_step):
        getattr(vlm, name)
    with pytest.raises(AttributeError, match="no attribute 'complete'"):
        vlm.complete("x")


# Open and close


def test_given_engine_is_left_open(tiny_checkpoint):
    with scripted_engine("ok", model=str(tiny_checkpoint)) as engine:
        with VLM(engine=engine) as vlm:
            assert vlm.engine is engine
        assert engine.status().state == "ready"
        with pytest.raises(ConfigError):
            VLM("demo", engine=engine)


def test_own_engine_is_closed(tiny_checkpoint):
    with VLM(tiny_checkpoint) as vlm:
        pass
    vlm.close()
    assert vlm.engine.status().state == "closed"
    with pytest.raises(EngineClosed):
        vlm.generate("a")
    assert [type(output.error) for output in vlm.generate(["a", "b"])] == [EngineClosed] * 2


def test_low_detail_respects_model_limit(demo):
    part = {"type": "image_url", "image_url": {"url": data_url(Image.open(CIRCLE)), "detail": "low"}}
    (output,) = demo.chat([[user_of(part)]], GREEDY, use_tqdm=False)
    assert texts([output]) == ["A red circle."]


def test_invalid_objects_fail_alone(demo):
    with CIRCLE.open("rb") as file:
        odd = [{"type": ["x"]}, {"type": "image_pil", "image_pil": file}, {"type": "image_pil", "image_pil": object()}]
        good = {"type": "image_pil", "image_pil": Image.open(CIRCLE)}
        outputs = demo.chat([[user_of(part)] for part in (*odd, good)], GREEDY, use_tqdm=False)
        assert file.read(4) == b"\x89PNG"  # the caller's file remains open
    assert all(isinstance(output.error, InvalidParameter) for output in outputs[:3])
    assert texts(outputs[3:]) == ["A red circle."]


def test_prompt_with_lone_surrogate_is_rejected(demo):
    with pytest.raises(InvalidParameter) as caught:
        demo.generate("\ud800", GREEDY, use_tqdm=False)
    assert caught.value.param == "prompt"


def user_of(part):
    return {"role": "user", "content": [part, DESCRIBE]}
