"""The Responses API: requests, events and errors, with OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import ResponseStreamEvent

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.engine.remote import RemoteEngine
from dashinfer_vlm_core.protocol.response_items import encode_summary
from dashinfer_vlm_core.testing import EVERYTHING, scripted_engine
from dashinfer_vlm_server.api_keys import ApiKeys, KeyLimits
from tests.cases import cases
from tests.clock import ManualClock
from tests.core.test_reasoning import TEMPLATE
from tests.pdfs import document
from tests.samples import data_url, encode_video, image_url
from tests.server.conftest import serving
from tests.waiting import NEVER, until

RESPONSE = "A red circle to the left of a blue square."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
REASONED = "It has wheels.\n</think>\n\nA car."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "description": "Today's.", "parameters": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": {name: TOOL[name] for name in ("name", "description", "parameters")}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
IMAGE, VIDEO = image_url(), data_url(encode_video(4), "video/mp4")
PDF = data_url(document("One", "Two", "Three", size=(84, 84)), "application/pdf")
EVENTS = pydantic.TypeAdapter[ResponseStreamEvent](ResponseStreamEvent)
SAME_PARTS = [
    {"type": "text", "text": "What is this?"},
    {"type": "image_url", "image_url": {"url": IMAGE}},
    {"type": "video_url", "video_url": {"url": VIDEO}},
]


def create(served, given="Hello", **fields):
    with served.server.openai() as client:
        return client.responses.create(model="tiny", input=given, **fields)


def stream(served, given="Hello", **fields):
    with served.server.openai() as client:
        events = list(client.responses.create(model="tiny", input=given, stream=True, **fields))
    for event in events:  # the client does not validate them
        EVENTS.validate_python(event.model_dump(by_alias=True, exclude_unset=True))
    return events


def post(served, path="", **body):
    with served.server.http() as client:
        return client.post(f"/v1/responses{path}", json=body)


def comparable(response) -> dict[str, Any]:
    """Return a response without what differs each time."""
    fields = response.model_dump(exclude={"id", "created_at", "completed_at"})
    for item in fields["output"]:
        del item["id"]
        item.pop("call_id", None)
    return fields


# Responses


def test_response_has_text_and_usage(scripted):
    served = scripted(RESPONSE)
    response = create(served)
    assert response.output_text == RESPONSE
    assert (response.object, response.model, response.status) == ("response", "tiny", "completed")
    assert response.id.startswith("resp_")
    assert len(response.id) > 40
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    with served.server.openai() as client:
        usage = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}]).usage
    assert response.usage.input_tokens == usage.prompt_tokens
    assert response.usage.output_tokens == usage.completion_tokens
    assert response.usage.total_tokens == usage.total_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == 0


def test_usage_has_the_details_of_a_chat_completion(tiny_checkpoint):
    parts = [INPUT_TEXT, {"type": "input_image", "image_url": IMAGE}, {"type": "input_video", "video_url": VIDEO}]
    config = EngineConfig(model=str(tiny_checkpoint), served_model_name="tiny")
    with Engine(config) as engine, serving(engine) as server, server.openai() as client:
        for cached in (False, True):
            request = {"model": "tiny", "input": [user(*parts)], "max_output_tokens": 2}
            usage = client.responses.create(**request).usage
            assert bool(usage.input_tokens_details.cached_tokens) is cached
        messages = [{"role": "user", "content": SAME_PARTS}]
        chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2).usage
    assert usage.input_tokens_details.to_dict() == chat.prompt_tokens_details.to_dict() | {"cache_write_tokens": 0}
    assert min(chat.prompt_tokens_details.image_tokens, chat.prompt_tokens_details.video_tokens) > 0


def test_response_repeats_the_request_with_explicit_nulls(scripted):
    fields = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "temperature": 0,
        "top_p": 0.5,
        "tools": [TOOL],
        "tool_choice": "none",
        "max_output_tokens": 50,
        "presence_penalty": 0.5,
        "safety_identifier": "someone",
        "store": False,
    }
    body = post(scripted(RESPONSE), input="Hello", **fields).json()
    assert {name: body[name] for name in fields} == {**fields, "tools": [{**TOOL, "strict": False}]}
    assert isinstance(body["created_at"], int)
    assert isinstance(body["completed_at"], int)
    absent = {"error", "incomplete_details", "max_tool_calls", "previous_response_id", "prompt_cache_key"}
    assert [name for name in absent if body[name] is not None] == []
    assert body["reasoning"] == {"effort": None, "summary": None}
    assert body["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert (body["truncation"], body["service_tier"], body["background"]) == ("disabled", "default", False)
    assert (body["top_logprobs"], body["parallel_tool_calls"], body["frequency_penalty"]) == (0, True, 0)


def test_output_limit_makes_the_response_incomplete(scripted):
    served = scripted(RESPONSE)
    response = create(served, max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.completed_at is None
    assert response.output[0].status == "incomplete"
    assert RESPONSE.startswith(response.output_text)
    assert stream(served, max_output_tokens=3)[-1].type == "response.incomplete"


def test_empty_completion_has_an_empty_message(scripted):
    response = create(scripted(""))
    assert (response.status, response.output_text, len(response.output)) == ("completed", "", 1)


def test_function_calls_are_items(scripted):
    response = create(scripted(f"I look.\n{CALL}\n{CALL}"), tools=[TOOL])
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    _, first, second = response.output
    assert (first.name, json.loads(first.arguments), first.status) == ("weather", {"city": "Rome"}, "completed")
    assert first.call_id != second.call_id
    assert response.output_text == "I look."


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_required_calls_are_guided(scripted, choice):
    served = scripted(CALL, supported_params=EVERYTHING)
    assert create(served, tools=[TOOL], tool_choice=choice).output[0].type == "function_call"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    response = create(served, tools=[{**TOOL, "name": "other"}, TOOL], tool_choice=allowed)
    assert [tool.name for tool in response.tools] == ["other", "weather"]
    assert response.tool_choice.to_dict() == allowed
    assert all(request.grammar is not None for request in served.script.requests)


def test_reasoning_is_an_item(thinking):
    response = create(thinking(REASONED), reasoning={"summary": "auto"})
    reasoning, message = response.output
    assert (reasoning.type, reasoning.summary, reasoning.content[0].text) == ("reasoning", [], "It has wheels.")
    assert message.content[0].text == response.output_text == "A car."
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    without = create(thinking("A car."), reasoning={"effort": "none"})
    assert [item.type for item in without.output] == ["message"]
    assert without.reasoning.effort == "none"


def test_schema_is_enforced_and_parsed(scripted):
    class Answer(pydantic.BaseModel):
        a: int

    served = scripted('{"a": 12}', supported_params=EVERYTHING)
    with served.server.openai() as client:
        parsed = client.responses.parse(model="tiny", input="?", text_format=Answer)
    assert parsed.output_parsed == Answer(a=12)
    assert served.script.requests[0].grammar is not None
    response = create(served, text={"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}})
    assert response.text.format.schema_ == SCHEMA
    assert json.loads(response.output_text) == {"a": 12}


def test_logprobs_are_included_on_request(scripted):
    served = scripted(RESPONSE)
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    entries = create(served, **fields).output[0].content[0].logprobs
    assert "".join(entry.token for entry in entries) == RESPONSE
    assert entries[0].top_logprobs[0].token == entries[0].token
    events = stream(served, **fields)
    assert not next(event for event in events if event.type == "response.content_part.added").part.logprobs
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.token for event in deltas for entry in event.logprobs] == [entry.token for entry in entries]
    assert create(served).output[0].content[0].logprobs == []


# Streams


TEXT_EVENTS = [
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
CALL_EVENTS = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]
REASONING_EVENTS = [name.replace("output_text", "reasoning_text") for name in TEXT_EVENTS]
STREAMS = {
    "text": (RESPONSE, {}, TEXT_EVENTS),
    "limited": (RESPONSE, {"max_output_tokens": 3}, TEXT_EVENTS),
    "empty": ("", {}, [name for name in TEXT_EVENTS if not name.endswith("delta")]),
    "call": (CALL, {"tools": [TOOL]}, CALL_EVENTS),
    "named call": (CALL, {"tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}}, CALL_EVENTS),
    "truncated call": (
        CALL, {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 49}, CALL_EVENTS
    ),
    "call truncated before its name": (
        CALL, {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 20}, []
    ),
    "text and calls": (f"I look.\n{CALL}\n{CALL}", {"tools": [TOOL]}, [*TEXT_EVENTS, *CALL_EVENTS, *CALL_EVENTS]),
    "text after a call": (f"{CALL}\nThat is it.", {"tools": [TOOL]}, [*CALL_EVENTS, *TEXT_EVENTS]),
    "reasoning": (REASONED, {}, [*REASONING_EVENTS, *TEXT_EVENTS]),
    "reasoning and call": (
        REASONED.replace("A car.", CALL), {"tools": [TOOL]}, [*REASONING_EVENTS, *CALL_EVENTS]
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_streamed_response_equals_plain(scripted, thinking, name):
    completion, fields, expected = STREAMS[name]
    options = {"supported_params": EVERYTHING} if "tool_choice" in fields else {}
    served = (thinking if name.startswith("reasoning") else scripted)(completion, **options)
    events = stream(served, **fields)
    plain, streamed = create(served, **fields), events[-1].response
    assert comparable(streamed) == comparable(plain)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == f"response.{plain.status}"
    middle = [kind for kind, before in zip(types[2:-1], types[1:], strict=False) if kind != before]
    assert middle == expected
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == list(range(len(plain.output)))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in streamed.output]


def test_stream_helper_collects_deltas(scripted):
    with (
        scripted(f"I look.\n{CALL}").server.openai() as client,
        client.responses.stream(model="tiny", input="Hello", tools=[TOOL]) as events,
    ):
        *_, text = [event.snapshot for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    assert text == final.output_text == "I look."
    assert json.loads(final.output[1].arguments) == {"city": "Rome"}


def test_events_have_names_and_end_with_done(scripted):
    text = "one\u2028two\x85three"
    response = post(scripted(text), input="Hello", stream=True)
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert response.headers["content-type"].startswith("text/event-stream")
    for event in events:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert json.loads(events[-1].partition("data: ")[2])["response"]["output"][0]["content"][0]["text"] == text


def test_error_within_a_stream_reaches_the_client(scripted):
    served = scripted(RESPONSE * 50, delay=0.01)
    with served.server.openai() as client, client.responses.create(model="tiny", input="?", stream=True) as events:
        for event in events:
            if event.type == "response.output_text.delta":
                break
        served.engine.close()
        with pytest.raises(openai.APIError) as caught:
            list(events)
    assert caught.value.code == "engine_closed"


def until_line(lines, wanted):
    assert any(line == wanted for line in lines), f"no line {wanted!r}"


def test_events_after_an_error_report_the_failed_response(scripted):
    served = scripted(RESPONSE * 50, delay=0.01, settings={"request_timeout": 600})
    body = {"input": "Hello", "stream": True}
    with served.server.http() as client, client.stream("POST", "/v1/responses", json=body) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: response.created"
        until_line(lines, "event: response.output_text.delta")
        served.server.loop.skip(600)
        *_, error, failed = (json.loads(line[6:]) for line in lines if line.startswith("data: {"))
    assert (error["type"], error["code"], error["error"]["code"]) == ("error", *["deadline_exceeded"] * 2)
    assert error["message"] == error["error"]["message"]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
    assert failed["response"]["output"][0]["status"] == "incomplete"
    assert failed["sequence_number"] == error["sequence_number"] + 1


def test_closing_a_stream_cancels_the_response(scripted):
    served = scripted(RESPONSE * 50, delay=0.01)
    with served.server.openai() as client, client.responses.create(model="tiny", input="?", stream=True) as events:
        next(iter(events))
        served.script.delay = NEVER
        assert served.script.running == 1
    until(lambda: served.script.running == 0)


# One pipeline: the decoder receives what it receives for a chat completion


def user(*parts):
    return {"role": "user", "content": list(parts)}


def call_item(call_id="call_1", city="Rome"):
    return {"type": "function_call", "call_id": call_id, "name": "weather", "arguments": json.dumps({"city": city})}


def output_item(output, call_id="call_1"):
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def tool_call(call_id="call_1", city="Rome"):
    function = {"name": "weather", "arguments": json.dumps({"city": city})}
    return {"id": call_id, "type": "function", "function": function}


TEXT = {"type": "text", "text": "What is this?"}
INPUT_TEXT = {"type": "input_text", "text": "What is this?"}
SMALL = {"min_pixels": 28 * 28, "max_pixels": 56 * 56}
SAME = {
    "text": ("Hello", [{"role": "user", "content": "Hello"}]),
    "parts": ([user(INPUT_TEXT, INPUT_TEXT)], [user(TEXT, TEXT)]),
    "image": (
        [user({"type": "input_image", "image_url": IMAGE, "detail": "low"}, INPUT_TEXT)],
        [user({"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}}, TEXT)],
    ),
    "image with options": (
        [user({"type": "input_image", "image_url": {"url": IMAGE, **SMALL}, "detail": "original"}, INPUT_TEXT)],
        [user({"type": "image_url", "image_url": {"url": IMAGE, **SMALL, "detail": "high"}}, TEXT)],
    ),
    "video": (
        [user({"type": "input_video", "video_url": VIDEO}, INPUT_TEXT)],
        [user({"type": "video_url", "video_url": {"url": VIDEO}}, TEXT)],
    ),
    "video with options": (
        [user(INPUT_TEXT, {"type": "input_video", "video_url": {"url": [IMAGE, IMAGE], "max_pixels": 168 * 168}})],
        [user(TEXT, {"type": "video_url", "video_url": {"url": [IMAGE, IMAGE], "max_pixels": 168 * 168}})],
    ),
    "files": (
        [
            user(
                {"type": "input_file", "file_data": IMAGE},
                {"type": "input_file", "file_data": VIDEO.partition(",")[2], "filename": "a.mp4"},
            )
        ],
        [user({"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "file", "file": {"file_data": VIDEO}})],
    ),
    "documents": (
        [
            user(
                {"type": "input_file", "file_data": PDF, "filename": "a.pdf", "pages": "2-", "render": "image"},
                {"type": "input_file", "file_data": PDF, "detail": "low", "max_pixels": 84 * 84},
                INPUT_TEXT,
            )
        ],
        [
            user(
                {"type": "file", "file": {"file_data": PDF, "pages": "2-3", "render": "image"}},
                {"type": "file", "file": {"file_data": PDF, "max_pixels": 84 * 84}},
                TEXT,
            )
        ],
    ),
    "conversation": (
        [
            {"type": "message", "role": "system", "content": "Be brief."},
            {"role": "developer", "content": [INPUT_TEXT]},
            user(INPUT_TEXT),
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "phase": "final_answer",
                "content": [
                    {"type": "output_text", "text": "A ", "annotations": []},
                    {"type": "output_text", "text": "circle."},
                ],
            },
            {"role": "user", "content": "And?"},
        ],
        [
            {"role": "system", "content": "Be brief.\n\nWhat is this?"},
            user(TEXT),
            {"role": "assistant", "content": "A circle."},
            {"role": "user", "content": "And?"},
        ],
    ),
    "calls": (
        [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "I look."},
            call_item("call_1", "Rome"),
            call_item("call_2", "Oslo"),
            output_item("Sunny.", "call_1"),
            output_item([INPUT_TEXT, {"type": "input_image", "image_url": IMAGE}], "call_2"),
            call_item("call_3", "Bonn"),
            output_item("Rain.", "call_3"),
        ],
        [
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [tool_call("call_1", "Rome"), tool_call("call_2", "Oslo")],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
            {
                "role": "tool",
                "tool_call_id": "call_2",
                "content": [TEXT, {"type": "image_url", "image_url": {"url": IMAGE}}],
            },
            {"role": "assistant", "tool_calls": [tool_call("call_3", "Bonn")]},
            {"role": "tool", "tool_call_id": "call_3", "content": "Rain."},
        ],
    ),
}

CALLS_TEMPLATE = (
    TEMPLATE.partition("{% if enable_thinking")[0]
    .replace("{{ message['content'] }}", "{{ message['content'] }}{{ message['tool_calls'] }}{{ message['name'] }}")
    .replace("<|im_start|>assistant\n", "<|im_start|>assistant\n{{ tools }}")
)


def assert_same_decode_requests(served, given, messages, fields=None, chat_fields=None):
    create(served, given, **(fields or {}))
    with served.server.openai() as client:
        client.chat.completions.create(model="tiny", messages=messages, **(chat_fields or {}))
    ours, chat = served.script.requests
    assert ours.token_ids.tolist() == chat.token_ids.tolist()
    assert ours.sampling == chat.sampling
    assert [(span.start, span.row, span.length) for span in ours.spans] == [
        (span.start, span.row, span.length) for span in chat.spans
    ]
    assert [span.tokens.digest for span in ours.spans] == [span.tokens.digest for span in chat.spans]
    assert (ours.grammar is None, ours.cache_salt) == (chat.grammar is None, chat.cache_salt)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_input_gives_the_prompt_of_a_chat_request(scripted, name):
    assert_same_decode_requests(scripted(RESPONSE), *SAME[name])


def test_fields_give_the_sampling_of_a_chat_request(scripted):
    shared = {"temperature": 0.5, "top_p": 0}
    extra = {"frequency_penalty": 1, "top_k": 5, "seed": 7, "logit_bias": {"5": 1}, "repetition_penalty": 1.5}
    assert_same_decode_requests(
        scripted("One, two, three."),
        "Hello",
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        {**shared, "instructions": "Be brief.", "max_output_tokens": 40, "extra_body": {**extra, "cache_salt": "x"}},
        {**shared, "max_completion_tokens": 40, "extra_body": {**extra, "cache_salt": "x"}},
    )


def test_reasoning_and_tools_give_the_prompt_of_a_chat_request(scripted, tmp_path):
    path = tmp_path / "calls.jinja"
    path.write_text(CALLS_TEMPLATE)
    served = scripted(RESPONSE, chat_template=path, supported_params=EVERYTHING)
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Wheels."}]}
    given = [
        {"role": "user", "content": "?"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        reasoning,
        {"role": "assistant", "content": "I look."},
        call_item(),
        output_item("Sunny."),
        {**reasoning, "content": None, "summary": [{"type": "summary_text", "text": "Sun."}]},
        call_item("call_2"),
        output_item("Rain.", "call_2"),
    ]
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Wheels.", "tool_calls": [tool_call()]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
        {"role": "assistant", "content": "", "reasoning_content": "Sun.", "tool_calls": [tool_call("call_2")]},
        {"role": "tool", "tool_call_id": "call_2", "content": "Rain."},
    ]
    assert_same_decode_requests(served, given, messages, {"tools": [TOOL]}, {"tools": [CHAT_TOOL]})


# Stored responses


def test_previous_response_gives_the_prompt_of_the_whole_conversation(scripted):
    served = scripted("A circle.", CALL, "Sunny.", RESPONSE, RESPONSE)
    image = {"type": "input_image", "image_url": IMAGE}
    file = {"type": "input_file", "file_data": PDF, "pages": "1"}
    first = create(served, [user(image, file, INPUT_TEXT)], instructions="Be brief.")
    second = create(served, "And?", previous_response_id=first.id, tools=[TOOL])
    output = output_item("Sun.", second.output[0].call_id)
    third = create(served, [output], previous_response_id=second.id)
    create(served, "Sure?", previous_response_id=third.id)
    whole = [
        user(image, file, INPUT_TEXT),
        *first.output,
        {"role": "user", "content": "And?"},
        *second.output,
        output,
        *third.output,
        {"role": "user", "content": "Sure?"},
    ]
    create(served, [item if isinstance(item, dict) else item.to_dict() for item in whole])
    *_, continued, sent = served.script.requests
    assert continued.token_ids.tolist() == sent.token_ids.tolist()
    assert third.previous_response_id == second.id


def reference(item_id, **fields):
    return {"id": item_id, **fields}


def test_references_give_the_prompt_of_the_items(scripted):
    served = scripted(f"I look.\n{CALL}", "Sunny.", RESPONSE)
    image = {"type": "input_image", "image_url": IMAGE}
    first = create(served, [user(image, INPUT_TEXT)], tools=[TOOL])
    message, call = first.output
    with served.server.openai() as client:
        (question,) = client.responses.input_items.list(first.id).data
        second = create(
            served,
            [reference(question.id), reference(message.id, type="item_reference"), reference(call.id),
             output_item("Sun.", call.call_id)],
        )  # fmt: skip
        listed = list(client.responses.input_items.list(second.id, order="asc"))
        client.responses.delete(first.id)  # the second response has its items, too
        output = listed[-1]
        references = [reference(item.id, type="item_reference") for item in (*listed, *second.output)]
        create(served, [*references, {"role": "user", "content": "Sure?"}])
        continued = create(served, [reference(message.id), {"role": "user", "content": "Sure?"}], store=False)
    whole = [
        user(image, INPUT_TEXT), message.to_dict(), call.to_dict(), output_item("Sun.", call.call_id),
        second.output[0].to_dict(), {"role": "user", "content": "Sure?"},
    ]  # fmt: skip
    create(served, whole)
    assert [item.id for item in listed] == [question.id, message.id, call.id, output.id]
    assert listed[0] == question
    assert [item.to_dict() for item in listed[1:3]] == [message.to_dict(), call.to_dict()]
    *_, referred, _, sent = served.script.requests
    assert referred.token_ids.tolist() == sent.token_ids.tolist()
    assert continued.status == "completed"


def test_reference_is_combined_with_a_previous_response(scripted):
    served = scripted(RESPONSE)
    first, second = create(served, "One?"), create(served, "Two?")
    create(served, [reference(first.output[0].id)], previous_response_id=second.id)
    duplicates = ([first.output[0].id] * 2, None), ([first.output[0].id], first.id)
    for ids, previous in duplicates:
        with pytest.raises(openai.BadRequestError, match="Duplicate item found with id") as caught:
            create(served, [reference(item_id) for item_id in ids], previous_response_id=previous)
        assert caught.value.param == "input"
    create(served, [{"role": "user", "content": "Two?"}, *second.output, *first.output])
    *_, combined, sent = served.script.requests
    assert combined.token_ids.tolist() == sent.token_ids.tolist()


def test_unknown_reference_is_not_found(scripted):
    served = scripted(RESPONSE, settings={"max_stored_responses": 1})
    removed, kept = create(served).output[0].id, create(served).output[0].id
    not_stored = create(served, store=False).output[0].id
    for item_id in (removed, not_stored, "msg_unknown", "x" * 500):
        for fields in ({}, {"stream": True}, {"store": False}):
            with pytest.raises(openai.NotFoundError, match="Items are not persisted when `store`") as caught:
                create(served, [reference(kept), reference(item_id)], **fields)
            assert (caught.value.param, caught.value.code) == ("input", "item_not_found")
    with served.server.openai() as client:
        counted = client.responses.input_tokens.count(model="tiny", input=[reference(kept)])
        assert counted.input_tokens > 0
        assert client.responses.compact(model="tiny", input=[reference(kept)]).output


def test_unknown_fields_of_items_are_not_stored(scripted):
    served = scripted(RESPONSE)
    part = {"type": "input_text", "text": "Hello", "x" * 100: 1}
    first = create(served, [{"role": "user", "content": [part], "y" * 100: 1}])
    with served.server.openai() as client:
        (listed,) = client.responses.input_items.list(first.id).data
    expected = {"type": "message", "role": "user", "status": "completed", "content": [INPUT_TEXT | {"text": "Hello"}]}
    assert {name: value for name, value in listed.to_dict().items() if name != "id"} == expected


def test_security_28_long_keys_do_not_exceed_the_memory_of_the_store(scripted):
    served = scripted(RESPONSE, settings={"max_stored_bytes": 64 * 1024})
    key = "x" * 100_000
    image = {"type": "input_image", "image_url": {"url": IMAGE, key: 1}}
    first, kept = (
        create(served, [user(image)]), create(served, [{**user({**INPUT_TEXT, key: 1}), key: 1}])
    )  # fmt: skip
    with served.server.http() as client:
        statuses = [client.get(f"/v1/responses/{response.id}").status_code for response in (first, kept)]
    assert statuses == [404, 200]


def test_stored_response_can_be_retrieved_and_deleted(scripted):
    served = scripted(RESPONSE)
    with served.server.openai() as client:
        created = client.responses.create(model="tiny", input="Hello")
        assert client.responses.retrieve(created.id).to_dict() == created.to_dict()
        *_, last = client.responses.create(model="tiny", input="Hello", stream=True)
        assert client.responses.retrieve(last.response.id).to_dict() == last.response.to_dict()
        continued = client.responses.create(model="tiny", input="And?", previous_response_id=created.id)
        client.responses.delete(created.id)
        for request in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError) as caught:
                request(created.id)
            assert caught.value.code == "response_not_found"
        # Responses that continue a deleted one keep its items.
        again = client.responses.create(model="tiny", input="Why?", previous_response_id=continued.id)
        assert again.usage.input_tokens > continued.usage.total_tokens


def test_input_items_are_those_of_the_whole_conversation(scripted):
    served = scripted(CALL, "Sunny.")
    image = {"type": "input_image", "image_url": IMAGE}
    first = create(served, [user(image, INPUT_TEXT), {"role": "user", "content": "And?"}], tools=[TOOL])
    said = [{"type": "output_text", "text": "I look.", "annotations": []}]
    given = [{"id": "msg_1", "role": "assistant", "content": said}, output_item("Sun.", first.output[0].call_id)]
    second = create(served, given, previous_response_id=first.id)
    with served.server.openai() as client:
        ascending = list(client.responses.input_items.list(second.id, order="asc"))
        page = client.responses.input_items.list(second.id, limit=2)
        descending = list(page)  # of three pages
        for param, query in (("limit", {"limit": 101}), ("order", {"order": "up"}), ("after", {"after": "msg_1"})):
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.input_items.list(second.id, **query)
            assert caught.value.param == param
        with pytest.raises(openai.NotFoundError):
            client.responses.input_items.list("resp_unknown")
    assert (page.data, page.has_more, descending) == (ascending[:-3:-1], True, ascending[::-1])
    assert len({item.id for item in ascending}) == 5
    with_media, message, call, assistant, output = ascending
    assert [part.type for part in with_media.content] == ["input_image", "input_text"]
    assert with_media.content[0].image_url == IMAGE
    assert [(part.type, part.text) for part in message.content] == [("input_text", "And?")]
    assert call.to_dict() == first.output[0].to_dict()
    assert [part.to_dict() for part in assistant.content] == said
    assert (output.type, output.output, output.status) == ("function_call_output", "Sun.", "completed")


def test_response_is_not_stored_on_request(scripted):
    served = scripted(RESPONSE)
    response = create(served, store=False)
    assert response.store is False
    for previous in (response.id, "resp_unknown", "x" * 200):
        with pytest.raises(openai.BadRequestError) as caught:
            create(served, previous_response_id=previous)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
        assert len(caught.value.message) < 400


def test_store_can_be_disabled(scripted):
    served = scripted(RESPONSE, settings={"max_stored_responses": 0})
    response = create(served)
    assert response.store is False
    assert post(served, input="?", previous_response_id=response.id).status_code == 400


def test_stored_responses_are_limited(scripted):
    served = scripted(RESPONSE, settings={"max_stored_responses": 2})
    first, second = create(served), create(served)
    assert create(served, previous_response_id=second.id).store is True
    assert post(served, input="?", previous_response_id=first.id).status_code == 400
    assert create(served, previous_response_id=second.id).status == "completed"


def test_security_28_keys_share_no_responses(scripted):
    keys = {name: f"sk-{name}" for name in ("alice", "bob")}
    settings = {"keys": ApiKeys(keys.values()), "share_media_between_keys": True}
    server = scripted(RESPONSE, settings=settings).server
    with server.http() as client:

        def send(name, method, path="", **body):
            headers = {"Authorization": f"Bearer {keys[name]}"}
            options = {"json": body} if method == "POST" else {}
            return client.request(method, f"/v1/responses{path}", headers=headers, **options)

        response_id = send("alice", "POST", input="My secret").json()["id"]
        unknown = f"/resp_{'0' * 48}"
        for method, suffix in (("GET", ""), ("GET", "/input_items"), ("DELETE", ""), ("POST", "/cancel")):
            other = send("bob", method, f"/{response_id}{suffix}")
            assert other.status_code == 404
            missing = send("bob", method, f"{unknown}{suffix}")
            assert other.text.replace(response_id, unknown[1:]) == missing.text
        other = send("bob", "POST", input="?", previous_response_id=response_id)
        assert (other.status_code, other.json()["error"]["code"]) == (400, "previous_response_not_found")
        item_id = send("alice", "GET", f"/{response_id}/input_items").json()["first_id"]
        missing = send("bob", "POST", input=[reference("msg_unknown")])
        other = send("bob", "POST", input=[reference(item_id)])
        assert (other.status_code, other.text.replace(item_id, "msg_unknown")) == (404, missing.text)
        assert send("alice", "POST", input=[reference(item_id)]).status_code == 200
        assert client.get(f"/v1/responses/{response_id}").status_code == 401
        assert send("alice", "GET", f"/{response_id}").status_code == 200
        assert send("alice", "POST", input="?", previous_response_id=response_id).status_code == 200


def test_responses_of_a_removed_key_are_deleted(scripted, tmp_path):
    file, clock = tmp_path / "keys", ManualClock()
    file.write_text("sk-old\nsk-kept\n")
    settings = {"keys": ApiKeys([], file), "clock": clock}
    with scripted(RESPONSE, settings=settings).server.http() as client:

        def get(key, response_id=None):
            headers = {"Authorization": f"Bearer {key}"}
            if response_id is None:
                return client.post("/v1/responses", json={"input": "Hello"}, headers=headers).json()["id"]
            return client.get(f"/v1/responses/{response_id}", headers=headers).status_code

        stored = {key: get(key) for key in ("sk-old", "sk-kept")}
        assert [get(key, stored[key]) for key in stored] == [200, 200]
        for keys, expected in (("sk-kept\n", [401, 200]), ("sk-old\nsk-kept\n", [404, 200])):
            file.write_text(keys)
            clock.advance(1)
            assert [get(key, stored[key]) for key in stored] == expected


def test_tokens_of_a_key_include_responses(scripted):
    keys = ApiKeys(["sk-one"], limits=KeyLimits(tokens_per_minute=1))
    with scripted(RESPONSE, settings={"keys": keys}).server.http() as client:
        client.headers["Authorization"] = "Bearer sk-one"
        statuses = [client.post("/v1/responses", json={"input": "Hello"}).status_code for _ in range(2)]
        assert client.post("/v1/responses/compact", json={"input": "Hello", "model": "tiny"}).status_code == 429
    assert statuses == [200, 429]


def test_input_tokens_are_those_of_the_usage(scripted):
    served = scripted(RESPONSE)
    given = [user(INPUT_TEXT, {"type": "input_image", "image_url": IMAGE})]
    first = create(served, given, instructions="Be brief.")
    with served.server.openai() as client:
        counted = client.responses.input_tokens.count(model="tiny", input=given, instructions="Be brief.")
        later = client.responses.input_tokens.count(model="tiny", input="And?", previous_response_id=first.id)
    assert counted.input_tokens == first.usage.input_tokens
    assert later.input_tokens == create(served, "And?", previous_response_id=first.id).usage.input_tokens
    assert len(served.script.requests) == 2


# Truncation and compaction


def test_truncation_drops_the_oldest_turns(scripted):
    served = scripted(RESPONSE, max_model_len=150)
    turns = [
        item
        for index in range(9)
        for item in ({"role": "user", "content": f"Question {index}?"}, {"role": "assistant", "content": "Yes."})
    ]
    given = [*turns, {"role": "user", "content": "The last one?"}]
    with pytest.raises(openai.BadRequestError) as caught:
        create(served, given, instructions="Be brief.")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    response = create(served, given, instructions="Be brief.", truncation="auto", max_output_tokens=20)
    assert response.truncation == "auto"
    kept = response.usage.input_tokens
    (request,) = served.script.requests
    expected = next(
        tokens
        for dropped in range(0, 20, 2)
        if (tokens := count(served, [{"role": "system", "content": "Be brief."}, *given[dropped:]])) + 20 <= 150
    )
    assert len(request.token_ids) == kept == expected
    too_long = "word " * 150
    with pytest.raises(openai.BadRequestError, match="context length"):
        create(served, [*turns, {"role": "user", "content": too_long}], truncation="auto")


def test_truncation_drops_the_oldest_videos_of_a_live_conversation(scripted):
    served = scripted(RESPONSE)
    video = {"type": "input_video", "video_url": {"url": [IMAGE, IMAGE]}}
    previous = None
    tokens = []
    for _ in range(6):
        given = [{"role": "user", "content": [video, INPUT_TEXT]}]
        response = create(served, given, previous_response_id=previous, truncation="auto")
        previous = response.id
        tokens.append(response.usage.input_tokens_details.video_tokens)
    assert tokens == [tokens[0] * turns for turns in (1, 2, 3, 4, 4, 4)]  # `limit_mm_per_prompt`
    with pytest.raises(openai.BadRequestError, match="up to 4 video parts"):
        create(served, given, previous_response_id=previous)


def count(served, messages):
    with served.server.http() as client:
        response = client.post("/tokenize", json={"messages": messages})
    return response.json()["count"] if response.status_code == 200 else 10**9


ONE_SYSTEM_MESSAGE = (
    "{% for message in messages[1:] if message.role == 'system' %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
"""A template with the check of Qwen3.5's."""


