"""VLM: many prompts and conversations of this process, with objects in place of URLs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dashinfer_vlm_core import VLM, Engine, SamplingParams
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import (
    ConfigError,
    EngineClosed,
    InvalidParameter,
    MediaRefused,
    MediaUndecodable,
    QueueFull,
    RequestError,
    UnsupportedParameter,
)
from dashinfer_vlm_core.testing import Script, scripted_engine, scripted_registry
from dashinfer_vlm_demo import CHECKPOINT
from tests.conversations import CONVERSATIONS, blurred_image, data_url, user
from tests.samples import encode_video, label
from tests.waiting import until
from training.transformers_engine import TransformersEngine

TOKENS = 24
DESCRIBE = {"type": "text", "text": "Describe the picture."}
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
CIRCLE = Path(__file__).parents[2] / "examples" / "pictures" / "circle.png"
PROMPT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|>"
    "<|vision_end|>Describe the picture.<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module", params=["tiny", "demo"])
def checkpoint(request, tiny_checkpoint):
    return tiny_checkpoint if request.param == "tiny" else CHECKPOINT


@pytest.fixture(scope="module")
def oracle(checkpoint):
    return TransformersEngine(checkpoint)


@pytest.fixture(scope="module")
def expected(oracle):
    return {name: tuple(oracle.generate([messages])[0][0][:TOKENS]) for name, messages in CONVERSATIONS.items()}


@pytest.fixture(scope="module")
def exact(checkpoint):
    """The model of the oracle, in its precision."""
    with VLM(checkpoint, dtype="float32") as vlm:
        yield vlm


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The bundled model, with a folder that it may read."""
    folder = tmp_path_factory.mktemp("allowed")
    (folder / "circle.png").write_bytes(CIRCLE.read_bytes())
    (folder / "film.mp4").write_bytes(encode_video())
    with VLM("demo", allowed_local_media_path=folder) as vlm:
        yield vlm


@pytest.fixture
def scripted(tiny_checkpoint):
    """A VLM whose decoder plays a script, and the script."""
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


def about(media):
    return {"prompt": PROMPT, "multi_modal_data": media}


def named(uuids):
    return {**about({"image": blurred_image(1)}), "multi_modal_uuids": {"image": uuids}}


# The same answers as the model gives elsewhere


@pytest.mark.slow
def test_conversations_with_objects_equal_transformers(exact, expected):
    outputs = exact.chat(list(CONVERSATIONS.values()), GREEDY)
    assert dict(zip(expected, map(tokens, outputs), strict=True)) == expected


def rendered(oracle, messages):
    """The prompt of a conversation, as its template writes it, and its media."""
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    media = {kind: [part[kind] for part in parts if part["type"] == kind] for kind in ("image", "video")}
    text = oracle.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return {"prompt": text, "multi_modal_data": {kind: found for kind, found in media.items() if found}}


def test_rendered_prompts_equal_transformers(exact, oracle, expected):
    outputs = exact.generate([rendered(oracle, messages) for messages in CONVERSATIONS.values()], GREEDY)
    assert dict(zip(expected, map(tokens, outputs), strict=True)) == expected


def test_token_ids_are_a_prompt_too(exact, oracle, expected):
    prompt = rendered(oracle, CONVERSATIONS["one picture"])
    ids = oracle.tokenizer(prompt["prompt"], add_special_tokens=False)["input_ids"]
    media = prompt["multi_modal_data"]
    (output,) = exact.generate({"prompt_token_ids": ids, "multi_modal_data": media}, GREEDY)
    assert tokens(output) == expected["one picture"]
    assert output.prompt is None
    text = oracle.tokenizer("Hello there.", add_special_tokens=False)["input_ids"]
    assert exact.generate(text, GREEDY)[0].prompt_token_ids == tuple(text)


def test_pictures_and_videos_may_take_turns_in_a_prompt(exact, oracle):
    """The media are given by kind: which placeholder is whose follows from the prompt."""
    messages = [user([blurred_image(1), blurred_image(2)], blurred_image(3), "then", [blurred_image(4), blurred_image(5)], blurred_image(6))]
    (answer,) = oracle.generate([messages])[0]
    (output,) = exact.generate(rendered(oracle, messages), GREEDY)
    assert tokens(output) == tuple(answer[:TOKENS])


def embedded(oracle, part):
    """The part with what transformers' vision tower makes of it."""
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


