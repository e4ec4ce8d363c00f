"""Anthropic's Messages API: messages, events, errors, keys, and the same tokens as through the other protocols."""

from __future__ import annotations

import json
import socket

import httpx
import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.errors import ConfigError
from dashinfer_vlm_core.testing import EVERYTHING, scripted_engine
from dashinfer_vlm_server import create_app
from dashinfer_vlm_server.api_keys import ApiKeys, KeyLimits
from dashinfer_vlm_server.settings import Settings
from tests.cases import cases
from tests.clients.features import serve_script
from tests.pdfs import document
from tests.samples import data_url, encode, image_url, noise
from tests.server.conftest import serving
from tests.server.test_disconnect import LONG
from tests.waiting import HANG, NEVER, until

PATH = "/v1/messages"
RESPONSE = "A red circle to the left of a blue square."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Today's.", "input_schema": PARAMETERS}
FUNCTION = {"name": "weather", "description": "Today's.", "parameters": PARAMETERS}
IMAGE = image_url()
DATA = IMAGE.partition(",")[2]
HELLO = [{"role": "user", "content": "Hello"}]


def image(data=DATA, media_type="image/png"):
    return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}


def text(value):
    return {"type": "text", "text": value}


def post(served, path=PATH, *, headers=None, **fields):
    body = {"model": "tiny", "max_tokens": 300, "messages": HELLO, **fields}
    with served.server.http() as client:
        return client.post(path, json=body, headers=headers)


def events(response):
    """Return the events of a stream, whose names are their types."""
    pairs = [event.split("\n") for event in response.text.split("\n\n") if event]
    found = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name.removeprefix("event: ") for name, _ in pairs] == [event["type"] for event in found]
    return found


def accumulate(stream):
    """Build the message of a stream as Anthropic's clients do."""
    start, *rest = stream
    message = start["message"]
    assert (start["type"], rest[-1]) == ("message_start", {"type": "message_stop"})
    inputs = {}
    for event in rest:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            for name in delta.keys() & {"text", "thinking", "signature"}:
                block[name] += delta[name]
            if delta["type"] == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    for index, arguments in inputs.items():
        message["content"][index]["input"] = json.loads(arguments)
    return message


def comparable(message):
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


# Messages


def test_message_has_anthropics_form(scripted):
    served = scripted(RESPONSE)
    response = post(served, system=[text("Be brief."), text(" Be true.")])
    message = response.json()
    assert message.pop("id").startswith("msg_")
    chat = {"messages": [{"role": "system", "content": "Be brief. Be true."}, *HELLO]}
    usage = served.engine.chat(chat).usage
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [text(RESPONSE)],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
        },
    }
    first, second = served.script.requests
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert response.headers["request-id"] == response.headers["x-request-id"]


STOPPED = {"stop_sequences": ["left"]}


@pytest.mark.parametrize(
    ("script", "fields", "kinds", "stop"),
    [
        (RESPONSE, {}, ["text"], ("end_turn", None)),
        (RESPONSE, STOPPED, ["text"], ("stop_sequence", "left")),
        (RESPONSE, {"max_tokens": 3}, ["text"], ("max_tokens", None)),
        (f"I look.\n{CALL}\n{CALL}", {"tools": [TOOL]}, ["text", "tool_use", "tool_use"], ("tool_use", None)),
        (CALL, {"tools": [TOOL], "tool_choice": {"type": "any"}}, ["tool_use"], ("tool_use", None)),
        ("", {}, [], ("end_turn", None)),
    ],
)
def test_stream_equals_the_complete_message(scripted, script, fields, kinds, stop):
    served = scripted(script, supported_params=EVERYTHING)
    message = post(served, **fields).json()
    stream = events(post(served, stream=True, **fields))
    assert comparable(accumulate(stream)) == comparable(message)
    assert [block["type"] for block in message["content"]] == kinds
    assert (message["stop_reason"], message["stop_sequence"]) == stop
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    assert all((call["name"], call["input"]) == ("weather", {"city": "Rome"}) for call in calls)
    assert stream[0]["message"]["usage"]["input_tokens"] == message["usage"]["input_tokens"]


