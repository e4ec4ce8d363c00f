"""Legacy completions, with OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import tracemalloc

import openai
import pytest
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionTokenLogprob,
)
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from tokenizers import Tokenizer

from dashinfer_vlm_core.engine.remote import RemoteEngine
from dashinfer_vlm_core.protocol.completions import CompletionRequest
from dashinfer_vlm_core.response.completion_builder import CompletionBuilder
from dashinfer_vlm_core.testing import EVERYTHING
from dashinfer_vlm_server.endpoint import completion_response
from tests.core.test_reasoning import TEMPLATE
from tests.server.conftest import serving
from tests.waiting import NEVER, until

PROMPT = "The shapes are"
TEXT = " a red circle and a blué 🙂 square."


@pytest.fixture
def tokenizer(tiny_checkpoint):
    return Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))


def complete(served, prompt=PROMPT, **fields):
    with served.server.openai() as client:
        return client.completions.create(model="tiny", prompt=prompt, **{"max_tokens": 99, **fields})


def stream(served, prompt=PROMPT, **fields):
    with served.server.openai() as client:
        return list(client.completions.create(model="tiny", prompt=prompt, stream=True, **{"max_tokens": 99, **fields}))


def texts(completion):
    return [choice.text for choice in completion.choices]


def test_prompt_is_encoded_without_a_template(scripted, tokenizer):
    served = scripted(TEXT)
    completion = complete(served, f"<|im_start|>{PROMPT}")
    (choice,) = completion.choices
    assert (completion.object, completion.model) == ("text_completion", "tiny")
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == (TEXT, 0, "stop", None)
    expected = [tokenizer.token_to_id("<|im_start|>"), *tokenizer.encode(PROMPT, add_special_tokens=False).ids]
    assert served.script.requests[0].token_ids.tolist() == expected
    assert completion.usage.prompt_tokens == len(expected)
    assert completion.usage.completion_tokens == len(tokenizer.encode(TEXT).ids) + 1


def test_default_limit_is_sixteen_tokens(scripted):
    with scripted(TEXT * 5).server.http() as client:
        completion = client.post("/v1/completions", json={"prompt": PROMPT}).json()
    assert completion["usage"]["completion_tokens"] == 16
    assert completion["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_prompts_are_texts_or_token_ids(scripted, tokenizer, as_ids, several):
    given = ["One", "Two", "Three"] if several else ["One"]
    ids = [tokenizer.encode(text).ids for text in given]
    served = scripted(lambda request: tokenizer.decode(request.token_ids.tolist()).upper())
    prompts = ids if as_ids else given
    completion = complete(served, prompts if several else prompts[0], n=2, echo=True)
    assert texts(completion) == [text + text.upper() for text in given for _ in range(2)]
    assert [choice.index for choice in completion.choices] == list(range(2 * len(given)))
    assert completion.usage.prompt_tokens == sum(map(len, ids))
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens


@pytest.mark.parametrize(("batch_size", "waiting", "n"), [(2, 14, 1), (2, 1, 1), (1, 0, 1), (3, 4, 2)])
def test_many_prompts_do_not_exceed_the_queue(scripted, batch_size, waiting, n):
    served = scripted("Yes", max_batch_size=batch_size, max_waiting=waiting)
    assert texts(complete(served, ["?"] * 40, n=n)) == ["Yes"] * 40 * n


def test_large_completions_are_serialized_beside_the_event_loop():
    entry = ChatCompletionTokenLogprob(token="a", bytes=[97], logprob=-1.5, top_logprobs=[])
    message = ChatCompletionMessage(role="assistant", content="a\u2028")
    logprobs = ChoiceLogprobs(content=[entry] * 1000, refusal=None)
    choices = [Choice(index=index, finish_reason="stop", message=message, logprobs=logprobs) for index in range(2)]
    chat = ChatCompletion(id="c", created=1, model="tiny", object="chat.completion", choices=choices)

    async def serialize() -> tuple[bool, bytes]:
        response = asyncio.create_task(completion_response(chat))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return response.done(), bytes((await response).body)

    blocked, body = asyncio.run(serialize())
    assert not blocked
    assert json.loads(body) == json.loads(chat.model_dump_json(exclude_unset=True))


def test_streams_do_not_keep_what_was_sent():
    request = CompletionRequest.parse({"prompt": "a", "stream": True, "logprobs": 1})
    builder = CompletionBuilder(request, [""])
    tracemalloc.start()
    try:
        for number in range(200):
            (chunk,) = builder.add_chunk(0, text_chunk(f"{number:05}" * 1000))
            assert chunk["choices"][0]["logprobs"]["text_offset"] == [5000 * number]
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 200_000  # of a million characters


def text_chunk(text):
    entry = {"token": text, "bytes": list(text.encode()), "logprob": -1.0, "top_logprobs": []}
    choice = {"index": 0, "delta": {"content": text}, "logprobs": {"content": [entry]}, "finish_reason": None}
    fields = {"id": "c", "created": 1, "model": "tiny", "object": "chat.completion.chunk", "choices": [choice]}
    return ChatCompletionChunk.model_validate(fields)


@pytest.mark.parametrize(
    "fields", [{}, {"echo": True}, {"n": 2}, {"logprobs": 2}, {"stop": "blu"}, {"max_tokens": 3, "n": 2}]
)
def test_stream_equals_the_plain_completion(scripted, fields):
    served = scripted(TEXT)
    plain = complete(served, [PROMPT, "And"], **fields)
    *chunks, last = stream(served, [PROMPT, "And"], stream_options={"include_usage": True}, **fields)
    assert last.usage == plain.usage
    assert (last.choices, {chunk.usage for chunk in chunks}) == ([], {None})
    assert {chunk.id for chunk in (*chunks, last)} == {last.id}
    for expected in plain.choices:
        parts = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == expected.index]
        assert "".join(part.text for part in parts) == expected.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [expected.finish_reason]
        assert getattr(parts[-1], "stop_reason", None) == getattr(expected, "stop_reason", None)
        assert all(part.text for part in parts[:-1])
        for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs") if expected.logprobs else ():
            joined = [value for part in parts for value in getattr(part.logprobs, name)]
            assert joined == getattr(expected.logprobs, name)


def test_stream_events_are_json_lines_then_done(scripted):
    with scripted(TEXT).server.http() as client:
        response = client.post("/v1/completions", json={"prompt": PROMPT, "stream": True, "max_tokens": 99})
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    first, *_, last = (json.loads(event.removeprefix("data: ")) for event in events)
    assert first["choices"][0] == {"index": 0, "text": " a", "logprobs": None, "finish_reason": None}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert "usage" not in first


def test_logprobs_have_offsets_and_bytes_of_parts_of_characters(scripted):
    (choice,) = complete(scripted(TEXT), logprobs=1).choices
    found = choice.logprobs
    whole = {offset: token for offset, token in zip(found.text_offset, found.tokens, strict=True) if token in TEXT}
    assert len(whole) > 5
    assert all(TEXT.startswith(token, offset) for offset, token in whole.items())
    assert any(token.startswith("bytes:\\xf0") for token in found.tokens)
    assert [list(top) for top in found.top_logprobs] == [[token] for token in found.tokens]
    assert found.token_logprobs == [0.0] * len(found.tokens)


def test_sampling_fields_and_formats_are_passed_on(scripted):
    served = scripted('{"a": 1}', supported_params=EVERYTHING)
    complete(
        served,
        temperature=0.5,
        seed=7,
        logit_bias={"5": 1},
        extra_body={"top_k": 3, "min_p": 0.1, "guided_json": {"type": "object"}},
    )
    (request,) = served.script.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.seed, sampling.top_k, sampling.min_p) == (0.5, 7, 3, 0.1)
    assert sampling.logit_bias == {5: 1}
    assert request.grammar is not None


def test_reasoning_is_text(scripted, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    text = "<think>It has wheels.</think>\n\nA car."
    assert texts(complete(scripted(text, chat_template=path), "<think>")) == [text]


REJECTED = {
    "too many completions": ({"prompt": ["a"] * 17, "n": 16}, "n"),
    "suffix": ({"suffix": "!"}, "suffix"),
    "best_of": ({"n": 2, "best_of": 3}, "best_of"),
    "echo with logprobs": ({"echo": True, "logprobs": 1}, "echo"),
    "too many alternatives": ({"logprobs": 21}, "logprobs"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "no prompt": ({"prompt": None}, "prompt"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "no prompts": ({"prompt": []}, "prompt"),
    "an empty prompt": ({"prompt": ["a", ""]}, "prompt[1]"),
    "empty ids": ({"prompt": [[]]}, "prompt[0]"),
    "a number": ({"prompt": 5}, "prompt"),
    "mixed": ({"prompt": ["a", 5]}, "prompt[1]"),
    "an id": ({"prompt": [[1], [2, 10**9]]}, "prompt[1]"),
    "an id to echo": ({"prompt": [10**9], "echo": True}, "prompt"),
    "too long": ({"prompt": ["a", "word " * 9000]}, "prompt[1]"),
    "an image": ({"prompt": "<|vision_start|><|image_pad|><|vision_end|>"}, "prompt"),
    "messages": ({"messages": []}, "messages"),
    "tools": ({"tools": [{"type": "function"}]}, "tools"),
    "coordinates": ({"coordinates": "original"}, "coordinates"),
    "prompt_logprobs": ({"prompt_logprobs": 1}, "prompt_logprobs"),
    "stream_options": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "initial usage": (
        {"stream": True, "stream_options": {"include_initial_usage": True}}, "stream_options.include_initial_usage"
    ),
    "temperature": ({"temperature": 9}, "temperature"),
    "misspelled": ({"max_token": 9}, "max_token"),
}  # fmt: skip


def test_rejected_requests_name_the_field(scripted):
    served = scripted(TEXT)
    with served.server.http() as client:
        for name, (fields, param) in REJECTED.items():
            response = client.post("/v1/completions", json={"prompt": PROMPT, **fields})
            assert (name, response.status_code, response.json()["error"]["param"]) == (name, 400, param)
        without_effect = {"best_of": 2, "n": 2, "suffix": "", "echo": False, "tools": [], "user": "me"}
        assert client.post("/v1/completions", json={"prompt": PROMPT, **without_effect}).status_code == 200
        error = client.post("/v1/completions", json={"prompt": PROMPT, "model": "other"})
    assert (error.status_code, error.json()["error"]["code"]) == (404, "model_not_found")


def test_failure_of_a_prompt_cancels_the_others(scripted):
    served = scripted(TEXT * 50, RuntimeError("broken"), delay=NEVER)
    with pytest.raises(openai.InternalServerError):
        complete(served, ["One", "Two"], max_tokens=999)
    until(lambda: served.script.running == 0)


def test_closing_a_stream_cancels_all_prompts(scripted):
    served = scripted(TEXT * 50, delay=0.01)
    options = {"model": "tiny", "prompt": ["One", "Two"], "max_tokens": 999, "stream": True}
    with served.server.openai() as client, client.completions.create(**options) as chunks:
        next(iter(chunks))
        until(lambda: served.script.running == 2)
        served.script.delay = NEVER
    until(lambda: served.script.running == 0)


def test_a_server_in_front_of_another_one_rejects_prompts(scripted):
    served = scripted(TEXT)
    remote = RemoteEngine(f"{served.server.url}/v1", model="tiny")
    with remote, serving(remote) as server, server.http() as client:
        response = client.post("/v1/completions", json={"prompt": PROMPT})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