def test_compacted_conversation_is_a_summary_for_later_requests(scripted, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(ONE_SYSTEM_MESSAGE)
    served = scripted("The launch is on Tuesday.", RESPONSE, chat_template=template)
    with served.server.openai() as client:
        compacted = client.responses.compact(model="tiny", input=[user(INPUT_TEXT), call_item(), output_item("Sun.")])
    (item,) = compacted.output
    assert (compacted.object, item.type) == ("response.compaction", "compaction")
    assert compacted.usage.output_tokens > 0
    create(served, [item.to_dict(), {"role": "user", "content": "When?"}], instructions="Be brief.")
    text = "Be brief.\n\nSummary of the earlier conversation:\nThe launch is on Tuesday."
    summary = {"role": "system", "content": text}
    assert len(served.script.requests[1].token_ids) == count(served, [summary, {"role": "user", "content": "When?"}])
    bad = post(served, input=[{"type": "compaction", "encrypted_content": "gAAAAAB"}, {"role": "user", "content": "?"}])
    assert bad.json()["error"]["param"] == "input[0].encrypted_content"


@cases(
    ("template", "completion"),
    [
        (TEMPLATE, "The launch is on Tuesday."),
        (TEMPLATE.replace("enable_thinking", "never"), "It was about a launch.\n</think>\n\nThe launch is on Tuesday."),
    ],
)
def test_summary_is_written_without_reasoning_where_possible(scripted, tmp_path, template, completion):
    path = tmp_path / "template.jinja"
    path.write_text(template)
    served = scripted(completion, chat_template=path)
    (item,) = post(served, "/compact", input="Hello", model="tiny").json()["output"]
    assert item["encrypted_content"] == encode_summary("The launch is on Tuesday.")


@cases("completion", ["The launch is on Tuesday. " * 100, ""])
def test_incomplete_summary_is_an_error(scripted, completion):
    response = post(scripted(completion, max_model_len=400), "/compact", input="Hello", model="tiny")
    assert (response.status_code, response.json()["error"]["code"]) == (500, "incomplete_summary")


# Errors


def item(**fields):
    return {"input": [{"role": "user", "content": "Hello"}, fields]}


def part(**fields):
    return {"input": [user(INPUT_TEXT, fields)]}


BAD = {
    "no input": ({"input": None}, "input"),
    "no items": ({"input": []}, "input"),
    "input is a number": ({"input": 1}, "input"),
    "item is a string": ({"input": ["Hello"]}, "input[0]"),
    "unknown item": (item(type="web_search_call"), "input[1].type"),
    "reference without id": (item(type="item_reference"), "input[1].id"),
    "no role": (item(content="Hello"), "input[1].role"),
    "unknown role": (item(role="robot", content="Hello"), "input[1].role"),
    "no content": (item(role="user"), "input[1].content"),
    "empty content": (item(role="user", content=[]), "input[1].content"),
    "lone surrogate": (r'{"input": "\ud83d"}', "input"),
    "unknown part": (part(type="image_url", image_url={"url": IMAGE}), "input[0].content[1].type"),
    "part without type": (part(text="Hello"), "input[0].content[1].type"),
    "audio": (part(type="input_audio", input_audio={}), "input[0].content[1].type"),
    "text without text": (part(type="input_text"), "input[0].content[1].text"),
    "output text without text": (
        item(role="assistant", content=[{"type": "output_text"}]), "input[1].content[0].text"
    ),
    "image without source": (part(type="input_image"), "input[0].content[1].image_url"),
    "image is a number": (part(type="input_image", image_url=1), "input[0].content[1].image_url"),
    "image is empty": (part(type="input_image", image_url=""), "input[0].content[1].image_url"),
    "image is not base64": (part(type="input_image", image_url="data:image/png;base64,?"), "input[0].content[1]"),
    "image is damaged": (part(type="input_image", image_url="data:image/png;base64,AAAA"), "input[0].content[1]"),
    "image is a file here": (part(type="input_image", image_url="file:///etc/passwd"), "input[0].content[1]"),
    "image of OpenAI's files": (part(type="input_image", file_id="file-1"), "input[0].content[1].file_id"),
    "unknown detail": (part(type="input_image", image_url=IMAGE, detail="odd"), "input[0].content[1].detail"),
    "image of the assistant": (
        item(role="assistant", content=[{"type": "input_image", "image_url": IMAGE}]), "input[1].content[0]"
    ),
    "frame of a video": (
        part(type="input_video", video_url="data:video/jpeg;base64,AAAA"), "input[0].content[1].video_url[0]"
    ),
    "frames of a video": (
        part(type="input_video", video_url={"url": [IMAGE, "data:,"]}), "input[0].content[1].video_url.url[1]"
    ),
    "option of a video": (
        part(type="input_video", video_url={"url": VIDEO, "num_frames": 99}), "input[0].content[1].video_url.num_frames"
    ),
    "text file": (part(type="input_file", file_data="data:text/plain;base64,AA"), "input[0].content[1].file_data"),
    "file of OpenAI's": (part(type="input_file", file_id="file-1"), "input[0].content[1].file_id"),
    "damaged document": (part(type="input_file", file_data="data:application/pdf;base64,AA"), "input[0].content[1]"),
    "document here": (part(type="input_file", file_url="http://127.0.0.1:9/a.pdf"), "input[0].content[1]"),
    "page that does not exist": (part(type="input_file", file_data=PDF, pages="9"), "input[0].content[1].pages"),
    "rendering": (part(type="input_file", file_data=PDF, render="all"), "input[0].content[1].render"),
    "document that is too long": (
        part(type="input_file", file_data=PDF) | {"max_output_tokens": 10**6}, "input[0].content[1]"
    ),
    "file without data": (part(type="input_file", filename="a.png"), "input[0].content[1].file_data"),
    "call without id": (item(type="function_call", name="f", arguments="{}"), "input[1].call_id"),
    "call without arguments": (item(type="function_call", name="f", call_id="c"), "input[1].arguments"),
    "result of no call": (item(type="function_call_output", call_id="c", output="1"), "input[1].call_id"),
    "result without output": (
        {"input": [call_item(), {"type": "function_call_output", "call_id": "call_1"}]}, "input[1].output"
    ),
    "damaged image in a result": (
        {"input": [call_item(), output_item([{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}])]},
        "input[1].output[0]",
    ),
    "background without store": ({"background": True, "store": False}, "background"),
    "window of the background": ({"background_options": {"completion_window": "24h"}}, "background_options"),
    "conversation": ({"conversation": "conv_1"}, "conversation"),
    "prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    "service tier": ({"service_tier": "flex"}, "service_tier"),
    "messages": ({"messages": []}, "messages"),
    "max_tokens": ({"max_tokens": 5}, "max_tokens"),
    "response_format": ({"response_format": {"type": "text"}}, "response_format"),
    "a chat template": ({"chat_template": "x"}, "chat_template"),
    "misspelled": ({"max_output_token": 5}, "max_output_token"),
    "misspelled field of chat requests": ({"repetition_penality": 2}, "repetition_penality"),
    "max_output_tokens zero": ({"max_output_tokens": 0}, "max_output_tokens"),
    "max_output_tokens beyond the context": ({"max_output_tokens": 100_000}, "max_output_tokens"),
    "temperature too high": ({"temperature": 3}, "temperature"),
    "temperature a string": ({"temperature": "1"}, "temperature"),
    "top_logprobs too many": ({"top_logprobs": 21}, "top_logprobs"),
    "unknown model": ({"model": "gpt-5"}, "model"),
    "unknown include": ({"include": ["everything"]}, "include[0]"),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity"),
    "unknown format": ({"text": {"format": {"type": "regex"}}}, "text.format.type"),
    "format without name": ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format.name"),
    "format without schema": ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    "invalid schema": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"properties": 5}}}}, "text.format.schema"
    ),
    "strict schema": (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "odd"}, "strict": True}}},
        "text.format.schema",
    ),
    "strict tool": (
        {"tools": [{**TOOL, "strict": True, "parameters": {"type": "object", "not": {}}}]}, "tools[0].parameters"
    ),
    "hosted tool": ({"tools": [TOOL, {"type": "web_search"}]}, "tools[1].type"),
    "tool without name": ({"tools": [{"type": "function"}]}, "tools[0].name"),
    "tool twice": ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    "parameters are not an object": ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters"),
    "parameters are a list": ({"tools": [{**TOOL, "parameters": []}]}, "tools[0].parameters"),
    "choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "choice of an unknown tool": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"
    ),
    "choice without name": ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    "choice of a hosted tool": ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    "unknown allowed tool": (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]}},
        "tool_choice.tools[0].name",
    ),
    "effort": ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    "unknown effort": ({"reasoning": {"effort": "odd"}}, "reasoning.effort"),
    "summary": ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    "detailed summary": ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    "too much metadata": ({"metadata": {str(index): "" for index in range(17)}}, "metadata"),
    "metadata is a number": ({"metadata": {"a": 1}}, "metadata.a"),
    "stream options without stream": ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    "odd truncation": ({"truncation": "middle"}, "truncation"),
}  # fmt: skip


