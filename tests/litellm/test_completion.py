"""`litellm.completion` and `litellm.acompletion` with an engine in process."""

from __future__ import annotations

import asyncio
import base64
import threading
from pathlib import Path

import litellm
import pytest
from litellm.exceptions import MidStreamFallbackError

import dashinfer_vlm_litellm
from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.engine.shared import SHARED
from dashinfer_vlm_core.errors import DecoderFailed, QueueFull
from dashinfer_vlm_core.testing import EVERYTHING
from tests.litellm.conftest import HELLO, complete, counts, stream, text_of
from tests.lora_folders import write_lora
from tests.pdfs import document
from tests.samples import data_url, encode_video, image_url

IMAGES = Path(__file__).parents[2] / "examples" / "pictures"
EXPECTED = "I know circles, squares, triangles, stars and crosses."
REQUEST = {"messages": [{"role": "user", "content": "Which shapes do you know?"}], "temperature": 0}


def last_request(scripted):
    return scripted.script.requests[-1]


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def image(**options):
    return {"type": "image_url", "image_url": {"url": image_url(300, 400), **options}}


def video(**options):
    return {"type": "video_url", "video_url": {"url": data_url(encode_video(), "video/mp4"), **options}}


def text(words):
    return {"type": "text", "text": words}


def test_completion_and_stream_return_the_engines_response(demo):
    expected = SHARED.get(EngineConfig()).chat(REQUEST)
    whole = [litellm.completion(demo, **REQUEST), asyncio.run(complete(demo, **REQUEST))]
    streams = [list(litellm.completion(demo, stream=True, **REQUEST)), asyncio.run(stream(demo, **REQUEST))]
    assert expected.choices[0].message.content.startswith(EXPECTED)
    for response in whole:
        assert response.choices[0].message.content == expected.choices[0].message.content
        assert response.choices[0].finish_reason == "stop"
        assert response.model == "demo"
        assert response.id.startswith("chatcmpl-")
        assert counts(response.usage) == counts(expected.usage)
    for chunks in streams:
        assert text_of(chunks) == expected.choices[0].message.content
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert len({chunk.id for chunk in chunks}) == 1


def test_stream_contains_usage_only_if_requested(demo):
    messages = user(image(), text("Describe the picture."))
    expected = litellm.completion(demo, messages=messages, temperature=0)
    options = {"messages": messages, "temperature": 0, "stream": True}
    without_usage = list(litellm.completion(demo, **options))
    with_usage = list(litellm.completion(demo, stream_options={"include_usage": True}, **options))
    assert expected.usage.prompt_tokens_details.image_tokens > 20
    assert not any(getattr(chunk, "usage", None) for chunk in without_usage)
    assert [counts(chunk.usage) for chunk in with_usage if getattr(chunk, "usage", None)] == [counts(expected.usage)]
    assert counts(litellm.stream_chunk_builder(with_usage).usage) == counts(expected.usage)


def test_usage_reports_prefix_cache_hits(demo):
    options = {"messages": user(text("Say something that nobody has said here before.")), "temperature": 0}
    before, after = (litellm.completion(demo, **options).usage for _ in range(2))
    *_, with_usage = litellm.completion(demo, stream=True, stream_options={"include_usage": True}, **options)
    assert before.prompt_tokens_details.cached_tokens < after.prompt_tokens - 1
    assert after.prompt_tokens_details.cached_tokens == after.prompt_tokens - 1
    assert with_usage.usage.prompt_tokens_details.cached_tokens == after.prompt_tokens - 1


def test_logprobs_in_responses_and_streams(demo):
    options = REQUEST | {"logprobs": True, "top_logprobs": 2, "max_tokens": 4}
    whole = litellm.completion(demo, **options).choices[0]
    chunks = list(litellm.completion(demo, stream=True, **options))
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert [(entry.token, len(entry.top_logprobs)) for entry in whole.logprobs.content] == [
        (entry.token, len(entry.top_logprobs)) for entry in streamed
    ]
    assert len(streamed) == 4


