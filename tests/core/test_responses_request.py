"""Requests of the Responses API: their validation, and the paths in errors."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from dashinfer_vlm_core.errors import ContextLengthExceeded, InvalidParameter, RequestError
from dashinfer_vlm_core.protocol.fields import IGNORED_FIELDS, REJECTED_FIELDS
from dashinfer_vlm_core.protocol.responses import REJECTED_IN_RESPONSES, ResponsesRequest
from dashinfer_vlm_core.response.response_events import ResponseEventBuilder, event_to_json
from tests.cases import cases
from tests.core.test_schema import JSON

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
IMAGE = {"type": "input_image", "image_url": "https://example.com/a.png"}


def request(*items, **fields):
    return ResponsesRequest.parse({"input": list(items) or "Hello", **fields})


def test_every_openai_field_is_in_exactly_one_group():
    groups = [ResponsesRequest.model_fields.keys(), REJECTED_IN_RESPONSES.keys(), IGNORED_FIELDS]
    theirs = ResponseCreateParamsBase.__annotations__.keys()
    own = ResponsesRequest.model_fields.keys()
    counts = {name: sum(name in group for group in (groups[:2] if name in own else groups)) for name in theirs}
    assert counts == dict.fromkeys(theirs, 1)
    assert not own & REJECTED_IN_RESPONSES.keys()


@cases(
    ("name", "value"),
    [(name, value) for name, (neutral, _) in REJECTED_IN_RESPONSES.items() for value in [*neutral, None]],
)
def test_rejected_field_may_have_neutral_value(name, value):
    assert request(**{name: value}).to_chat().chat == request().to_chat().chat


@cases("name", sorted(REJECTED_FIELDS.keys() - ResponsesRequest.model_fields.keys()))
def test_fields_that_chat_requests_reject_are_rejected(name):
    with pytest.raises(RequestError) as caught:
        request(**{name: "odd"}).to_chat()
    assert caught.value.param == name


def test_errors_of_the_engine_name_the_fields_of_this_request():
    call = request(
        {"role": "user", "content": "Hello"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "I look."},
        CALL,
        {**CALL, "call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": [IMAGE]},
        {"role": "user", "content": [IMAGE]},
        instructions="Be brief.",
        tools=[{"type": "function", "name": "f"}, {"type": "function", "name": "g"}],
        tool_choice={"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]},
    ).to_chat()
    expected = {
        "messages": "input",
        "messages[0].content": "instructions.content",
        "messages[1].content": "input[0].content",
        "messages[2].content": "input[2].content",
        "messages[2].tool_calls[0].function.name": "input[3].name",
        "messages[2].tool_calls[1].function.arguments": "input[4].arguments",
        "messages[3].content[0].image_url.url": "input[5].output[0].image_url",
        "messages[4].content[0]": "input[6].content[0]",
        "messages[4].content[0].file.file_data": "input[6].content[0].file_data",
        "messages[4].content[0].file.pages": "input[6].content[0].pages",
        "messages[4].content[0].file": "input[6].content[0]",
        "tools[1].function.parameters": "tools[1].parameters",
        "tool_choice.function.name": "tool_choice.name",
        "tool_choice.allowed_tools.tools[0].function.name": "tool_choice.tools[0].name",
        "response_format.json_schema.schema": "text.format.schema",
        "response_format": "text.format",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "top_k": "top_k",
    }
    for param, renamed in expected.items():
        with pytest.raises(InvalidParameter) as caught, call.renamed_errors():
            raise InvalidParameter(f"`{param}` is wrong, see `{param}`.", param=param, code="some_code")
        assert caught.value.param == renamed
        assert caught.value.message == str(caught.value) == f"`{renamed}` is wrong, see `{renamed}`."
        assert caught.value.code == "some_code"
    with pytest.raises(ContextLengthExceeded) as caught, call.renamed_errors():
        raise ContextLengthExceeded("Too long.", prompt_tokens=9, limit=8)
    assert (caught.value.prompt_tokens, caught.value.limit, caught.value.param) == (9, 8, "input")


def test_items_of_earlier_responses_have_their_own_paths():
    history = request({"role": "user", "content": [IMAGE]}, CALL).items()
    call = request({"type": "function_call_output", "call_id": "c", "output": "1"}).to_chat(history)
    with pytest.raises(InvalidParameter) as caught, call.renamed_errors():
        raise InvalidParameter("Wrong.", param="messages[0].content[0].image_url.url")
    assert caught.value.param == "previous_response_id[0].content[0].image_url"
    assert len(call.chat.messages) == 3


def test_dropped_turns_begin_with_messages_of_the_user():
    items = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "1"},
        CALL,
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"role": "user", "content": "2"},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "3"},
    ]
    parsed = request(*items, instructions="Be true.")
    kept = [[message.content for message in parsed.to_chat(dropped_turns=turns).chat.messages] for turns in range(3)]
    assert parsed.to_chat().turns == 3
    assert kept[0] == ["Be true.\n\nBe brief.", "Hello!", "1", None, "x", "2", "Be kind.", "3"]
    assert kept[1] == ["Be true.\n\nBe brief.", "2", "Be kind.", "3"]
    assert kept[2] == ["Be true.\n\nBe brief.\n\nBe kind.", "3"]


PARTS = ["input_text", "input_image", "input_video", "input_file", "refusal", "image_url", "video_url", "file_data"]
KNOWN = sorted(
    {*ResponsesRequest.model_fields, *REJECTED_IN_RESPONSES, *PARTS}
    | {
        "id",
        "filename",
        "type",
        "role",
        "content",
        "name",
        "call_id",
        "arguments",
        "output",
        "summary",
        "format",
        "schema",
        "effort",
    }
)
ITEM_TYPES = ["message", "function_call", "function_call_output", "reasoning", "item_reference"]
WORDS = st.sampled_from([*PARTS, *ITEM_TYPES, "user", "function", "allowed_tools"])
NEAR = st.recursive(
    JSON | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KNOWN), inner, max_size=5),
    max_leaves=12,
)
ITEMS = st.lists(st.dictionaries(st.sampled_from(KNOWN), NEAR, max_size=4), max_size=3)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.one_of(JSON, NEAR), ITEMS, st.dictionaries(st.sampled_from(KNOWN), NEAR, max_size=3))
@example(None, [], {"metadata": {"\ud83d": ""}})
@example(None, [], {"tools": [{"type": "function", "name": ["f"]}], "tool_choice": {"type": "function", "name": "f"}})
@example(
    None,
    [],
    {
        "tools": [{"type": "function", "name": "f"}, {"type": "function", "name": "g", "parameters": {"a": "\ud83d"}}],
        "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]},
    },
)
def test_only_request_errors_are_raised(anything, items, fields):
    for data in (anything, {"input": items, **fields}, {"input": "Hello", **fields}):
        try:
            parsed = ResponsesRequest.parse(data)
            call = parsed.to_chat()
        except RequestError as error:
            error.message.encode()
            continue
        parsed = parsed.model_copy(update={"stream": True})  # otherwise, there are no events
        builder = ResponseEventBuilder(id="resp_1", request=parsed, chat=call.chat, stored=False)
        events, _ = builder.fail({"code": "x", "message": "It broke.", "param": None, "type": "server_error"})
        for event in events:
            event_to_json(event)