@pytest.fixture(scope="module")
def shared(tiny_checkpoint):
    options = {"served_model_name": "tiny", "max_model_len": 512, "allow_remote_media": False}
    with scripted_engine(RESPONSE, model=str(tiny_checkpoint), **options) as engine, serving(engine) as server:
        yield server


@cases("name", BAD)
def test_bad_request_names_the_field(shared, name):
    fields, param = BAD[name]
    with shared.http() as client:
        content = fields if isinstance(fields, str) else json.dumps({"model": "tiny", "input": "Hello"} | fields)
        response = client.post("/v1/responses", content=content)
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400), error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error["message"]
    assert "messages[" not in error["message"]


def test_neutral_values_are_accepted(shared):
    with shared.http() as client:
        body = {
            "input": "Hello",
            "background": False,
            "context_management": [],
            "conversation": None,
            "include": ["reasoning.encrypted_content", "file_search_call.results"],
            "max_tool_calls": 3,
            "parallel_tool_calls": True,
            "prompt_cache_key": "x",
            "prompt_cache_retention": "24h",
            "reasoning": {},
            "service_tier": "auto",
            "stream": True,
            "stream_options": {"include_obfuscation": True},
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "user": "someone",
            "an_unknown_field": 1,
        }
        response = client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert json.dumps(RESPONSE) in response.text