def test_embeddings_equal_pixels_token_for_token(exact, oracle, expected):
    names = [name for name, messages in CONVERSATIONS.items() if isinstance(messages[0]["content"], list)]
    conversations = [
        [
            message
            if isinstance(message["content"], str)
            else {**message, "content": [embedded(oracle, part) for part in message["content"]]}
            for message in CONVERSATIONS[name]
        ]
        for name in names
    ]
    assert [tokens(output) for output in exact.chat(conversations, GREEDY)] == [expected[name] for name in names]
    prompts = [rendered(oracle, messages) for messages in conversations]
    assert [tokens(output) for output in exact.generate(prompts, GREEDY)] == [expected[name] for name in names]


def test_it_is_the_rows_that_are_read(demo):
    """Else the test above might pass by answers that are right without looking."""
    oracle, answers = TransformersEngine(CHECKPOINT), []
    for name in ("circle", "pair"):
        part = embedded(oracle, {"type": "image", "image": Image.open(CIRCLE.parent / f"{name}.png").convert("RGB")})
        answers += texts(demo.chat([{"role": "user", "content": [part, DESCRIBE]}], GREEDY))
    assert answers[0] == "A red circle." != answers[1]


# What a picture and a video may be


@pytest.mark.parametrize(
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
    ids=["pil", "rgba", "array", "tensor", "text", "path", "data", "options", "part"],
)
def test_a_picture_in_every_form_is_answered_the_same(demo, content):
    (output,) = demo.generate(about({"image": content}), GREEDY)
    assert output.outputs[0].text == "A red circle."
    part = content if isinstance(content, dict) else {"image": content}
    (output,) = demo.chat(
        [{"role": "user", "content": [{**part, "type": "image"}, DESCRIBE]}],
        GREEDY,
    )
    assert output.outputs[0].text == "A red circle."


@pytest.mark.parametrize(
    "content",
    ["film.mp4", {"video": Path("film.mp4"), "fps": 2.0, "max_pixels": 20_000}, {"video": "film.mp4", "nframes": 4}],
)
def test_a_video_file_is_sampled(demo, content):
    prompt = {"prompt": PROMPT.replace("image", "video"), "multi_modal_data": {"video": content}}
    (output,) = demo.generate(prompt, GREEDY)
    assert output.usage.prompt_tokens_details.video_tokens > 0


def test_a_list_of_pictures_is_one_video_and_a_list_of_lists_several(demo):
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


def test_options_for_all_media_bound_their_sizes(demo):
    large = blurred_image(1, 224, 224)
    plain = demo.generate(about({"image": large}), GREEDY)[0].usage.prompt_tokens_details.image_tokens
    small = {**about({"image": large}), "mm_processor_kwargs": {"max_pixels": 28 * 28 * 16}}
    assert demo.generate(small, GREEDY)[0].usage.prompt_tokens_details.image_tokens <= 16 < plain
    chat = demo.chat([user(large, "?")], GREEDY, mm_processor_kwargs={"max_pixels": 28 * 28 * 16})
    assert chat[0].usage.prompt_tokens_details.image_tokens <= 16


# Names


def test_what_was_sent_under_a_name_need_not_be_sent_again(demo):
    circle = Image.open(CIRCLE)
    first = {**about({"image": circle}), "multi_modal_uuids": {"image": ["circle"]}}
    again = {**about({"image": None}), "multi_modal_uuids": {"image": ["circle"]}}
    left_out = {"prompt": PROMPT, "multi_modal_uuids": {"image": "circle"}}
    unnamed = {**about({"image": [circle]}), "multi_modal_uuids": {"image": [None]}}
    for prompt in (first, again, left_out, unnamed):
        assert texts(demo.generate(prompt, GREEDY)) == ["A red circle."]
    part = {"type": "image_pil", "image_pil": None, "uuid": "circle"}
    conversation = [{"role": "user", "content": [part, DESCRIBE]}]
    assert texts(demo.chat(conversation, GREEDY)) == ["A red circle."]


@pytest.mark.parametrize(
    ("media", "uuids", "code"),
    [(None, "never seen", "uuid_not_cached"), (blurred_image(2), "taken", "uuid_conflict")],
)
def test_a_name_is_bound_to_what_it_came_with(demo, media, uuids, code):
    demo.generate({**about({"image": blurred_image(1)}), "multi_modal_uuids": {"image": ["taken"]}}, GREEDY)
    with pytest.raises(InvalidParameter) as caught:
        demo.generate({**about({"image": [media]}), "multi_modal_uuids": {"image": [uuids]}}, GREEDY)
    assert caught.value.code == code
    assert caught.value.param == "multi_modal_data.image[0].uuid"


