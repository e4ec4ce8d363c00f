"""Ollama's API: responses, streams, errors, keys, and the same tokens as through chat completions."""

from __future__ import annotations

import datetime
import json
import socket

import httpx
import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.engine import chat_pipeline
from dashinfer_vlm_core.testing import EVERYTHING, scripted_engine
from dashinfer_vlm_server.api_keys import ApiKeys, KeyLimits
from tests.cases import cases
from tests.clients.features import serve_script
from tests.samples import data_url, encode, image_url, noise
from tests.server.conftest import serving
from tests.server.test_disconnect import LONG
from tests.waiting import NEVER, until

CHAT = "/api/chat"
GENERATE = "/api/generate"
RESPONSE = "A red circle\u2028to the left of a blue square."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Today's.", "parameters": PARAMETERS}}
IMAGE = image_url()
DATA = IMAGE.partition(",")[2]
HELLO = [{"role": "user", "content": "Hello"}]
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def post(served, path=CHAT, *, headers=None, **fields):
    given = {"prompt": "Hello"} if path == GENERATE else {"messages": HELLO}
    with served.server.http() as client:
        return client.post(path, json={"model": "tiny", **given, **fields}, headers=headers)


def lines(response):
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]  # as httpx splits them for Ollama's client


def merged(response):
    """Join the lines of a stream as clients do."""
    *parts, whole = lines(response)
    assert not any(line["done"] for line in parts)
    contents = [line.get("message", line) for line in (*parts, whole)]
    for name in ("content", "response", "thinking"):
        if any(name in content for content in contents):
            contents[-1][name] = "".join(content.get(name, "") for content in contents)
    if calls := [call for content in contents for call in content.get("tool_calls", ())]:
        contents[-1]["tool_calls"] = calls
    if logprobs := [entry for line in parts for entry in line.get("logprobs", ())]:
        whole["logprobs"] = logprobs
    return whole


def comparable(response):
    """Return a response without what differs between two of them, which has the right form."""
    assert response["done"]
    assert all(response[name] >= 0 for name in DURATIONS)
    assert sum(response[name] for name in DURATIONS[1:]) == response["total_duration"]
    assert datetime.datetime.fromisoformat(response["created_at"].replace("Z", "+00:00")).tzinfo
    message = dict(response.get("message", ()))
    for index, call in enumerate(message.get("tool_calls", ())):
        assert (call.pop("id")[:5], call["function"]["index"]) == ("call_", index)
    return {name: value for name, value in response.items() if name not in {"created_at", *DURATIONS}}


# Responses


def test_response_has_ollamas_form_and_the_tokens_of_chat_completions(scripted):
    served = scripted(RESPONSE)
    usage = served.engine.chat({"messages": HELLO}).usage
    counts = {"prompt_eval_count": usage.prompt_tokens, "eval_count": usage.completion_tokens}
    shared = {"model": "tiny:latest", "done": True, "done_reason": "stop", **counts}
    chat = post(served, model="tiny:latest", stream=False)
    assert comparable(chat.json()) == {**shared, "message": {"role": "assistant", "content": RESPONSE}}
    assert chat.headers["content-type"] == "application/json"
    generated = post(served, GENERATE, model="tiny:latest", stream=False)
    assert comparable(generated.json()) == {**shared, "response": RESPONSE}
    expected, *others = (request.token_ids.tolist() for request in served.script.requests)
    assert others == [expected, expected]


CALLS = [("weather", {"city": "Rome"})] * 2


@pytest.mark.parametrize(
    ("path", "script", "fields", "expected"),
    [
        (CHAT, RESPONSE, {}, ("stop", [])),
        (CHAT, RESPONSE, {"options": {"stop": ["left"]}}, ("stop", [])),
        (CHAT, RESPONSE, {"options": {"num_predict": 3}}, ("length", [])),
        (CHAT, RESPONSE, {"options": {"num_predict": -1}, "logprobs": True, "top_logprobs": 2}, ("stop", [])),
        (CHAT, f"I look.\n{CALL}\n{CALL}", {"tools": [TOOL]}, ("stop", CALLS)),
        (CHAT, CALL, {"tools": [TOOL], "tool_choice": "required"}, ("stop", CALLS[:1])),
        (CHAT, "", {}, ("stop", [])),
        (GENERATE, RESPONSE, {"logprobs": True}, ("stop", [])),
        (GENERATE, RESPONSE, {"options": {"num_predict": 3}}, ("length", [])),
    ],
)
def test_stream_equals_the_complete_response(scripted, path, script, fields, expected):
    served = scripted(script, supported_params=EVERYTHING)
    response = post(served, path, stream=False, **fields).json()
    stream = post(served, path, **fields)
    assert comparable(merged(stream)) == comparable(response)
    functions = [call["function"] for call in response.get("message", {}).get("tool_calls", ())]
    calls = [(function["name"], function["arguments"]) for function in functions]
    assert (response["done_reason"], calls) == expected
    assert ("logprobs" in response) == ("logprobs" in fields)