def test_routes_reject_what_they_do_not_support(shared):
    with shared.http() as client:
        created = client.post("/v1/responses", json={"input": "Hello"}).json()
        path = f"/v1/responses/{created['id']}"
        canceled, replayed = client.post(f"{path}/cancel"), client.get(path, params={"stream": "true"})
        missing = client.post("/v1/responses/compact", json={"input": "Hello"})
        empty = client.post("/v1/responses/compact", json={"model": "tiny"})
    assert (canceled.status_code, replayed.status_code) == (400, 400)
    assert "synchronous" in canceled.json()["error"]["message"]
    assert replayed.json()["error"]["param"] == "stream"
    assert (missing.json()["error"]["param"], empty.json()["error"]["param"]) == ("model", "input")


def test_server_that_forwards_requests_has_the_api(scripted):
    inner = scripted(RESPONSE)
    with (
        RemoteEngine(f"{inner.server.url}/v1", model="tiny") as engine,
        serving(engine) as server,
        server.openai() as client,
    ):
        first = client.responses.create(model="tiny", input="Hello")
        second = client.responses.create(model="tiny", input="And?", previous_response_id=first.id)
        client.responses.create(model="tiny", input="Hello", truncation="auto")
        bad = {"reasoning.summary": {"reasoning": {"summary": "auto"}}, "temperature": {"temperature": 3}}
        for param, fields in bad.items():
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(model="tiny", input="Hello", **fields)
            assert caught.value.param == param
    assert first.output_text == RESPONSE
    assert second.usage.input_tokens > first.usage.total_tokens