# What goes wrong


@pytest.mark.parametrize(
    ("prompt", "error", "param"),
    [
        ({"prompt": "x", "images": []}, InvalidParameter, None),
        ({}, InvalidParameter, "prompt"),
        ({"prompt": "x", "prompt_token_ids": [1]}, InvalidParameter, "prompt"),
        ({"prompt_token_ids": [1, True]}, InvalidParameter, "prompt"),
        ({"prompt_token_ids": [1, -1]}, InvalidParameter, "prompt_token_ids"),
        ("", InvalidParameter, "prompt"),
        (about([1]), InvalidParameter, "multi_modal_data"),
        (about({"audio": "x.wav"}), UnsupportedParameter, "multi_modal_data.audio"),
        (about({"image": [blurred_image(1), 3]}), InvalidParameter, "multi_modal_data.image[1]"),
        (about({"image": [None]}), InvalidParameter, "multi_modal_data.image[0].image_url"),
        (about({"image": "/etc/hostname"}), MediaRefused, "multi_modal_data.image[0]"),
        (about({"image": Path("../outside.png")}), MediaRefused, "multi_modal_data.image[0]"),
        (about({"image": "film.mp4"}), MediaUndecodable, "multi_modal_data.image[0]"),
        (about({"image": "http://127.0.0.1:9/x.png"}), MediaRefused, "multi_modal_data.image[0]"),
        (about({"image": {"image": blurred_image(1), "resized_height": 9}}), InvalidParameter, "multi_modal_data.image[0]"),
        (about({"image": {"image": blurred_image(1), "fps": 1}}), InvalidParameter, "multi_modal_data.image[0]"),
        (about({"image": {"image": blurred_image(1), "max_pixels": 0}}), InvalidParameter,
         "multi_modal_data.image[0].image_url.max_pixels"),
        (about({"video": {"video": [blurred_image(1)] * 2, "fps": 1.0}}), UnsupportedParameter,
         "multi_modal_data.video[0].fps"),
        (named(["a", "b"]), InvalidParameter, "multi_modal_uuids.image"),
        (named(5), InvalidParameter, "multi_modal_uuids.image"),
        (named([5]), InvalidParameter, "multi_modal_data.image[0].uuid"),
        ({**about({"image": blurred_image(1)}), "mm_processor_kwargs": {"crop": 1}}, InvalidParameter,
         "mm_processor_kwargs.crop"),
        ({"prompt": PROMPT}, InvalidParameter, "prompt"),
        (about({"image": [blurred_image(1), blurred_image(2)]}), InvalidParameter, "prompt"),
        (about({"video": [blurred_image(1), blurred_image(2)]}), InvalidParameter, "prompt"),
    ],
    ids=label,
)  # fmt: skip
def test_a_wrong_prompt_is_named(demo, prompt, error, param):
    with pytest.raises(error) as caught:
        demo.generate(prompt, GREEDY)
    assert caught.value.param == param


ROWS = torch.zeros(16, 256)


@pytest.mark.parametrize(
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
    ids=["width", "rows", "grid", "nan", "inf", "huge", "options"],
)
def test_embeddings_that_do_not_fit_are_refused_and_the_next_ones_work(demo, rows, grid, options):
    wrong = {"type": "image_embeds", "image_embeds": {"image_embeds": rows, "image_grid_thw": grid}, **options}
    right = {"type": "image_embeds", "image_embeds": {"image_embeds": ROWS, "image_grid_thw": (1, 8, 8)}}
    first, second = demo.chat([[{"role": "user", "content": [part]}] for part in (wrong, right)], GREEDY)
    assert isinstance(first.error, RequestError)
    assert first.error.param.startswith("messages[0].content[0]")
    assert second.error is None


@pytest.mark.parametrize(
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
        (3, "messages[0].content[0]"),
    ],
    ids=label,
)  # fmt: skip
def test_a_wrong_part_is_named(demo, part, param):
    with pytest.raises(RequestError) as caught:
        demo.chat([{"role": "user", "content": [part]}], GREEDY)
    assert caught.value.param == param


def test_one_bad_item_fails_alone(demo):
    good = about({"image": Image.open(CIRCLE)})
    outputs = demo.generate([good, {"prompt": "x", "unknown": 1}, about({"image": "no.png"}), good], GREEDY)
    assert [output.error is None for output in outputs] == [True, False, False, True]
    assert [output.outputs[0].text for output in (outputs[0], outputs[3])] == ["A red circle."] * 2
    assert (outputs[1].outputs, outputs[1].usage, outputs[1].prompt) == ((), None, "x")
    assert "unknown" in outputs[1].error.message
    assert len({output.request_id for output in outputs}) == 4