@pytest.mark.parametrize("place", ["flat", "extra_body"])
def test_extra_parameters_reach_decoder(scripted, place):
    provider = scripted("Yes.")
    extras = {"top_k": 7, "repetition_penalty": 1.5, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [3]}
    extras |= {"min_p": 0.1, "vllm_xargs": {"ngram_size": 9}, "skip_special_tokens": False}
    options = {"extra_body": extras} if place == "extra_body" else extras
    litellm.completion(provider.model, messages=HELLO, **options)
    sampling = last_request(provider).sampling
    assert (sampling.top_k, sampling.repetition_penalty, sampling.min_tokens) == (7, 1.5, 2)
    assert (sampling.min_p, sampling.no_repeat_ngram_size, sampling.no_repeat_ngram_window) == (0.1, 9, 100)
    assert sampling.ignore_eos
    assert sampling.stop_token_ids == (3,)


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_openai_parameters_reach_decoder(scripted, limit):
    provider = scripted("Yes.")
    options = {"temperature": 0.5, "top_p": 0.9, "seed": 4, "frequency_penalty": 0.1, "presence_penalty": 0.2, limit: 9}
    litellm.completion(provider.model, messages=HELLO, logit_bias={"5": -1}, **options)
    sampling = last_request(provider).sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (0.5, 0.9, 4, 9)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.1, 0.2)
    assert dict(sampling.logit_bias) == {5: -1}


def test_stop_string_ends_response(scripted):
    provider = scripted("One, two, three.")
    assert litellm.completion(provider.model, messages=HELLO, stop=[" three"]).choices[0].message.content == "One, two,"
    chunks = litellm.completion(provider.model, messages=HELLO, stop=" two", stream=True)
    assert text_of(chunks) == "One,"


def test_media_options_limit_visual_tokens(scripted):
    """A visual token covers 28 x 28 pixels."""
    provider = scripted("Yes.")

    def tokens(*parts, **options):
        usage = litellm.completion(provider.model, messages=user(*parts, text("?")), **options).usage
        return usage.prompt_tokens_details.image_tokens, usage.prompt_tokens_details.video_tokens

    whole, _ = tokens(image())
    assert tokens(image(), image()) == (2 * whole, 0)
    assert tokens(image(max_pixels=28 * 28 * 20))[0] <= 20 < whole
    assert tokens(image(), mm_processor_kwargs={"max_pixels": 28 * 28 * 20})[0] <= 20
    assert tokens(video(num_frames=2))[1] * 2 == tokens(video(num_frames=4))[1]
    assert tokens(video(), media_io_kwargs={"video": {"num_frames": 2}}) == tokens(video(num_frames=2))


def test_coordinates_of_the_original_image(scripted):
    provider = scripted("(500,500)")
    response = litellm.completion(provider.model, messages=user(image(), text("Where?")), coordinates="original")
    assert response.choices[0].message.content == "(200,150)"


def test_image_can_be_sent_by_uuid(scripted):
    provider = scripted("Yes.")
    named = image() | {"uuid": "a picture"}
    first = litellm.completion(provider.model, messages=user(named, text("?"))).usage
    again = {"type": "image_url", "image_url": None, "uuid": "a picture"}
    assert counts(litellm.completion(provider.model, messages=user(again, text("?"))).usage) == counts(first)