@pytest.mark.parametrize(("value", "expected"), [("1e999", {}), ('"\\ud800"', {"city": "?"})])
def test_arguments_that_json_cannot_express_are_left_out(scripted, value, expected):
    """Decoders without guided decoding write what they like."""
    served = scripted(CALL.replace('"Rome"', value))
    for stream in (True, False):
        response = post(served, tools=[TOOL], stream=stream)
        message = (merged(response) if stream else response.json())["message"]
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == [expected]


def test_num_predict_can_be_the_rest_of_the_context(scripted, monkeypatch):
    monkeypatch.setattr(chat_pipeline, "DEFAULT_MAX_TOKENS", 3)
    served = scripted(RESPONSE)
    responses = [post(served, stream=False, options={"num_predict": limit}).json() for limit in (None, -1, -2)]
    assert [response["done_reason"] for response in responses] == ["length", "stop", "stop"]


def test_logprobs_are_those_of_chat_completions(scripted):
    served = scripted(RESPONSE, supported_params=EVERYTHING)
    found = post(served, logprobs=True, top_logprobs=2, stream=False).json()["logprobs"]
    expected = served.engine.chat({"messages": HELLO, "logprobs": True, "top_logprobs": 2}).choices[0].logprobs
    assert found == expected.model_dump(exclude_none=True)["content"]
    assert bytes(byte for entry in found for byte in entry["bytes"]).decode() == RESPONSE


def test_truncated_call_has_what_can_be_parsed(scripted):
    served = scripted(CALL, supported_params=EVERYTHING)
    length = post(served, tools=[TOOL], stream=False).json()["eval_count"]
    arguments = []
    for limit in range(1, length):
        response = merged(post(served, tools=[TOOL], options={"num_predict": limit}))
        arguments += [call["function"]["arguments"] for call in response["message"].get("tool_calls", ())]
    assert {} in arguments
    assert {"city": "Rome"} in arguments


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_reasoning_is_separate_from_the_text(thinking, path):
    served = thinking("It has wheels.\n</think>\n\nA car.")
    response = post(served, path, think=True, stream=False).json()
    assert comparable(merged(post(served, path, think=True))) == comparable(response)
    message = response.get("message", response)
    assert (message["thinking"], message.get("content", message.get("response"))) == ("It has wheels.", "A car.")
    if path == CHAT:
        question = {"role": "user", "content": "Sure?"}
        post(served, messages=[*HELLO, message, question])
        history = {"role": "assistant", "content": "A car.", "reasoning_content": "It has wheels."}
        served.engine.chat({"messages": [*HELLO, history, question]})
        ours, theirs = served.script.requests[-2:]
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()


def test_thinking_can_be_disabled(thinking):
    served = thinking("A car.")
    for think in (False, True, None):
        post(served, think=think)
    served.engine.chat({"messages": HELLO, "reasoning_effort": "none"})
    disabled, enabled, default, expected = (request.token_ids.tolist() for request in served.script.requests)
    assert disabled == expected != enabled == default


@pytest.mark.parametrize("given", ["json", {**PARAMETERS, "not": {"required": ["a"]}}])
def test_format_is_enforced_as_far_as_possible(scripted, given):
    served = scripted('{"city": "Rome"}', supported_params=EVERYTHING)
    assert post(served, format=given).status_code == 200
    assert served.script.requests[-1].grammar is not None


def test_empty_format_and_options_without_effect_are_accepted(scripted):
    served = scripted(RESPONSE)
    options = {"num_ctx": 8192, "num_gpu": 1, "mirostat": 2, "repeat_last_n": 64, "typical_p": 1.0, "seed": -1}
    fields = {"format": "", "options": options, "keep_alive": "5m", "truncate": False}
    assert post(served, **fields).status_code == 200
    assert post(served, GENERATE, suffix="", template="", context=[], raw=False, **fields).status_code == 200
    assert [request.sampling.seed for request in served.script.requests] == [None, None]


# The same tokens as through chat completions


@pytest.fixture(scope="module")
def real(tiny_checkpoint):
    with (
        Engine(EngineConfig(model=str(tiny_checkpoint), served_model_name="tiny")) as engine,
        serving(engine) as server,
    ):
        yield server


