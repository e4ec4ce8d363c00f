"""Unknown fields of objects in a request: misspelled ones, media under another name, and those that are accepted."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import chat, responses, shared_params
from openai.types.chat import (
    chat_completion_assistant_message_param,
    chat_completion_content_part_image_param,
    chat_completion_content_part_param,
)
from openai.types.responses import response_input_item_param, response_reasoning_item_param
from openai.types.shared_params import response_format_json_schema

from dashinfer_vlm_core.errors import InvalidParameter
from dashinfer_vlm_core.protocol import ChatRequest, body, messages, output, request, response_items, sources
from dashinfer_vlm_core.protocol.field_names import MAX_CHECKED
from dashinfer_vlm_core.protocol.name_log import NameLog
from dashinfer_vlm_core.protocol.responses import (
    CompactRequest,
    FunctionTool,
    ReasoningConfig,
    ResponsesRequest,
    TextConfig,
    TextFormat,
    ToolSelection,
)
from tests.cases import cases

URL = "https://example.com/a.png"
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
TEXT = {"type": "text", "text": "What is this?"}
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"max_pixls": "http://a"}'}}
ITEM_CALL = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}
SCHEMA = {"type": "object", "properties": {"images": {"type": "string"}}, "additionalProperty": URL, "descriptin": "a"}


@pytest.fixture
def logged(monkeypatch, caplog):
    """Return the log lines about unknown fields, which are logged once in each process otherwise."""
    monkeypatch.setattr(body, "_LOG", NameLog(body.logger, "%s", "No more."))
    return lambda: [record.getMessage() for record in caplog.records if record.name == body.__name__]


def user(*parts, **fields):
    return {"messages": [{"role": "user", "content": list(parts) or "Hello", **fields}]}


def item(*parts, **fields):
    return {"input": [{"role": "user", "content": list(parts) or "Hello", **fields}]}


def parse(data):
    return ResponsesRequest.parse(data).to_chat().chat if "input" in data else ChatRequest.parse(data)


def error_of(data) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        parse(data)
    return caught.value


MISSPELLED = [
    (user(contents="a"), "messages[0].contents", "content"),
    (user(TEXT, {**IMAGE, "image_url": {"url": URL, "max_pixls": 9}}),
     "messages[0].content[1].image_url.max_pixls", "max_pixels"),
    (user({"type": "text", "text": "a", "imageUrl": URL}), "messages[0].content[0].imageUrl", "image_url"),
    (user({"type": "video_url", "video_url": {"url": [{"url": URL, "detaik": "low"}]}}),
     "messages[0].content[0].video_url.url[0].detaik", "detail"),
    ({"messages": [{"role": "assistant", "tool_call": [CALL]}]}, "messages[0].tool_call", "tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "a", "argumentz": "{}"}}]}]},
     "messages[0].tool_calls[0].function.argumentz", "arguments"),
    ({**user(), "tools": [{"type": "function", "function": {"name": "f", "parameterz": {}}}]},
     "tools[0].function.parameterz", "parameters"),
    ({**user(), "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schemaa": {}}}},
     "response_format.json_schema.schemaa", "schema"),
    ({**user(), "media_io_kwargs": {"video": {"num_frame": 3}}}, "media_io_kwargs.video.num_frame", "num_frames"),
    (item({"type": "input_image", "image_ulr": URL}), "input[0].content[0].image_ulr", "image_url"),
    (item({"type": "input_image", "image_url": {"url": URL, "max_pixls": 9}}),
     "input[0].content[0].image_url.max_pixls", "max_pixels"),
    ({"input": [{**ITEM_CALL, "argumentz": "{}"}]}, "input[0].argumentz", "arguments"),
    ({"input": "Hello", "text": {"formaat": {}}}, "text.formaat", "format"),
]  # fmt: skip


@cases(("data", "param", "meant"), MISSPELLED)
def test_misspelled_nested_field_gets_a_hint(data, param, meant):
    error = error_of(data)
    assert (error.param, error.message) == (param, f"`{param}` is not a known field. Did you mean `{meant}`?")


CHAT_IMAGE = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
CHAT_VIDEO = '{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,..."}}'
CHAT_FILE = '{"type": "file", "file": {"file_data": "data:application/pdf;base64,..."}}'
ITEM_FILE = '{"type": "input_file", "file_data": "data:application/pdf;base64,..."}'
ITEM_IMAGE = '{"type": "input_image", "image_url": "data:image/png;base64,..."}'
MEDIA = [
    (user(images=[PNG]), "messages[0].images", CHAT_IMAGE),  # Ollama
    (user(image_url=URL), "messages[0].image_url", CHAT_IMAGE),
    (user(videos=[{"url": URL}]), "messages[0].videos", CHAT_VIDEO),
    (user(attachments=[{"url": URL}]), "messages[0].attachments", CHAT_IMAGE),
    (user({"type": "image", "image": URL}), "messages[0].content[0].image", CHAT_IMAGE),  # Qwen
    (user({"type": "image", "data": PNG}), "messages[0].content[0].data", CHAT_IMAGE),
    (user({**TEXT, "picture_1": "data:image/png;base64,AAAA"}), "messages[0].content[0].picture_1", CHAT_IMAGE),
    (user({**TEXT, "frames": [URL, URL]}), "messages[0].content[0].frames", CHAT_IMAGE),
    (user({**TEXT, "clip": "AAAAIGZ0eXBpc29t"}), "messages[0].content[0].clip", CHAT_IMAGE),
    (user({**TEXT, "report": "JVBERi0xLjcK"}), "messages[0].content[0].report", CHAT_FILE),
    (user(pdf={"url": URL}), "messages[0].pdf", CHAT_FILE),
    (item(images=[PNG]), "input[0].images", ITEM_IMAGE),
    (item(documents=[URL]), "input[0].documents", ITEM_FILE),
    (item({"type": "input_image", "image": URL}), "input[0].content[0].image", ITEM_IMAGE),
]


@cases(("data", "param", "part"), MEDIA)
def test_media_in_unknown_field_is_rejected_with_the_right_form(data, param, part):
    error = error_of(data)
    assert error.param == param
    assert error.message == f"`{param}` is not a known field. Send a content part such as {part}, or remove the field."


def test_audio_in_unknown_field_is_rejected():
    assert error_of(user(audios=["a"])).message.endswith("The models do not support audio. Remove it.")


def test_long_name_of_media_is_shortened():
    error = error_of(user({**TEXT, "\n\ud83d" + "a" * 5000: URL}))
    assert "\n" not in error.message
    assert len(error.message) < 300
    assert error.param.encode()


UNKNOWN = [
    user(images=[], video="", media=None, image_count=2, file_name="a.txt", avatar=URL),
    user({**TEXT, "note": "An image: https://example.com", "images": {}, "source": {"url": URL}}),
    {**user(), "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]},
    {**user(), "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {**user(), "guided_json": SCHEMA},
    item(image_count=2),
    {"input": "Hello", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
]


@cases("data", UNKNOWN)
def test_other_unknown_field_is_accepted(data):
    assert parse(data).template_messages()


def test_unknown_nested_field_is_logged_once(logged):
    for _ in range(3):
        parse(user({**TEXT, "mood": 1}, {**IMAGE, "mood": 2}, tone="a"))
        parse(item(tone="b"))
    assert logged() == ["'tone', 'mood'"]


def test_number_of_examined_fields_is_bounded():
    others = [f"unknown {index}" for index in range(MAX_CHECKED)]
    assert error_of(user(**dict.fromkeys([*others[1:], "contents"], 1)))
    assert parse(user(**dict.fromkeys([*others, "contents"], 1)))


OTHER_SERVERS = {
    "reasoning_content": "Hm.", "reasoning": "Hm.", "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
    "thinking": "Hm.", "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "a"}],
    "provider_specific_fields": {"refusal": None}, "annotations": [{"type": "url_citation", "url": URL}],
    "citations": [URL], "context": {"citations": [{"url": URL}], "intent": "a"}, "prefix": False, "id": "run-1",
    "audio": None, "images": None, "function_call": None, "tool_calls": None, "refusal": None, "name": "assistant",
    "additional_kwargs": {}, "response_metadata": {"model_name": "a"}, "usage_metadata": None, "example": False,
}  # fmt: skip
CACHED = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}}
RETURNED_CALL = {
    **CALL, "index": 0, "extra_content": {"google": {"thought_signature": "a"}}, "provider_specific_fields": {},
    "function": {**CALL["function"], "parsed_arguments": {"a": 1}},
}  # fmt: skip
RETURNED = [
    {"messages": [
        {"role": "system", "content": [{**TEXT, **CACHED}], **CACHED},
        {"role": "user", "content": [{**IMAGE, **CACHED, "image_url": {"url": URL, "format": "image/png"}}]},
        {"role": "assistant", "content": "A car.", **OTHER_SERVERS},
        {"role": "assistant", "content": [{**TEXT, "id": "a", "index": 0, "annotations": [], "extras": {}}]},
        {"role": "assistant", "content": None, "tool_calls": [RETURNED_CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "1", "status": "success", **CACHED},
    ], "tools": [{"type": "function", **CACHED, "function": {"name": "f", **CACHED}}]},
    {"input": [
        {"type": "message", "role": "user", "status": "completed", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "status": None, "summary": [], "encrypted_content": "a",
         "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": "final_answer",
         "content": [{"type": "output_text", "text": "A car.", "annotations": [], "logprobs": [], "parsed": {}}]},
        {**ITEM_CALL, "id": "fc_1", "status": "completed", "namespace": "a", "caller": {"type": "direct"},
         "parsed_arguments": {}},
        {"type": "function_call_output", "id": "a", "call_id": "call_1", "output": "1", "status": "completed"},
    ]},
]  # fmt: skip


@pytest.mark.parametrize("data", RETURNED, ids=["chat", "responses"])
def test_fields_of_responses_can_be_sent_back(data, logged):
    assert parse(data).template_messages()
    assert not logged()


OPENAI_TYPES: list[tuple[Any, tuple[Any, ...]]] = [
    (messages.Message, (
        chat.ChatCompletionAssistantMessageParam, chat.ChatCompletionUserMessageParam,
        chat.ChatCompletionSystemMessageParam, chat.ChatCompletionDeveloperMessageParam,
        chat.ChatCompletionToolMessageParam, chat.ChatCompletionFunctionMessageParam,
    )),
    (messages.Part, (
        chat.ChatCompletionContentPartTextParam, chat.ChatCompletionContentPartImageParam,
        chat.ChatCompletionContentPartRefusalParam, chat.ChatCompletionContentPartInputAudioParam,
        chat_completion_content_part_param.File,
    )),
    (sources.ImageURL, (chat_completion_content_part_image_param.ImageURL,)),
    (sources.FileSource, (chat_completion_content_part_param.FileFile,)),
    (messages.ToolCall, (chat.ChatCompletionMessageFunctionToolCallParam,)),
    (messages.Function, (chat_completion_assistant_message_param.FunctionCall,)),
    (output.Tool, (chat.ChatCompletionFunctionToolParam,)),
    (output.ToolFunction, (shared_params.FunctionDefinition,)),
    (output.NamedTool, (chat.ChatCompletionNamedToolChoiceParam,)),
    (output.AllowedTools, (chat.ChatCompletionAllowedToolChoiceParam,)),
    (output.ToolSubset, (chat.ChatCompletionAllowedToolsParam,)),
    (output.ResponseFormat, (shared_params.ResponseFormatJSONSchema,)),
    (output.SchemaFormat, (response_format_json_schema.JSONSchema,)),
    (request.StreamOptions, (chat.ChatCompletionStreamOptionsParam,)),
    (response_items.InputItem, (
        responses.EasyInputMessageParam, response_input_item_param.Message, responses.ResponseOutputMessageParam,
        responses.ResponseFunctionToolCallParam, response_input_item_param.FunctionCallOutput,
        responses.ResponseReasoningItemParam, responses.ResponseCompactionItemParamParam,
        response_input_item_param.ItemReference,
    )),
    (response_items.ItemPart, (
        responses.ResponseInputTextParam, responses.ResponseInputImageParam, responses.ResponseInputFileParam,
        responses.ResponseInputTextContentParam, responses.ResponseInputImageContentParam,
        responses.ResponseInputFileContentParam, responses.ResponseOutputTextParam,
        responses.ResponseOutputRefusalParam, response_reasoning_item_param.Summary,
        response_reasoning_item_param.Content,
    )),
    (FunctionTool, (responses.FunctionToolParam,)),
    (ToolSelection, (responses.ToolChoiceAllowedParam, responses.ToolChoiceFunctionParam)),
    (TextConfig, (responses.ResponseTextConfigParam,)),
    (TextFormat, (responses.ResponseFormatTextJSONSchemaConfigParam,)),
    (ReasoningConfig, (shared_params.Reasoning,)),
    (CompactRequest, (responses.response_compact_params.ResponseCompactParams,)),
]  # fmt: skip


@cases(("model", "theirs"), OPENAI_TYPES)
def test_every_field_of_openais_types_is_known(model, theirs):
    fields = {name for kind in theirs for name in kind.__annotations__}
    unknown = []
    model._field_names.check(dict.fromkeys(fields, URL), unknown)
    assert not unknown