def test_stop_sequence_after_a_call_is_not_the_reason(scripted):
    message = post(scripted(f"{CALL}left"), tools=[TOOL], **STOPPED).json()
    assert [block["type"] for block in message["content"]] == ["tool_use"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


def test_truncated_call_has_what_can_be_parsed(scripted):
    served = scripted(CALL, supported_params=EVERYTHING)
    length = post(served, tools=[TOOL]).json()["usage"]["output_tokens"]
    inputs = []
    for limit in range(1, length):
        message = post(served, tools=[TOOL], max_tokens=limit).json()
        assert message["stop_reason"] in {"max_tokens", "tool_use"}
        inputs += [block["input"] for block in message["content"] if block["type"] == "tool_use"]
    assert {} in inputs
    assert {"city": "Rome"} in inputs


def test_input_that_json_cannot_express_is_left_out(scripted):
    """Decoders without guided decoding write what they like."""
    message = post(scripted(CALL.replace('"Rome"', "1e999")), tools=[TOOL]).json()
    assert [block["input"] for block in message["content"]] == [{}]


@pytest.mark.parametrize("stream", [False, True])
def test_half_of_a_surrogate_pair_becomes_a_question_mark(scripted, stream):
    served = scripted(CALL.replace("Rome", r"Rome \ud83d"))
    chat = {"messages": HELLO, "tools": [{"type": "function", "function": FUNCTION}]}
    bodies = {
        PATH: {"messages": HELLO, "tools": [TOOL], "max_tokens": 300},
        "/v1/chat/completions": chat,
        "/api/chat": chat,
        "/v1/responses": {"input": "Hello", "tools": [{"type": "function", **FUNCTION}]},
    }
    with served.server.http() as client:
        for path, body in bodies.items():
            response = client.post(path, json={"model": "tiny", "stream": stream, **body})
            assert response.status_code == 200
            assert "Rome ?" in response.text
            assert "internal_error" not in response.text


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_reasoning_becomes_a_thinking_block(thinking, display):
    served = thinking("It has wheels.\n</think>\n\nA car.")
    fields = {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": display}}
    message = post(served, **fields).json()
    assert comparable(accumulate(events(post(served, stream=True, **fields)))) == comparable(message)
    thought, answer = message["content"]
    shown = {"summarized": "It has wheels.", "omitted": ""}[display]
    assert (thought["type"], thought["thinking"], bool(thought["signature"])) == ("thinking", shown, True)
    assert answer["text"] == "A car."
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    question = {"role": "user", "content": "Sure?"}
    post(served, messages=[*HELLO, {"role": "assistant", "content": message["content"]}, question])
    history = {"role": "assistant", "content": "A car.", "reasoning_content": shown or None}
    served.engine.chat({"messages": [*HELLO, history, question]})
    ours, theirs = served.script.requests[-2:]
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()


def test_thinking_can_be_disabled(thinking):
    served = thinking("A car.")
    post(served, thinking={"type": "disabled"})
    post(served, thinking={"type": "adaptive"})
    served.engine.chat({"messages": HELLO, "reasoning_effort": "none"})
    disabled, adaptive, expected = (request.token_ids.tolist() for request in served.script.requests)
    assert disabled == expected != adaptive


def test_format_is_enforced(scripted):
    served = scripted('{"city": "Rome"}', supported_params=EVERYTHING)
    schema = {"type": "json_schema", "schema": {**PARAMETERS, "additionalProperties": False}}
    for fields in ({"output_config": {"format": schema}}, {"output_format": schema}):
        assert post(served, **fields).status_code == 200
        assert served.script.requests[-1].grammar is not None


def test_documents_become_their_pages(scripted):
    served = scripted(RESPONSE)
    pdf = document("One", "Two", size=(84, 84))
    data = data_url(pdf).partition(",")[2]
    source = {"type": "base64", "media_type": "application/pdf", "data": data}
    plain = {"type": "text", "media_type": "text/plain", "data": "Three"}
    nested = {"type": "content", "content": [text("Four"), image()]}
    blocks = [{"type": "document", "title": "a", "source": item} for item in (source, plain, nested)]
    assert post(served, messages=[{"role": "user", "content": blocks}]).status_code == 200
    parts = [
        {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{data}"}},
        text("Three"),
        text("Four"),
        {"type": "image_url", "image_url": {"url": IMAGE}},
    ]
    served.engine.chat({"messages": [{"role": "user", "content": parts}]})
    ours, theirs = served.script.requests
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    assert len(ours.spans) == 3


def test_request_of_claude_code_is_accepted(scripted):
    served = scripted(RESPONSE)
    cached = {"cache_control": {"type": "ephemeral"}}
    fields = {
        "system": [{**text("You are a coding agent."), **cached}],
        "tools": [{**TOOL, **cached, "eager_input_streaming": True}],
        "messages": [{"role": "user", "content": [{**text("Hello"), **cached}]}],
        "metadata": {"user_id": "someone"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "temperature": 1,
        "stream": True,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,unknown-2030-01-01"}
    message = accumulate(events(post(served, f"{PATH}?beta=true", headers=headers, **fields)))
    assert message["content"] == [text(RESPONSE)]
    for name in ("stream", "temperature", "metadata", "context_management"):
        del fields[name]
    counted = post(served, f"{PATH}/count_tokens?beta=true", headers=headers, **fields).json()
    assert counted == {"input_tokens": len(served.script.requests[-1].token_ids)}
    with served.server.http() as client:
        assert client.head("/").status_code == 200


# The same tokens through all protocols


@pytest.fixture(scope="module")
def real(tiny_checkpoint):
    keys = ApiKeys(["one", "two"])
    config = EngineConfig(model=str(tiny_checkpoint), served_model_name="tiny", isolate_clients=True)
    with Engine(config) as engine, serving(engine, keys=keys) as server:
        yield server


def test_conversation_has_equal_tokens_and_usage_through_all_protocols(real):
    url = data_url(encode(noise(84, 112)))
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}, text("Where?")]},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [{"id": "a", "type": "function", "function": call}],
            },
            {
                "role": "tool",
                "tool_call_id": "a",
                "content": [text("Seen:"), {"type": "image_url", "image_url": {"url": url}}],
            },
            {"role": "user", "content": [text("And now?")]},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "max_tokens": 12,
    }
    responses = {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}, input_text("Where?")]},
            {"role": "assistant", "content": "I look."},
            {"type": "function_call", "call_id": "a", **call},
            {
                "type": "function_call_output",
                "call_id": "a",
                "output": [input_text("Seen:"), {"type": "input_image", "image_url": url}],
            },
            {"role": "user", "content": [input_text("And now?")]},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "max_output_tokens": 12,
    }
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("Seen:"), image(url.partition(",")[2])]}
    anthropic = {
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": [image(), text("Where?")]},
            {
                "role": "assistant",
                "content": [
                    text("I look."),
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}},
                ],
            },
            {"role": "user", "content": [result, text("And now?")]},
        ],
        "tools": [TOOL],
        "max_tokens": 12,
    }
    paths = {"/v1/chat/completions": chat, "/v1/responses": responses, PATH: anthropic}
    with real.http() as client:
        client.headers["authorization"] = "Bearer one"
        found = {}
        for path, body in paths.items():
            client.post(path, json={**body, "temperature": 0})  # its prefix is cached from now on
            found[path] = client.post(path, json={**body, "temperature": 0}).json()
        client.headers["authorization"] = "Bearer two"
        other = client.post(PATH, json={**anthropic, "temperature": 0}).json()
    completion, response, message = found.values()
    usage = completion["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    expected = (completion["choices"][0]["message"]["content"], usage["prompt_tokens"], usage["completion_tokens"])
    assert expected == (
        response["output"][0]["content"][0]["text"], response["usage"]["input_tokens"],
        response["usage"]["output_tokens"],
    )  # fmt: skip
    counts = message["usage"]
    assert expected == (
        message["content"][0]["text"], counts["input_tokens"] + counts["cache_read_input_tokens"],
        counts["output_tokens"],
    )  # fmt: skip
    assert counts["cache_read_input_tokens"] == cached > 0
    assert usage["prompt_tokens_details"]["image_tokens"] > 0
    assert other["content"] == message["content"]
    assert other["usage"]["cache_read_input_tokens"] == 0, "keys share no cached prefixes"


def input_text(value):
    return {"type": "input_text", "text": value}


# Errors


@pytest.fixture(scope="module")
def refusing(tiny_checkpoint):
    """A server for requests that fail before the decoder."""
    engine = scripted_engine("Yes.", model=str(tiny_checkpoint), served_model_name="tiny", max_model_len=400)
    with engine, serving(engine) as server:
        yield server


def with_blocks(*blocks, role="user"):
    last = HELLO if role == "assistant" else []
    return {"messages": [{"role": role, "content": list(blocks)}, *last]}


def with_tool(**fields):
    return {"tools": [{**TOOL, **fields}]}


FIRST = "messages[0].content[0]"
RESULT = {"type": "tool_result", "tool_use_id": "a"}

BAD = [
    ({"max_tokens": None}, "max_tokens", "is required"),
    ({"max_tokens": 999}, "max_tokens", "Request at most"),
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": [{"role": "assistant", "content": "A"}]}, "messages[0].role", "End with a message of the user"),
    ({"messages": [{"role": "tool", "content": "A"}]}, "messages[0].role", "must be"),
    ({"temperature": 1.5}, "temperature", "at most 1"),
    ({"top_k": "a"}, "top_k", "integer"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences", "at most 16"),
    ({"system": [image()]}, "system[0].type", "must be one of text here"),
    (with_blocks(image("AAAA")), FIRST, "not a complete PNG"),
    (with_blocks(image(media_type="application/pdf")), f"{FIRST}.source.media_type", "must begin with 'image/'"),
    (with_blocks({"type": "image", "source": {"type": "file", "file_id": "x"}}), f"{FIRST}.source.type", "not stored"),
    (with_blocks({"type": "image", "source": {"type": "url"}}), f"{FIRST}.source.url", "is required"),
    (with_blocks({"type": "image", "source": {"type": "url", "url": "file:///a.png"}}), FIRST, "Local"),
    (with_blocks({**image(), "transformations": {"crop": {}}}), f"{FIRST}.transformations", "Limit their size"),
    (with_blocks({"type": "image"}), f"{FIRST}.source", "is required"),
    (with_blocks({"type": "image_url", "image_url": {"url": IMAGE}}), f"{FIRST}.image_url", '"type": "image"'),
    (with_blocks({"type": "search_result"}), f"{FIRST}.type", "must be one of text, image"),
    (with_blocks(RESULT), f"{FIRST}.tool_use_id", "no earlier `tool_use` block"),
    (with_blocks(image(), role="assistant"), f"{FIRST}.type", "must be one of text, thinking"),
    (with_blocks({"type": "tool_use", "id": "a", "name": "f"}, role="assistant"), f"{FIRST}.input", "is required"),
    (
        with_blocks({"type": "document", "source": {"type": "text", "data": "a"}, "citations": {"enabled": True}}),
        f"{FIRST}.citations",
        "no citations",
    ),
    (with_tool(type="web_search_20250305"), "tools[0].type", "got 'web_search_20250305'"),
    (with_tool(input_schema=None), "tools[0].input_schema", "is required"),
    (with_tool(name="a b"), "tools[0].name", "letters"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name", "another tool"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice", "requires `tools`"),
    ({**with_tool(), "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name", "not one of `tools`"),
    ({**with_tool(), "tool_choice": {"type": "tool"}}, "tool_choice.name", "is required"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking", "does not have a reasoning phase"),
    ({"output_config": {"effort": "high"}}, "output_config.effort", "does not have a reasoning phase"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "moon"}}}},
        "output_config.format.schema",
        "must be one of object",
    ),
    ({"container": "x"}, "container", "runs no code"),
    ({"mcp_servers": [{"url": "https://a.org"}]}, "mcp_servers", "Connect to MCP servers in the client"),
    ({"service_tier": "priority"}, "service_tier", "only one tier"),
    ({"stop": ["a"]}, "stop", "Use `stop_sequences`"),
    ({"max_token": 3}, "max_token", "Did you mean `max_tokens`?"),
]


