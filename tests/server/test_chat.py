"""Chat completions with OpenAI's client."""

from __future__ import annotations

import asyncio
import base64
import json

import openai
import pytest

from dashinfer_vlm_core.testing import EVERYTHING, scripted_engine
from tests.cases import cases
from tests.conversations import as_openai, blurred_image, user
from tests.samples import encode_video
from tests.server.conftest import serving
from tests.web import CERTIFICATES

HELLO = [{"role": "user", "content": "Hello"}]
RESPONSE = "A red circle to the left of a blue square."


def complete(server, messages=HELLO, **options):
    with server.openai() as client:
        return client.chat.completions.create(model="tiny", messages=messages, **options)


def test_completion_matches_openai(scripted):
    response = complete(scripted(RESPONSE).server)
    assert (response.object, response.model) == ("chat.completion", "tiny")
    assert response.choices[0].message.role == "assistant"
    assert response.choices[0].message.content == RESPONSE
    assert response.choices[0].finish_reason == "stop"
    assert response.usage.total_tokens == response.usage.prompt_tokens + response.usage.completion_tokens


def test_completion_json_omits_unset_fields(scripted):
    with scripted(RESPONSE).server.http() as client:
        response = client.post("/v1/chat/completions", json={"messages": HELLO})
    (choice,) = response.json()["choices"]
    assert response.headers["content-type"] == "application/json"
    assert choice["logprobs"] is None
    assert choice["message"]["refusal"] is None
    assert "audio" not in choice["message"]
    assert "tool_calls" not in choice["message"]


def test_stream_chunks_form_the_completion(scripted):
    with scripted(RESPONSE).server.openai() as client:
        chunks = list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == RESPONSE
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_include_usage_adds_a_last_chunk(scripted):
    server = scripted(RESPONSE).server
    with server.openai() as client:
        *_, last = client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    assert last.choices == []
    assert last.usage == complete(server).usage


def test_initial_usage_is_in_the_first_chunk(scripted):
    server = scripted(RESPONSE).server
    options = {"include_usage": True, "include_initial_usage": True}
    with server.openai() as client:
        chunks = list(client.chat.completions.create(model="tiny", messages=HELLO, stream=True, stream_options=options))
    first, *others, last = chunks
    usage = complete(server).usage
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (usage.prompt_tokens, 1)
    assert {chunk.usage for chunk in others} == {None}
    assert last.usage == usage


def test_choice_has_the_stop_string_as_in_vllm(scripted):
    served = scripted("One two three.")
    with served.server.openai() as client:
        create = client.chat.completions.create
        (choice,) = create(model="tiny", messages=HELLO, stop=["two"]).choices
        *_, last = create(model="tiny", messages=HELLO, stop=["two"], stream=True)
        (other,) = create(model="tiny", messages=HELLO, stop=["four"]).choices
    assert choice.stop_reason == last.choices[0].stop_reason == "two"
    assert not hasattr(other, "stop_reason")


def test_stream_events_are_json_lines_then_done(scripted):
    with scripted(RESPONSE).server.http() as client:
        response = client.post("/v1/chat/completions", json={"messages": HELLO, "stream": True})
    *events, last, end = response.text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


def test_unicode_line_breaks_do_not_split_events(scripted):
    text = "one\u2028two\u2029three\x85four\nfive\r\nsix"
    with (
        scripted(text).server.http() as client,
        client.stream("POST", "/v1/chat/completions", json={"messages": HELLO, "stream": True}) as response,
    ):
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines if line != "[DONE]"]
    assert "".join(delta.get("content") or "" for delta in deltas) == text


def test_chunks_are_sent_immediately(scripted):
    served = scripted(RESPONSE * 10, delay=0.02)
    with served.server.openai() as client:
        stream = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        next(stream)
        next(stream)
        assert served.script.running == 1
        served.script.delay = 0.0
        assert list(stream)