def test_response_is_accepted_in_next_request(scripted):
    provider = scripted("One.", "Two.")
    first = litellm.completion(provider.model, messages=HELLO).choices[0].message
    second = litellm.completion(provider.model, messages=[*HELLO, first, *HELLO])
    assert second.choices[0].message.content == "Two."


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools[1].function.name"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n": 17}, "n"),
        ({"extra_body": {"best_of": 3}}, "best_of"),
        ({"extra_headers": {"x-trace": "1"}}, "extra_headers"),
        ({"top_k": -2}, "top_k"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [image(min_pixels=0)]}]},
            "messages[0].content[0].image_url.min_pixels",
        ),
    ],
)
def test_unsupported_parameter_error_names_it(scripted, options, param, streamed):
    provider = scripted("Yes.")
    with pytest.raises(litellm.BadRequestError) as caught:
        list(litellm.completion(provider.model, **{"messages": HELLO, "stream": streamed, **options}))
    assert caught.value.status_code == 400
    assert caught.value.param == param
    assert not provider.script.requests


def test_tools_response_format_and_n(scripted):
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    provider = scripted(call, call, '{"a": 1}', supported_params=EVERYTHING)
    options = {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "weather"}}]}
    options["tools"][0]["function"]["parameters"] = {"type": "object", "properties": {"city": {"type": "string"}}}
    plain = litellm.completion(provider.model, **options).choices[0]
    chunks = list(litellm.completion(provider.model, **options, stream=True))
    streamed = litellm.stream_chunk_builder(chunks).choices[0]
    for choice in (plain, streamed):
        (found,) = choice.message.tool_calls
        assert (found.function.name, found.function.arguments) == ("weather", '{"city": "Rome"}')
        assert choice.finish_reason == "tool_calls"
    responses = litellm.completion(provider.model, messages=HELLO, n=2, response_format={"type": "json_object"})
    assert [choice.message.content for choice in responses.choices] == ['{"a": 1}'] * 2


def test_drop_params_drops_unsupported_parameter(scripted):
    provider = scripted("Yes.")
    with pytest.raises(litellm.UnsupportedParamsError):
        litellm.completion(provider.model, messages=HELLO, reasoning_effort="low")
    response = litellm.completion(provider.model, messages=HELLO, reasoning_effort="low", drop_params=True)
    assert response.choices[0].message.content == "Yes."


def test_too_long_prompt_is_context_window_error(scripted):
    provider = scripted("Yes.")
    options = {"messages": HELLO, "engine_options": {"max_model_len": 16}}
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(provider.model, **options)
    with pytest.raises(litellm.ContextWindowExceededError):
        list(litellm.completion(provider.model, stream=True, **options))


@pytest.mark.parametrize("streamed", [False, True])
def test_engine_errors_become_litellm_exceptions(scripted, streamed):
    """Before the first chunk, LiteLLM wraps errors that a Router can retry elsewhere, and keeps the cause."""
    provider = scripted(QueueFull("Busy.", retry_after=3), DecoderFailed("Dead."), "Yes.")
    for expected in (litellm.RateLimitError, litellm.ServiceUnavailableError):
        with pytest.raises((expected, MidStreamFallbackError)) as caught:
            list(litellm.completion(provider.model, messages=HELLO, stream=streamed))
        assert isinstance(getattr(caught.value, "original_exception", caught.value), expected)
    assert litellm.completion(provider.model, messages=HELLO).choices[0].message.content == "Yes."


