"""Requests of Anthropic's Messages API: their validation, and the paths in errors."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dashinfer_vlm_core.errors import InvalidParameter, RequestError
from dashinfer_vlm_core.protocol.anthropic import (
    IGNORED_IN_ANTHROPIC,
    REJECTED_IN_ANTHROPIC,
    CountTokensRequest,
    MessagesRequest,
)
from dashinfer_vlm_core.protocol.fields import REJECTED_FIELDS
from tests.cases import cases
from tests.core.test_schema import JSON

TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1.5, "ü", None]}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
HELLO = {"role": "user", "content": "Hello"}


def request(*messages, **fields):
    return MessagesRequest.parse({"max_tokens": 9, "messages": list(messages) or [HELLO], **fields})


@cases(
    ("name", "value"),
    [(name, value) for name, (neutral, _) in REJECTED_IN_ANTHROPIC.items() for value in [*neutral, None]]
    + [(name, "anything") for name in sorted(IGNORED_IN_ANTHROPIC)],
)
def test_field_without_effect_is_accepted(name, value):
    assert request(**{name: value}).to_chat().chat == request().to_chat().chat


@cases("name", sorted(REJECTED_FIELDS.keys() - REJECTED_IN_ANTHROPIC.keys()))
def test_fields_that_chat_requests_reject_are_rejected(name):
    with pytest.raises(RequestError) as caught:
        request(**{name: "odd"}).to_chat()
    assert caught.value.param == name


def test_fields_become_those_of_a_chat_request():
    chat = request(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        stop_sequences=["a", "b"],
        stream=True,
        seed=4,
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        thinking={"type": "adaptive"},
    ).to_chat().chat  # fmt: skip
    assert (chat.max_tokens, chat.temperature, chat.top_k, chat.top_p, chat.seed) == (9, 0.5, 3, 0.9, 4)
    assert (chat.stop_strings, chat.reasoning_effort, chat.include_initial_usage) == (("a", "b"), "low", True)
    assert chat.output_constraint.strict
    assert chat.thinking.type == "adaptive"


@pytest.mark.parametrize(
    ("choice", "chat_choice", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, None),
    ],
)
def test_tool_choice_becomes_that_of_a_chat_request(choice, chat_choice, parallel):
    chat = request(tools=[TOOL], tool_choice=choice).to_chat().chat.model_dump(include={"tool_choice"})
    assert chat["tool_choice"] == chat_choice
    assert request(tools=[TOOL], tool_choice=choice).to_chat().chat.parallel_tool_calls is parallel


def test_tool_names_have_at_most_128_characters():
    tool = {**TOOL, "name": f"mcp__{'a' * 123}"}
    assert request(tools=[tool]).to_chat().chat.tools[0].function.name == tool["name"]
    with pytest.raises(InvalidParameter, match="1 to 128 letters") as caught:
        request(tools=[{**tool, "name": "a" * 129}]).to_chat()
    assert caught.value.param == "tools[0].name"


def test_messages_keep_their_order():
    chat = request(
        HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I "},
                {"type": "text", "text": "look."},
                CALL,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [IMAGE], "is_error": True},
                {"type": "tool_result", "tool_use_id": "c"},
                {"type": "text", "text": "And?"},
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": "Be true."}]},
        system="Be brief.",
    ).to_chat().chat  # fmt: skip
    found = [(message.role, message.content if isinstance(message.content, str) else None) for message in chat.messages]
    assert found == [
        ("system", "Be brief."), ("user", "Hello"), ("assistant", "I look."), ("tool", None), ("tool", ""),
        ("user", None), ("system", "Be true."),
    ]  # fmt: skip
    answer = chat.messages[2]
    assert answer.reasoning_content == "Hm."
    assert answer.tool_calls[0].function.arguments == '{"a": [1.5, "ü", null]}'
    assert [part.path for part in chat.media()] == ["messages[3].content[0]"]


def test_instructions_before_the_conversation_are_one_message():
    chat = request({"role": "system", "content": "Be true."}, HELLO, system="Be brief.").to_chat().chat
    found = [(message.role, message.content) for message in chat.messages]
    assert found == [("system", "Be brief.\n\nBe true."), ("user", "Hello")]


def test_errors_of_the_engine_name_the_fields_of_this_request():
    call = request(
        {"role": "user", "content": [{"type": "text", "text": "?"}, IMAGE]},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, CALL]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}, IMAGE]},
        system="Be brief.",
        tools=[TOOL],
        output_format={"type": "json_schema", "schema": {"type": "object"}},
    ).to_chat()
    expected = {
        "messages": "messages",
        "messages[0]": "system",
        "messages[1].content[1].image_url.url": "messages[0].content[1].source.url",
        "messages[1].content[1]": "messages[0].content[1]",
        "messages[2].tool_calls[0].function.arguments": "messages[1].content[1].input",
        "messages[2].tool_calls[0].id": "messages[1].content[1].id",
        "messages[3].content[0].image_url": "messages[2].content[0].content[0].source",
        "messages[4].content[0]": "messages[2].content[1]",
        "tools[0].function.parameters": "tools[0].input_schema",
        "tools[0].function.name": "tools[0].name",
        "tool_choice.function.name": "tool_choice.name",
        "response_format.json_schema.schema": "output_format.schema",
        "reasoning_effort": "output_config.effort",
        "stop": "stop_sequences",
        "top_k": "top_k",
    }
    for param, renamed in expected.items():
        with pytest.raises(InvalidParameter) as caught, call.renamed_errors():
            raise InvalidParameter(f"`{param}` is wrong.", param=param)
        assert (caught.value.param, caught.value.message) == (renamed, f"`{renamed}` is wrong.")


BLOCKS = ["text", "image", "video", "document", "tool_use", "tool_result", "thinking", "base64", "url", "content"]
KNOWN = sorted({
    *MessagesRequest.model_fields, *REJECTED_IN_ANTHROPIC, *IGNORED_IN_ANTHROPIC, "type", "role", "content", "source",
    "data", "media_type", "url", "text", "thinking", "id", "name", "input", "tool_use_id", "input_schema", "format",
    "schema", "effort", "citations",
})  # fmt: skip
NEAR = st.recursive(
    JSON | st.sampled_from([*BLOCKS, "user", "assistant", "any", "tool", "enabled", "json_schema"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KNOWN), inner, max_size=5),
    max_leaves=12,
)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": NEAR})


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(NEAR, st.lists(MESSAGE, max_size=3), st.dictionaries(st.sampled_from(KNOWN), NEAR, max_size=3))
@example(None, [{"role": "assistant", "content": [{**CALL, "input": {"\ud83d": 1}}]}, HELLO], {})
def test_only_request_errors_are_raised(anything, messages, fields):
    for data in (anything, {"messages": messages, **fields}, {"messages": [HELLO], "max_tokens": 1, **fields}):
        check(MessagesRequest, data)
        check(CountTokensRequest, data)


def check(kind, data):
    try:
        kind.parse(data).to_chat()
    except RequestError as error:
        error.message.encode()