def test_async_openai_client(scripted):
    server = scripted(RESPONSE).server

    async def responses():
        http = openai.DefaultAsyncHttpxClient(trust_env=False, verify=CERTIFICATES)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http) as client:
            plain = await client.chat.completions.create(model="tiny", messages=HELLO)
            stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
            chunks = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return plain.choices[0].message.content, "".join(chunks)

    assert asyncio.run(responses()) == (RESPONSE, RESPONSE)


def test_images_and_videos_reach_the_decoder(scripted):
    served = scripted(RESPONSE)
    messages = as_openai([user(blurred_image(1), "And this?", [blurred_image(2), blurred_image(3)])])
    details = complete(served.server, messages).usage.prompt_tokens_details
    (request,) = served.script.requests
    image, video = request.spans
    assert image.stop - image.start == details.image_tokens > 0
    assert video.stop - video.start == details.video_tokens > 0


def test_concurrent_requests_get_their_own_responses(scripted):
    server = scripted(lambda request: str(request.sampling.seed), delay=0.005).server

    async def complete_with_seed(client, seed):
        if seed % 2:
            plain = await client.chat.completions.create(model="tiny", messages=HELLO, seed=seed)
            return plain.choices[0].message.content
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, seed=seed, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def responses():
        http = openai.DefaultAsyncHttpxClient(trust_env=False, verify=CERTIFICATES)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http) as client:
            return await asyncio.gather(*(complete_with_seed(client, seed) for seed in range(1000, 1020)))

    assert asyncio.run(responses()) == [str(seed) for seed in range(1000, 1020)]


def test_logprobs_match_openai(scripted):
    server = scripted(RESPONSE).server
    plain = complete(server, logprobs=True, top_logprobs=1)
    with server.openai() as client:
        stream = client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, logprobs=True, top_logprobs=1
        )
        streamed = [item for chunk in stream if chunk.choices[0].logprobs for item in chunk.choices[0].logprobs.content]
    assert streamed == plain.choices[0].logprobs.content
    assert "".join(item.token for item in streamed).startswith(RESPONSE)


def test_models_lists_the_served_model(scripted):
    with scripted(RESPONSE).server.openai() as client:
        (model,) = client.models.list()
        assert (model.id, model.object) == ("tiny", "model")
        assert client.models.retrieve("tiny") == model
        with pytest.raises(openai.NotFoundError, match=r"'other/model' is not served here\. Use 'tiny'"):
            client.models.retrieve("other/model")


def test_health_reports_status_model_and_decoder(scripted):
    served = scripted(RESPONSE)
    with served.server.http() as client:
        response = client.get("/health")
        assert response.status_code == 200
        assert response.json() == {
            "status": "ready",
            "model": "tiny",
            "decoder": "scripted",
            "decoder_reason": "returns scripted responses",
            "max_model_len": served.engine.status().max_model_len,
            "supports_reasoning": False,
            "task": "generate",
        }
        served.engine.close()
        responses = [client.get("/health"), client.get("/health/ready")]
    assert [response.status_code for response in responses] == [200, 503]
    assert [response.json()["status"] for response in responses] == ["closed", "closed"]


VIDEO_BASE64 = base64.b64encode(encode_video()).decode()
VIDEO_URL = f"data:video/mp4;base64,{VIDEO_BASE64}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_video", "input_video": {"data": VIDEO_BASE64}},
        {"type": "input_video", "input_video": {"url": VIDEO_URL}},
        {"type": "input_video", "video_url": VIDEO_URL},
        {"type": "input_video", "video_url": {"url": VIDEO_URL}},
    ],
    ids=["data", "url", "video_url", "video_url object"],
)
def test_input_video_is_the_same_as_video_url(scripted, part):
    served = scripted(RESPONSE)
    text = {"type": "text", "text": "What moves?"}
    for item in (part, {"type": "video_url", "video_url": {"url": VIDEO_URL}}):
        complete(served.server, [{"role": "user", "content": [item, text]}])
    first, second = served.script.requests
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert [span.tokens.digest for span in first.spans] == [span.tokens.digest for span in second.spans] != []