def test_alone_in_a_list_it_is_an_item_too(demo):
    (output,) = demo.generate([{"prompt": PROMPT}], GREEDY)
    assert isinstance(output.error, InvalidParameter)
    (output,) = demo.chat([[{"role": "nobody", "content": "x"}]], GREEDY)
    assert output.error.param == "messages[0].role"


# Sampling


@pytest.mark.parametrize(
    ("options", "error", "param"),
    [
        ({"temperature": -1.0}, InvalidParameter, "temperature"),
        ({"top_p": 0.0}, InvalidParameter, "top_p"),
        ({"max_tokens": 0}, InvalidParameter, "max_tokens"),
        ({"logprobs": 21}, InvalidParameter, "top_logprobs"),
        ({"logit_bias": {"x": 1.0}}, InvalidParameter, "logit_bias"),
        ({"n": 17}, InvalidParameter, "n"),
    ],
)
def test_wrong_sampling_is_refused_where_it_is_written(options, error, param):
    with pytest.raises(error) as caught:
        SamplingParams(**options)
    assert caught.value.param == param


def test_all_sampling_reaches_the_decoder(scripted):
    vlm, script = scripted("ok")
    params = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, max_tokens=5, min_tokens=1, stop=["q"], stop_token_ids=[3], seed=4,
        presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1, logit_bias={5: 2.0}, logprobs=2,
        ignore_eos=True,
    )  # fmt: skip
    vlm.generate("Hello", params)
    found = script.requests[0].sampling
    for name in ("temperature", "top_p", "top_k", "max_tokens", "min_tokens", "seed", "presence_penalty", "ignore_eos",
                 "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs"):  # fmt: skip
        assert getattr(found, name) == getattr(params, name), name
    assert found.stop_token_ids == (3,)


def test_stop_strings_lengths_and_log_probabilities_come_back(scripted):
    vlm, _ = scripted("One two three.")
    (stopped,) = vlm.generate("x", SamplingParams(stop=" two"))
    assert (stopped.outputs[0].text, stopped.outputs[0].finish_reason) == ("One", "stop")
    (cut,) = vlm.generate("x", SamplingParams(max_tokens=2, logprobs=1))
    assert cut.outputs[0].finish_reason == "length"
    assert len(cut.outputs[0].token_ids) == len(cut.outputs[0].logprobs) == cut.usage.completion_tokens == 2
    assert cut.outputs[0].logprobs[0].logprob == 0.0


def test_each_prompt_may_have_its_own_sampling(scripted):
    vlm, _ = scripted("One two three.")
    params = [SamplingParams(max_tokens=count) for count in (1, 2, 3)]
    assert [output.usage.completion_tokens for output in vlm.generate(["a", "b", "c"], params)] == [1, 2, 3]
    for prompts in (["a", "b"], (text for text in "abc"), "abc"):
        with pytest.raises(InvalidParameter) as caught:
            vlm.generate(prompts, params)
        assert caught.value.param == "sampling_params"


# Many at once


def test_answers_come_in_order_and_the_batch_stays_full(scripted):
    together = []
    vlm, script = scripted(lambda request: "x" * (1 + len(request.token_ids) % 7), delay=0.002, max_batch_size=4)

    def prompts():
        for index in range(60):
            together.append(script.running)
            yield "a" * (1 + index)

    outputs = vlm.generate(prompts(), GREEDY)
    assert [len(output.prompt) for output in outputs] == list(range(1, 61))
    assert [len(output.outputs[0].text) for output in outputs] == [
        1 + len(output.prompt_token_ids) % 7 for output in outputs
    ]
    assert [int(output.request_id) for output in outputs] == list(range(60))
    assert max(together) >= 4


def test_a_generator_of_pictures_is_read_as_it_is_used(scripted):
    vlm, _ = scripted("ok", max_batch_size=2, max_waiting=1)
    seen, most = [], []

    def prompts():
        for seed in range(40):
            image = blurred_image(seed)
            seen.append(weakref.ref(image))
            most.append(sum(reference() is not None for reference in seen))
            yield about({"image": image})
            del image

    assert texts(vlm.generate(prompts(), GREEDY)) == ["ok"] * 40
    assert max(most) <= 6  # three under way, and what the generator, the batch and a thread still have in hand