@cases(("fields", "param", "message"), BAD)
def test_errors_name_the_field(refusing, fields, param, message):
    with refusing.http() as client:
        response = client.post(PATH, json={"max_tokens": 10, "messages": HELLO, **fields})
    body = response.json()
    assert (response.status_code, body["type"]) == (400, "error")
    assert body["request_id"] == response.headers["request-id"]
    error = body["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]
    assert "messages[0].content[0].image_url.url" not in error["message"]


def test_neutral_values_are_accepted(refusing):
    neutral = {"mcp_servers": [], "service_tier": "standard_only", "inference_geo": "us", "tools": [], "thinking": None}
    with refusing.http() as client:
        assert client.post(PATH, json={"max_tokens": 10, "messages": HELLO, **neutral}).status_code == 200
        response = client.post(PATH, json={"model": "claude", "max_tokens": 10, "messages": HELLO})
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")


def test_error_after_the_first_event_is_an_event(tiny_checkpoint):
    with serve_script(str(tiny_checkpoint)) as served:
        served.script.play(RESPONSE, breaks_after=4)
        body = {"max_tokens": 300, "messages": HELLO, "stream": True}
        response = httpx.post(f"{served.url}/messages", json=body, trust_env=False)
    first, *_, last = events(response)
    assert (response.status_code, first["type"], last["type"]) == (200, "message_start", "error")
    assert (last["error"]["type"], last["error"]["message"]) == ("api_error", "The decoder broke.")
    assert last["request_id"] == response.headers["request-id"]


# Keys, limits, disconnects


def test_keys_are_read_from_both_headers(scripted):
    served = scripted("Yes.", settings={"keys": ApiKeys(["one", "two"])})
    for headers, status in [
        ({"x-api-key": "one"}, 200),
        ({"authorization": "Bearer one"}, 200),
        ({"x-api-key": "sk-ant-of-another-service", "authorization": "Bearer one"}, 200),
        ({"x-api-key": "one", "authorization": "Bearer one"}, 200),
        ({"x-api-key": "one", "authorization": "Bearer two"}, 401),
        ({"x-api-key": "Bearer one"}, 401),
        ({}, 401),
    ]:
        response = post(served, headers=headers)
        assert response.status_code == status, headers
        assert status == 200 or response.json()["error"]["type"] == "authentication_error"
    twice = [("x-api-key", "one"), ("x-api-key", "one")]
    assert post(served, headers=twice).status_code == 401


def test_routes_that_are_not_served_accept_the_key(scripted):
    served = scripted("Yes.", settings={"keys": ApiKeys(["one"]), "protocols": ("openai",)})
    for path in (PATH, f"{PATH}/batches"):
        for key, status in (("one", 404), ("two", 401)):
            assert post(served, path, headers={"x-api-key": key}).status_code == status


def test_limits_apply_and_errors_have_anthropics_form(scripted):
    keys = ApiKeys(["one"], limits=KeyLimits(tokens_per_minute=1))
    served = scripted("Yes.", settings={"keys": keys}, max_body_bytes=1000)
    headers = {"x-api-key": "one"}
    with served.server.http() as client:
        client.headers.update(headers)
        too_large = client.post(PATH, content=b" " * 1001)
        wrong_method = client.get(PATH)
        bad_json = client.post(PATH, content=b"{")
    assert post(served, headers=headers).status_code == 200
    limited = post(served, headers=headers)
    found = [
        (response.status_code, response.json()["error"]["type"])
        for response in (too_large, wrong_method, bad_json, limited)
    ]
    assert found == [
        (413, "request_too_large"), (405, "invalid_request_error"), (400, "invalid_request_error"),
        (429, "rate_limit_error"),
    ]  # fmt: skip
    assert int(limited.headers["retry-after"]) > 0


HEAD = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def test_stalled_body_times_out(scripted):
    server = scripted("Yes.", settings={"max_body_pause": 10 * HANG}).server
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG) as connection:
        connection.sendall(HEAD % 1000 + b'{"messages": [')
        until(lambda: server.tasks)
        server.loop.skip(11 * HANG)
        response = b"".join(iter(lambda: connection.recv(4096), b""))
    assert response.startswith(b"HTTP/1.1 408")
    assert json.loads(response.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_cancels_the_message(scripted, stream):
    served = scripted(LONG, delay=NEVER)
    body = json.dumps({"max_tokens": 300, "messages": HELLO, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", served.server.port)) as connection:
        connection.sendall(HEAD % len(body) + body)
        until(lambda: served.script.running == 1)
    until(lambda: served.script.running == 0)


# Protocols


def test_disabled_protocol_is_a_404_that_says_so(scripted):
    served = scripted("Yes.", settings={"protocols": ("anthropic", "openai")})
    assert post(served).status_code == 200
    with served.server.http() as client:
        paths = ["/v1/responses", "/v1/responses/x/cancel", "/v1/ocr"]
        responses = [client.post(path, json={"input": "Hello"}) for path in paths]
    assert {(response.status_code, response.json()["error"]["code"]) for response in responses} == {
        (404, "protocol_disabled")
    }
    assert "Start it with --protocols responses." in responses[0].json()["error"]["message"]


def test_unknown_protocol_is_an_error_with_the_names(tiny_checkpoint):
    engine = scripted_engine("Yes.", model=str(tiny_checkpoint))
    with pytest.raises(ConfigError, match=r"'claude' is unknown\. Choose from anthropic, ocr, ollama, openai"):
        create_app(engine, Settings(protocols=("claude",)))