FRAMES = "data:video/jpeg;base64,AAAA,BBBB"


@pytest.fixture(scope="module")
def shared(tiny_checkpoint):
    options = {"model": str(tiny_checkpoint), "served_model_name": "tiny"}
    with scripted_engine(RESPONSE, **options) as engine, serving(engine) as server:
        yield server


@cases(
    ("part", "param"),
    [
        ({"type": "input_video", "input_video": {"data": VIDEO_BASE64, "num_frames": 99}}, "input_video.num_frames"),
        ({"type": "input_video", "input_video": {"url": VIDEO_URL, "num_frames": 99}}, "input_video.num_frames"),
        ({"type": "input_video", "input_video": {"url": VIDEO_URL, "max_pixels": 9}}, "input_video.max_pixels"),
        ({"type": "input_video", "input_video": {"url": ["data:,"]}}, "input_video.url[0]"),
        ({"type": "input_video", "input_video": {"url": FRAMES}}, "input_video.url[0]"),
        ({"type": "input_video", "video_url": {"url": VIDEO_URL, "num_frames": 99}}, "video_url.num_frames"),
        ({"type": "input_video", "video_url": FRAMES}, "video_url[0]"),
        ({"type": "video_url", "video_url": FRAMES}, "video_url[0]"),
        ({"type": "video_url", "video_url": {"url": FRAMES}}, "video_url.url[0]"),
    ],
)
def test_errors_after_validation_name_the_field_of_the_client(shared, part, param):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(shared, [{"role": "user", "content": [part]}])
    assert caught.value.param == f"messages[0].content[0].{param}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"guided_json": {"const": 5}}, "5"),
        ({"guided_json": '{"const": 5}'}, "5"),
        ({"guided_regex": "[0-9]+"}, "42"),
        ({"guided_choice": ["red", "blue"]}, "blue"),
        ({"structured_outputs": {"json": {"const": 5}}}, "5"),
        ({"structured_outputs": {"regex": "[0-9]+"}}, "42"),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "blue"),
        ({"structured_outputs": {"json_object": True}}, '{"a":1}'),
    ],
    ids=str,
)
def test_guided_fields_of_vllm(scripted, fields, text):
    served = scripted(text, "something else", supported_params=EVERYTHING)
    assert complete(served.server, extra_body=fields).choices[0].message.content == text
    with pytest.raises(openai.InternalServerError, match="violates the requested format"):
        complete(served.server, extra_body=fields)


def test_guided_grammar_is_rejected_by_name(scripted):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(scripted(RESPONSE).server, extra_body={"guided_grammar": 'root ::= "a"'})
    assert caught.value.param == "guided_grammar"
    assert "`regex` or `choice` of `structured_outputs`" in caught.value.message


def test_unknown_field_is_ignored_and_misspelled_one_gets_a_hint(scripted):
    server = scripted(RESPONSE).server
    assert complete(server, extra_body={"foo": 1}).choices[0].message.content == RESPONSE
    with pytest.raises(openai.BadRequestError) as caught:
        complete(server, extra_body={"max_token": 5})
    assert caught.value.param == "max_token"
    assert "Did you mean `max_tokens`?" in caught.value.message


def test_coordinates_of_the_original_image(scripted):
    server = scripted("The circle(500,500),(1000,1000) is red.").server
    messages = as_openai([user(blurred_image(1, 300, 200), "Where is the circle?")])
    for coordinates, text in (("original", "(150,100),(300,200)"), ("model", "(500,500),(1000,1000)")):
        response = complete(server, messages, extra_body={"coordinates": coordinates})
        assert response.choices[0].message.content == f"The circle{text} is red."