def test_conversation_has_the_tokens_of_chat_completions(real):
    url = data_url(encode(noise(84, 112)))
    call = {"name": "weather", "arguments": {"city": "Rome", "days": [1, None]}}
    called = {"id": "a", "type": "function", "function": {**call, "arguments": json.dumps(call["arguments"])}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image_part(IMAGE), image_part(url), {"type": "text", "text": "Where?"}]},
        {"role": "assistant", "content": "I look.", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "a", "content": [image_part(url), {"type": "text", "text": "Sunny."}]},
        {"role": "user", "content": "And now?"},
    ]
    other = url.partition(",")[2]
    ollama = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where?", "images": [DATA, other]},
        {"role": "assistant", "content": "I look.", "tool_calls": [{"function": call}]},
        {"role": "tool", "tool_name": "weather", "content": "Sunny.", "images": [other]},
        {"role": "user", "content": "And now?"},
    ]
    shared = {"model": "tiny", "tools": [TOOL], "stream": False}
    options = {"temperature": 0.9, "seed": 7, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
    penalties = {"presence_penalty": 0.3, "frequency_penalty": 0.2}
    sampling = {**options, **penalties, "max_tokens": 12, "repetition_penalty": 1.1}
    renamed = {**options, **penalties, "num_predict": 12, "repeat_penalty": 1.1}
    with real.http() as client:
        expected = client.post("/v1/chat/completions", json={**shared, **sampling, "messages": chat}).json()
        found = client.post(CHAT, json={**shared, "options": renamed, "messages": ollama}).json()
        prompt = {"system": "Be brief.", "prompt": "Where?", "images": [DATA, other]}
        generated = client.post(GENERATE, json={"model": "tiny", "stream": False, "options": renamed, **prompt}).json()
        first = client.post("/v1/chat/completions", json={**sampling, "messages": chat[:2]}).json()
    for response, completion in ((found["message"]["content"], expected), (generated["response"], first)):
        assert response == completion["choices"][0]["message"]["content"]
    for response, completion in ((found, expected), (generated, first)):
        counts = response["prompt_eval_count"], response["eval_count"]
        assert counts == (completion["usage"]["prompt_tokens"], completion["usage"]["completion_tokens"])
    assert expected["usage"]["prompt_tokens_details"]["image_tokens"] > 0


def image_part(url):
    return {"type": "image_url", "image_url": {"url": url}}


# Errors


@pytest.fixture(scope="module")
def refusing(tiny_checkpoint):
    """A server for requests that fail before the decoder."""
    engine = scripted_engine("Yes.", model=str(tiny_checkpoint), served_model_name="tiny", max_model_len=400)
    with engine, serving(engine) as server:
        yield server


def says(**message):
    return {"messages": [{"role": "user", "content": "", **message}]}


BAD = [
    (CHAT, {"model": None}, "model", "is required"),
    (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "A"}]}, "messages[1].role", "cannot continue"),
    (CHAT, {"messages": [{"role": "developer", "content": "A"}]}, "messages[0].role", "must be"),
    (CHAT, says(content=[{"type": "text", "text": "A"}]), "messages[0].content", "must be a string"),
    (CHAT, says(content="word " * 500), "messages", "Shorten the messages"),
    (CHAT, says(images=["AAAA"]), "messages[0].images[0]", "is not"),
    (CHAT, says(images=[DATA, IMAGE]), "messages[0].images[1]", "without `data:`"),
    (CHAT, says(images=["https://example.com/a.png"]), "messages[0].images[0]", "must be an image file in base64"),
    (CHAT, says(image=DATA), "messages[0].image", "Did you mean `images`?"),
    (CHAT, says(role="system", images=[DATA]), "messages[0].images[0]", "Use the role 'user'"),
    (
        CHAT,
        says(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]),
        "messages[0].tool_calls[0].function.arguments",
        "must be an object",
    ),
    (CHAT, {"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name", "letters"),
    (CHAT, {"tools": [TOOL, TOOL]}, "tools[1].function.name", "another tool"),
    (CHAT, {"format": "xml"}, "format", "must be '' or 'json'"),
    (CHAT, {"format": {"type": 5}}, "format", "must be"),
    (CHAT, {"think": True}, "think", "`think` is not supported: the model does not have a reasoning phase"),
    (CHAT, {"think": "high"}, "think", "does not have a reasoning phase"),
    (CHAT, {"think": "some"}, "think", "'low', 'medium', 'high' or 'max'"),
    (CHAT, {"options": {"temperature": 3}}, "options.temperature", "at most 2"),
    (CHAT, {"options": {"num_predict": 0}}, "options.num_predict", "at least 1"),
    (CHAT, {"options": {"num_predict": 999}}, "options.num_predict", "Request at most"),
    (CHAT, {"options": {"stop": ["a"] * 17}}, "options.stop", "at most 16"),
    (CHAT, {"options": {"repeat_last_n": 5}}, "options.repeat_last_n", "consider all tokens"),
    (CHAT, {"options": {"typical_p": 0.5}}, "options.typical_p", "Use `options.min_p`"),
    (CHAT, {"options": {"temprature": 0.5}}, "options.temprature", "Did you mean `temperature`?"),
    (CHAT, {"options": {"num_ctx": "8k"}}, "options.num_ctx", "must be an integer"),
    (GENERATE, {"options": {"use_mmap": 1}}, "options.use_mmap", "must be true or false"),
    (CHAT, {"temperature": 0.5}, "temperature", "Use `options.temperature`"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs", "requires `logprobs`"),
    (CHAT, {"keep_alive": "5"}, "keep_alive", "with its unit"),
    (CHAT, {"keep_alive": 0}, "keep_alive", "stays loaded"),
    (CHAT, {"truncate": True}, "truncate", "never truncated"),
    (GENERATE, {"raw": True}, "raw", "chat template"),
    (GENERATE, {"suffix": "x"}, "suffix", "do not insert"),
    (GENERATE, {"template": "{{ .Prompt }}"}, "template", "chat template"),
    (GENERATE, {"context": [1]}, "context", "Send the conversation"),
    (GENERATE, {"images": ["AAAA"]}, "images[0]", "is not"),
    (GENERATE, {"prompt": "word " * 500}, "prompt", "tokens"),
    ("/api/embed", {"input": [1]}, "input[0]", "must be a string"),
    ("/api/embed", {"input": ["a", ""]}, "input[1]", "must not be empty"),
    ("/api/embed", {"input": "a"}, "model", "generates text"),
    ("/api/embeddings", {"prompt": "a"}, "model", "generates text"),
    ("/api/show", {"model": None}, "model", "is required"),
    ("/api/copy", {}, None, "--model NAME=FOLDER"),
    ("/api/create", {}, None, "--model NAME=FOLDER"),
    ("/api/push", {}, None, "--model NAME=FOLDER"),
]


@cases(("path", "fields", "param", "message"), BAD)
def test_errors_name_the_field(refusing, path, fields, param, message):
    given = {CHAT: {"messages": HELLO}, GENERATE: {"prompt": "Hello"}}.get(path, {})
    with refusing.http() as client:
        response = client.post(path, json={"model": "tiny", **given, **fields})
    body = response.json()
    assert (response.status_code, body["param"]) == (400, param)
    assert message in body["error"]
    assert body["code"]


def test_error_after_the_first_line_is_a_line(tiny_checkpoint):
    with serve_script(str(tiny_checkpoint)) as served:
        url = served.url.removesuffix("/v1") + CHAT
        responses = []
        for stream in (True, False):
            served.script.play(RESPONSE, breaks_after=4)
            body = {"model": "tiny", "messages": HELLO, "stream": stream}
            responses.append(httpx.post(url, json=body, trust_env=False))
    streamed, complete = responses
    first, *_, last = lines(streamed)
    assert (streamed.status_code, first["done"], complete.status_code) == (200, False, 500)
    assert last == complete.json() == {"error": "The decoder broke.", "param": None, "code": None}


# Keys, limits, disconnects


def test_keys_and_limits_apply_and_errors_have_ollamas_form(scripted):
    keys = ApiKeys(["one"], limits=KeyLimits(tokens_per_minute=1))
    served = scripted("Yes.", settings={"keys": keys}, max_body_bytes=1000)
    headers = {"authorization": "Bearer one"}
    with served.server.http() as client:
        responses = [
            client.post(CHAT, json={"model": "tiny", "messages": HELLO}),
            client.post(CHAT, content=b" " * 1001, headers=headers),
            client.get(CHAT, headers=headers),
            client.post(CHAT, content=b"{", headers=headers),
            client.post(CHAT, json={"model": "no", "messages": HELLO}, headers=headers),
        ]
    assert post(served, headers=headers).status_code == 200
    responses.append(post(served, headers=headers))
    assert [response.status_code for response in responses] == [401, 413, 405, 400, 404, 429]
    assert all(isinstance(response.json()["error"], str) for response in responses)
    assert int(responses[-1].headers["retry-after"]) > 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"Host": "evil.example"}, 403), ({"Origin": "http://evil.example"}, 403), ({"Content-Type": "text/plain"}, 415)],
)
def test_web_pages_cannot_use_the_routes(refusing, headers, status):
    with refusing.http() as client:
        for method, path in (("POST", CHAT), ("POST", GENERATE), ("POST", "/api/embed"), ("DELETE", "/api/delete")):
            response = client.request(method, path, content=b"{}", headers=headers)
            assert (response.status_code, type(response.json()["error"])) == (status, str)


HEAD = b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_cancels_the_response(scripted, stream):
    served = scripted(LONG, delay=NEVER)
    body = json.dumps({"model": "tiny", "messages": HELLO, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", served.server.port)) as connection:
        connection.sendall(HEAD % len(body) + body)
        until(lambda: served.script.running == 1)
    until(lambda: served.script.running == 0)