def test_engine_is_loaded_once_per_configuration(scripted):
    provider = scripted("Yes.")

    async def run_many(**options):
        return await asyncio.gather(*(complete(provider.model, messages=HELLO, **options) for _ in range(10)))

    before = engine_threads()
    threads = [threading.Thread(target=lambda: asyncio.run(run_many())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(run_many(engine_options={"max_batch_size": 2}))
    assert len(provider.script.requests) == 50
    assert len(engine_threads() - before) == 2


def engine_threads():
    return {thread for thread in threading.enumerate() if thread.name == "dashinfer-vlm-engine"}


def test_fifty_concurrent_requests_get_their_responses(scripted):
    provider = scripted(lambda request: f"{len(request.token_ids)} tokens", delay=0.001)

    async def run_many():
        sizes = range(50)
        prompts = [[{"role": "user", "content": "a " * size}] for size in sizes]
        half = [stream(provider.model, messages=messages) for messages in prompts[::2]]
        rest = [complete(provider.model, messages=messages) for messages in prompts[1::2]]
        return await asyncio.gather(*half), await asyncio.gather(*rest)

    streams, responses = asyncio.run(run_many())
    for response in responses:
        assert response.choices[0].message.content == f"{response.usage.prompt_tokens} tokens"
    assert len({text_of(chunks) for chunks in streams} | {a.choices[0].message.content for a in responses}) == 50


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_batch": 3}, "max_batch"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"decoder": "no such"}, "no such"),
        ([1], "engine_options"),
    ],
)
def test_invalid_engine_option_is_reported(scripted, options, named):
    with pytest.raises(litellm.BadRequestError, match=named):
        litellm.completion(scripted("Yes.").model, messages=HELLO, engine_options=options)


def test_model_name_can_differ_from_folder(scripted, tiny_checkpoint):
    provider = scripted("Yes.")
    name = provider.model.partition("/")[0]
    response = litellm.completion(f"{name}/eyes", messages=HELLO, engine_options={"model": str(tiny_checkpoint)})
    assert response.choices[0].message.content == "Yes."


def test_lora_is_chosen_by_model_name(scripted, tiny_checkpoint, tmp_path):
    folder = write_lora(tmp_path / "trained", tiny_checkpoint, ("q_proj",))
    provider = scripted("Yes.", supported_params=EVERYTHING)
    name = provider.model.partition("/")[0]
    options = {"model": str(tiny_checkpoint), "served_model_name": "base", "lora": {"sql": str(folder)}}
    for model in ("sql", "base"):
        litellm.completion(f"{name}/{model}", messages=HELLO, engine_options=options)
    used = [request.lora.name if request.lora else None for request in provider.script.requests]
    assert used == ["sql", None]


def test_missing_model_is_named_to_calling_program(scripted):
    name = scripted("Yes.").model.partition("/")[0]
    with pytest.raises(litellm.BadRequestError, match="no-such-folder"):
        litellm.completion(f"{name}/./no-such-folder", messages=HELLO)


def test_loaded_model_has_model_info(scripted):
    provider = scripted("Yes.")
    litellm.completion(provider.model, messages=HELLO, engine_options={"max_model_len": 512})
    info = litellm.get_model_info(provider.model)
    assert info["max_input_tokens"] == 512
    assert litellm.supports_vision(provider.model)
    assert litellm.completion_cost(litellm.completion(provider.model, messages=HELLO), model=provider.model) == 0


def test_demo_has_model_info_before_loading():
    dashinfer_vlm_litellm.register()
    info = litellm.get_model_info("dashinfer_vlm/demo")
    assert info["max_input_tokens"] == SHARED.get(EngineConfig()).status().max_model_len
    assert litellm.supports_vision("dashinfer_vlm/demo")


def test_register_is_idempotent():
    dashinfer_vlm_litellm.register()
    before = list(litellm.custom_provider_map)
    assert dashinfer_vlm_litellm.register() is dashinfer_vlm_litellm.handler
    assert litellm.custom_provider_map == before


def test_reasoning_is_separate_from_content(scripted, tmp_path, monkeypatch):
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}<think>\n")
    monkeypatch.setenv("DASHINFER_VLM_CHAT_TEMPLATE", str(template))
    provider = scripted("It has wheels.\n</think>\n\nA car.")
    plain = litellm.completion(provider.model, messages=HELLO)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(provider.model, messages=HELLO, stream=True)))
    for response in (plain, streamed):
        message = response.choices[0].message
        assert (message.reasoning_content, message.content) == ("It has wheels.", "A car.")
    assert plain.usage.completion_tokens_details.reasoning_tokens > 0