def test_nothing_is_an_answer_to_nothing(scripted):
    vlm, _ = scripted("ok")
    assert vlm.generate([]) == []
    assert vlm.chat([]) == []


def test_a_full_engine_is_waited_for(scripted):
    vlm, script = scripted(QueueFull("Busy.", retry_after=0.01), QueueFull("Busy.", retry_after=0.01), "ok")
    assert texts(vlm.generate(["a", "b", "c"], GREEDY)) == ["ok"] * 3
    assert len(script.requests) == 5


def test_threads_share_a_vlm(scripted):
    vlm, _ = scripted(lambda request: "x" * len(request.token_ids), delay=0.001, max_batch_size=2)
    found = {}

    def ask(size):
        found[size] = vlm.generate(["a" * size] * 5, SamplingParams(max_tokens=99), use_tqdm=False)

    threads = [threading.Thread(target=ask, args=(size,)) for size in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all({output.prompt for output in outputs} == {"a" * size} for size, outputs in found.items())
    assert len({output.request_id for outputs in found.values() for output in outputs}) == 15


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_what_interrupts_it_cancels_what_runs(scripted, error):
    vlm, script = scripted("A long answer that goes on. " * 20, delay=0.05)

    def prompts():
        yield from ("a", "b")
        until(lambda: script.running == 2)
        raise error

    with pytest.raises(error):
        vlm.generate(prompts())
    until(lambda: script.running == 0)
    assert vlm.generate("a", SamplingParams(max_tokens=1))[0].error is None


def test_it_answers_where_an_event_loop_runs(scripted):
    vlm, _ = scripted("ok")

    async def notebook():
        return vlm.generate("a", GREEDY)

    assert texts(asyncio.run(notebook())) == ["ok"]


def test_the_progress_bar_is_shown_unless_it_is_not_wanted(scripted, capsys):
    vlm, _ = scripted("ok")
    vlm.generate(["a"] * 7, GREEDY, use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    vlm.generate(["a"] * 7, GREEDY)
    assert "7/7" in capsys.readouterr().err


# Open and close


def test_an_engine_that_was_given_is_left_open(tiny_checkpoint):
    with scripted_engine("ok", model=str(tiny_checkpoint)) as engine:
        with VLM(engine=engine) as vlm:
            assert vlm.engine is engine
        assert engine.status().state == "ready"
        with pytest.raises(ConfigError):
            VLM("demo", engine=engine)


def test_one_of_its_own_is_closed_and_says_so(tiny_checkpoint):
    with VLM(tiny_checkpoint) as vlm:
        pass
    vlm.close()
    assert vlm.engine.status().state == "closed"
    with pytest.raises(EngineClosed):
        vlm.generate("a")
    assert [type(output.error) for output in vlm.generate(["a", "b"])] == [EngineClosed] * 2


@pytest.mark.slow
def test_the_example_runs():
    root = Path(__file__).parents[2]
    command = [sys.executable, "examples/offline.py", "examples/pictures/circle.png"]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert found.stdout == "examples/pictures/circle.png: A red circle.\n", found.stderr


def test_low_detail_asks_for_no_more_than_the_model_can(demo):
    part = {"type": "image_url", "image_url": {"url": data_url(Image.open(CIRCLE)), "detail": "low"}}
    (output,) = demo.chat([[user_of(part)]], GREEDY, use_tqdm=False)
    assert texts([output]) == ["A red circle."]


def test_odd_objects_fail_alone(demo):
    with CIRCLE.open("rb") as file:
        odd = [{"type": ["x"]}, {"type": "image_pil", "image_pil": file}, {"type": "image_pil", "image_pil": object()}]
        good = {"type": "image_pil", "image_pil": Image.open(CIRCLE)}
        outputs = demo.chat([[user_of(part)] for part in (*odd, good)], GREEDY, use_tqdm=False)
        assert file.read(4) == b"\x89PNG"  # it is still the caller's
    assert all(isinstance(output.error, InvalidParameter) for output in outputs[:3])
    assert texts(outputs[3:]) == ["A red circle."]


def test_a_prompt_that_no_tokenizer_can_read_is_refused(demo):
    with pytest.raises(InvalidParameter) as caught:
        demo.generate("\ud800", GREEDY, use_tqdm=False)
    assert caught.value.param == "prompt"


def user_of(part):
    return {"role": "user", "content": [part, DESCRIBE]}