def choices_of(chunks):
    """Return the text and the finish reason of each choice of a stream."""
    found = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        text, reason = found.get(choice.index, ("", None))
        found[choice.index] = text + (choice.delta.content or ""), choice.finish_reason or reason
    return found


def test_stream_of_several_choices_has_all_finish_reasons(scripted):
    provider = scripted("One, two, three.", "A much longer response, which exceeds the limit of tokens.", "Four.")
    options = {"messages": HELLO, "n": 3, "max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}
    plain = list(litellm.completion(provider.model, **options))
    expected = {0: ("One, two, three.", "stop"), 2: ("Four.", "stop")}
    found = choices_of(plain)
    assert {index: found[index] for index in expected} == expected
    assert found[1][1] == "length"
    provider = scripted("One, two, three.", "A much longer response, which exceeds the limit of tokens.", "Four.")
    asynchronous = asyncio.run(stream(provider.model, **{key: options[key] for key in options if key != "stream"}))
    assert choices_of(asynchronous) == found
    usage = [chunk.usage for chunk in plain if getattr(chunk, "usage", None)]
    assert [each.completion_tokens for each in usage] == [usage[0].completion_tokens]
    assert usage[0].completion_tokens > 20


# Files

CIRCLE = base64.b64encode((IMAGES / "circle.png").read_bytes()).decode()
MOVING = base64.b64encode((IMAGES / "moving.mp4").read_bytes()).decode()


def test_file_part_can_be_a_video_or_an_image(demo):
    for file, question, answer in (
        ({"file_data": MOVING, "format": "video/mp4"}, "Which way does the circle move?", "It moves to the right."),
        ({"file_data": f"data:image/png;base64,{CIRCLE}"}, "Describe the picture.", "A red circle."),
    ):
        messages = user({"type": "file", "file": file}, text(question))
        assert litellm.completion(demo, messages=messages, temperature=0).choices[0].message.content == answer


def test_file_url_is_fetched_by_its_format(scripted):
    provider = scripted("Yes.")
    for file in ({"file_id": "http://127.0.0.1:9/a", "format": "video/mp4"}, {"file_id": "http://127.0.0.1:9/a.mp4"}):
        with pytest.raises(litellm.BadRequestError, match="may not fetch from") as caught:
            litellm.completion(provider.model, messages=user({"type": "file", "file": file}, text("?")))
        assert caught.value.param == "messages[0].content[0]"


def test_file_part_can_be_a_document(scripted):
    provider = scripted("Yes.")
    file = {
        "file_data": data_url(document("Page one", "Page two"), "application/pdf"),
        "pages": "2",
        "max_pixels": 7056,
    }
    response = litellm.completion(provider.model, messages=user({"type": "file", "file": file}, text("?")))
    assert response.choices[0].message.content == "Yes."
    assert response.usage.prompt_tokens_details.image_tokens == sum(
        span.length for span in last_request(provider).spans
    )
    with pytest.raises(litellm.BadRequestError, match="selects page 3") as caught:
        litellm.completion(provider.model, messages=user(text("?"), {"type": "file", "file": {**file, "pages": "3"}}))
    assert caught.value.param == "messages[0].content[1].file.pages"


def test_other_files_are_rejected(scripted):
    part = {"type": "file", "file": {"file_data": "data:text/csv;base64,JVBE"}}
    with pytest.raises(litellm.UnsupportedParamsError, match="got 'text/csv'") as caught:
        litellm.completion(scripted("Yes.").model, messages=user(text("?"), part))
    assert caught.value.param == "messages[0].content[1].file.file_data"


# Other endpoints


def test_image_generation_is_refused(demo):
    calls = [
        lambda: litellm.image_generation(model=demo, prompt="A circle"),
        lambda: asyncio.run(litellm.aimage_generation(model=demo, prompt="A circle")),
    ]
    for call in calls:
        with pytest.raises(litellm.BadRequestError, match="generate text") as caught:
            call()
        assert caught.value.status_code == 400
