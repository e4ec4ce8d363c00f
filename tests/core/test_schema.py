"""Requests: accepted fields, their parsed values, and rejected fields with their names in the error."""

from __future__ import annotations

import copy
import json
import math
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import (
    CompletionCreateParamsNonStreaming,
    CompletionCreateParamsStreaming,
)
from openai.types.shared import ReasoningEffort
from pydantic import ValidationError

from dashinfer_vlm_core.errors import InvalidParameter, RequestError, UnsupportedParameter
from dashinfer_vlm_core.protocol import LOW_DETAIL_PIXELS, ChatRequest, DocumentPart, MediaPart, body
from dashinfer_vlm_core.protocol.fields import IGNORED_FIELDS, REJECTED_FIELDS, SUPPORTED_FIELDS
from dashinfer_vlm_core.protocol.name_log import MAX_LOGGED, NameLog
from dashinfer_vlm_core.protocol.sampling import Sampling
from dashinfer_vlm_core.protocol.sources import JPEG_FRAMES
from tests.cases import cases

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
VIDEO = {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def request(*parts, **fields):
    """Return a valid request, which a test changes in one place."""
    return {"messages": [{"role": "user", "content": list(parts) or "Hello"}], **fields}


def message(role="user", **fields):
    return {"messages": [{"role": role, **fields}]}


def image(**fields):
    return request({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", **fields}})


def video(url="https://example.com/a.mp4", **fields):
    return request({"type": "video_url", "video_url": {"url": url, **fields}})


def rejection_of(data) -> RequestError:
    with pytest.raises(RequestError) as caught:
        ChatRequest.parse(data)
    return caught.value


# Accepted requests


def test_minimal_request():
    parsed = ChatRequest.parse(request())
    assert parsed.model == "model"
    assert parsed.sampling() == Sampling()
    assert parsed.template_messages() == [{"role": "user", "content": "Hello"}]
    assert parsed.media() == ()
    assert (parsed.stream, parsed.include_usage, parsed.stop_strings) == (False, False, ())


def test_sampling_has_every_option():
    options = {
        "min_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": -7,
        "repetition_penalty": 1.1, "presence_penalty": -2, "frequency_penalty": 2,
        "stop_token_ids": [5, 0], "ignore_eos": True, "no_repeat_ngram_size": 3,
        "vllm_xargs": {"window_size": 50, "whitelist_token_ids": [7], "debug": False},
    }  # fmt: skip
    sampling = ChatRequest.parse(
        request(**options, max_tokens=9, logprobs=True, top_logprobs=20, logit_bias={"0": -100, "7": 1.5})
    ).sampling()
    expected = options | {"no_repeat_ngram_window": 50, "no_repeat_ngram_whitelist": (7,)}
    del expected["vllm_xargs"]
    expected |= {"max_tokens": 9, "logprobs": 20, "logit_bias": {0: -100, 7: 1.5}, "stop_token_ids": (5, 0)}
    assert {name: getattr(sampling, name) for name in Sampling.__dataclass_fields__} == expected


@cases(
    ("fields", "name", "value"),
    [
        ({"max_tokens": 5}, "max_tokens", 5),
        ({"max_completion_tokens": 6}, "max_tokens", 6),
        ({"max_tokens": 6, "max_completion_tokens": 6}, "max_tokens", 6),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": False}, "logprobs", None),
        ({"top_k": -1}, "top_k", 0),
        ({"temperature": 2}, "temperature", 2.0),
        ({"temperature": 1e-300}, "temperature", 0.0),
        ({"temperature": 1, "top_p": 0}, "temperature", 0.0),
        ({"top_p": 0}, "top_p", 1.0),
        ({"seed": 2**63 - 1}, "seed", 2**63 - 1),
        ({"min_tokens": 4}, "min_tokens", 4),
    ],
)
def test_sampling(fields, name, value):
    assert getattr(ChatRequest.parse(request(**fields)).sampling(), name) == value


@cases(
    ("fields", "size", "window"),
    [
        ({"no_repeat_ngram_size": 3}, 3, None),
        ({"vllm_xargs": {"no_repeat_ngram_size": 100, "debug": False}}, 100, None),
        ({"vllm_xargs": {"no_repeat_ngram_size": 20, "window_size": 90}}, 20, 90),
        ({"vllm_xargs": {"ngram_size": 20}}, 20, 100),
        ({"vllm_xargs": {"ngram_size": 20, "window_size": 90}, "no_repeat_ngram_size": 20}, 20, 90),
        ({"vllm_xargs": {"window_size": 90, "whitelist_token_ids": [1]}}, 0, None),
        ({"vllm_xargs": {"no_repeat_ngram_size": 0, "other": "x"}}, 0, None),
        ({"vllm_xargs": {}}, 0, None),
    ],
)
def test_ngrams_of_vllms_processors(fields, size, window):
    sampling = ChatRequest.parse(request(**fields)).sampling()
    assert (sampling.no_repeat_ngram_size, sampling.no_repeat_ngram_window) == (size, window)
    assert bool(sampling.requested_params()) == bool(size)


@cases("effort", get_args(get_args(ReasoningEffort)[0]))
def test_efforts_of_openai_are_accepted(effort):
    assert ChatRequest.parse(request(reasoning_effort=effort)).reasoning_effort == effort


def test_negative_zero_is_zero():
    temperature = ChatRequest.parse(request(temperature=-0.0)).sampling().temperature
    assert math.copysign(1, temperature) == 1


@pytest.mark.parametrize(("stop", "strings"), [("a", ("a",)), (["a", "bc"] * 8, ("a", "bc") * 8), ([], ()), (None, ())])
def test_stop_strings(stop, strings):
    assert ChatRequest.parse(request(stop=stop)).stop_strings == strings


@cases(
    ("fields", "message"),
    [
        ({"messages": None}, '`messages` is required. Write "messages": [{"role": "user", "content": "..."}].'),
        (
            {"messages": "Hi"},
            '`messages` must be an array; got \'Hi\'. Write "messages": [{"role": "user", "content": "..."}].',
        ),
        ({"temperature": "0.5"}, "`temperature` must be a finite number; got '0.5'. Write it without quotes."),
        ({"temperature": "hot"}, "`temperature` must be a finite number; got 'hot'."),
        ({"temperature": 3}, "`temperature` must be at most 2; got 3."),
        ({"stream": "true"}, "`stream` must be true or false; got 'true'. Write it without quotes."),
        ({"seed": "0.5"}, "`seed` must be an integer; got '0.5'."),
        ({"stream": "5"}, "`stream` must be true or false; got '5'."),
        ({"tool_choice": {"type": "function"}}, "`tool_choice.function` is required."),
        ({"model": 5}, "`model` must be a string; got 5."),
        (
            {"tools": [{"type": "function"}]},
            '`tools[0].function` is required. Write "function": {"name": "...", "parameters": {...}}.',
        ),
        (
            {"response_format": "json"},
            '`response_format` must be an object; got \'json\'. Write "response_format": {"type": "json_object"}.',
        ),
    ],
)
def test_error_includes_next_step(fields, message):
    with pytest.raises(InvalidParameter) as caught:
        ChatRequest.parse(request(**fields))
    assert caught.value.message == message


def test_include_usage():
    assert ChatRequest.parse(request(stream=True, stream_options={"include_usage": True})).include_usage
    assert not ChatRequest.parse(request(stream=True, stream_options={})).include_usage


def test_null_means_absent_in_every_field():
    fields = (SUPPORTED_FIELDS | IGNORED_FIELDS | REJECTED_FIELDS.keys() | ChatRequest.model_fields.keys()) - {
        "messages"
    }
    assert ChatRequest.parse(request(**dict.fromkeys(fields))) == ChatRequest.parse(request())


def test_null_means_absent_in_nested_fields():
    parsed = ChatRequest.parse(
        {
            "messages": [
                {"role": "user", "name": None, "content": [{**IMAGE, "text": None}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "function_call": None, "audio": None},
            ],
            "stream": True,
            "stream_options": {"include_usage": None, "include_obfuscation": None},
        }
    )
    assert not parsed.include_usage
    assert ChatRequest.parse(image(detail=None, max_pixels=None)).media() == ChatRequest.parse(image()).media()
    assert ChatRequest.parse(video(fps=None)).media() == ChatRequest.parse(video()).media()


def test_unknown_keys_are_tolerated_at_every_level():
    unknown = {"x-unknown": {"deep": [1, {}]}}
    call = {**CALL, **unknown, "function": {**CALL["function"], **unknown}}
    data = {
        "messages": [
            {
                "role": "user",
                "content": [{**IMAGE, "image_url": {**IMAGE["image_url"], **unknown}, **unknown}],
                **unknown,
            },
            {"role": "assistant", "content": "a", "tool_calls": [call]},
        ],
        "stream": True,
        "stream_options": {"include_usage": True, **unknown},
        **unknown,
    }
    parsed = ChatRequest.parse(data)
    assert parsed.media()[0].url == IMAGE["image_url"]["url"]
    assert parsed.template_messages()[1]["tool_calls"] == [CALL]


def test_conversation_keeps_order_and_texts():
    typed = "<|im_start|>system <|image_pad|>"
    parsed = ChatRequest.parse(
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                {"role": "system", "content": [{"type": "text", "text": "And true."}]},
                {"role": "user", "name": "ann", "content": [IMAGE, {"type": "text", "text": typed}, VIDEO]},
                {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL], "annotations": []},
                {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "It is"}, IMAGE]},
                {
                    "role": "assistant",
                    "content": [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "!"}],
                },
                {"role": "assistant", "refusal": "I cannot."},
                {"role": "assistant", "content": None, "reasoning_content": "It is red."},
                {"role": "user", "content": ""},
            ]
        }
    )
    assert parsed.template_messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": [{"type": "text", "text": "And true."}]},
        {
            "role": "user",
            "name": "ann",
            "content": [{"type": "image"}, {"type": "text", "text": typed}, {"type": "video"}],
        },
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "It is"}, {"type": "image"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "No."}, {"type": "text", "text": "!"}]},
        {"role": "assistant", "content": "I cannot."},
        {"role": "assistant", "content": "", "reasoning_content": "It is red."},
        {"role": "user", "content": ""},
    ]
    assert [(part.kind, part.path) for part in parsed.media()] == [
        ("image", "messages[2].content[0]"),
        ("video", "messages[2].content[2]"),
        ("image", "messages[4].content[1]"),
    ]


@cases(
    ("fields", "bounds"),
    [
        ({}, (None, None)),
        ({"detail": "auto"}, (None, None)),
        ({"detail": "high"}, (None, None)),
        ({"detail": "low"}, (None, LOW_DETAIL_PIXELS)),
        ({"detail": "low", "max_pixels": 9_999_999}, (None, 9_999_999)),
        ({"detail": "low", "min_pixels": 9_999_999}, (9_999_999, 9_999_999)),
        ({"min_pixel": 3136, "max_pixel": 1003520}, (3136, 1003520)),
        ({"min_pixels": 3136, "max_pixels": 3136}, (3136, 3136)),
        ({"min_pixels": 3136, "min_pixel": 3136}, (3136, None)),
    ],
)
def test_image_size_options(fields, bounds):
    (part,) = ChatRequest.parse(image(**fields)).media()
    assert (part.min_pixels, part.max_pixels) == bounds


def test_video_file():
    options = {"min_pixels": 1, "max_pixels": 2, "total_pixels": 3, "fps": 0.5}
    (part,) = ChatRequest.parse(video("https://example.com/a.mp4", **options)).media()
    assert part == MediaPart(kind="video", path="messages[0].content[0]", url="https://example.com/a.mp4", **options)
    assert ChatRequest.parse(video(num_frames=8)).media()[0].num_frames == 8


def test_video_as_list_of_frames():
    frames = [
        "a",
        {"url": "b"},
        {"type": "image_url", "image_url": {"url": "c", "detail": "auto"}},
        {"image_url": {"url": "d"}},
    ]
    (part,) = ChatRequest.parse(video(frames)).media()
    assert part == MediaPart(kind="video", path="messages[0].content[0]", url=("a", "b", "c", "d"))


@cases(("name", "value"), [(name, value) for name, (nothing, _) in REJECTED_FIELDS.items() for value in nothing])
def test_unsupported_field_may_have_neutral_value(name, value):
    assert ChatRequest.parse(request(**{name: value})).sampling() == Sampling()


@cases("name", sorted(IGNORED_FIELDS))
def test_ignored_fields_are_accepted(name):
    assert ChatRequest.parse(request(**{name: "anything"})).sampling() == Sampling()


VIDEO_FILE = "data:video/mp4;base64,AAAA"
IMAGE_FILE = "data:image/png;base64,AAAA"
PDF_FILE = "data:application/pdf;base64,JVBERi0x"


@cases(
    "part",
    [
        {"type": "input_video", "input_video": {"data": "AAAA"}},
        {"type": "input_video", "input_video": {"data": "AAAA", "format": "mp4"}},
        {"type": "input_video", "input_video": {"data": VIDEO_FILE}},
        {"type": "input_video", "input_video": {"url": VIDEO_FILE}},
        {"type": "input_video", "video_url": VIDEO_FILE},
        {"type": "input_video", "video_url": {"url": VIDEO_FILE}},
        {"type": "video_url", "video_url": VIDEO_FILE},
        {"type": "file", "file": {"file_data": VIDEO_FILE}},
        {"type": "file", "file": {"file_data": "AAAA", "filename": "a.mp4"}},
        {"type": "file", "file": {"file_data": "AAAA", "format": "video/mp4"}},
        {"type": "file", "file": {"file_id": VIDEO_FILE, "format": "video/mp4"}},
    ],
)
def test_video_shapes_of_other_clients(part):
    parsed = ChatRequest.parse(request(part, {"type": "text", "text": "What moves?"}))
    assert parsed.media() == ChatRequest.parse(video(VIDEO_FILE)).media()
    assert parsed.template_messages()[0]["content"][0] == {"type": "video"}
    assert ChatRequest.parse(parsed.model_dump(exclude_unset=True)).media() == parsed.media()


def test_file_can_be_an_image_or_a_video():
    for file, expected in (
        ({"file_data": IMAGE_FILE, "filename": "image-0.png"}, image()),
        ({"file_data": "AAAA", "filename": "A.PNG", "detail": "low"}, image(detail="low")),
        ({"file_id": "https://example.com/a.mp4"}, video()),
        ({"file_data": f"{JPEG_FRAMES}AAAA,BBBB"}, video(f"{JPEG_FRAMES}AAAA,BBBB")),
        ({"file_id": "https://example.com/a", "format": "video/mp4", "video_metadata": {"fps": 4}},
         video("https://example.com/a", fps=4)),
    ):  # fmt: skip
        parsed, same = ChatRequest.parse(request({"type": "file", "file": file})), ChatRequest.parse(expected)
        assert parsed.media() == same.media()
        assert parsed.template_messages() == same.template_messages()
    (part,) = ChatRequest.parse(request({"type": "file", "file": {"file_data": IMAGE_FILE}})).media()
    assert part.url_path == "messages[0].content[0].file.file_data"


@cases(
    "file",
    [
        {"file_data": PDF_FILE},
        {"file_data": PDF_FILE, "filename": "a.docx"},
        {"file_data": "JVBERi0x"},
        {"file_data": "AAAA", "filename": "A.PDF"},
        {"file_data": "data:application/octet-stream;base64,AAAA", "filename": "a.pdf"},
        {"file_data": "AAAA", "format": "application/pdf"},
        {"file_url": "https://example.com/report"},
        {"file_url": "report.pdf"},
        {"file_id": "https://example.com/a.pdf?b=c.docx"},
    ],
)
def test_file_can_be_a_document(file):
    parsed = ChatRequest.parse(request({"type": "file", "file": {**file, "pages": "1, 3-", "detail": "low"}}))
    (document,) = parsed.documents()
    assert (document.path, document.pages, document.max_pixels) == (PART, "1,3-", LOW_DETAIL_PIXELS)
    assert document.url.endswith(("JVBERi0x", "AAAA", "report", "report.pdf", "docx"))
    assert not parsed.media()


@cases(
    ("pages", "selected"),
    [("", [1, 2, 3, 4]), ("2", [2]), ("4,1", [1, 4]), ("1-3,2-4", [1, 2, 3, 4]), ("3-", [3, 4]), ("1,1-1", [1])],
)
def test_selected_pages_are_in_order_and_unique(pages, selected):
    assert list(DocumentPart(path=PART, url="", pages=pages).selected(4)) == selected


@pytest.mark.parametrize(("pages", "missing"), [("5", "5"), ("1-5", "5"), ("6-", "6")])
def test_selected_page_that_does_not_exist_is_named(pages, missing):
    with pytest.raises(ValueError, match=missing):
        list(DocumentPart(path=PART, url="", pages=pages).selected(4))


def test_image_url_can_be_a_string():
    """As in vLLM."""
    url = "https://example.com/a.png"
    parsed = ChatRequest.parse(request({"type": "image_url", "image_url": url, "uuid": "one"}))
    (part,) = parsed.media()
    (same,) = ChatRequest.parse(request({"type": "image_url", "image_url": {"url": url}, "uuid": "one"})).media()
    assert part == same
    assert (part.url_path, same.url_path) == (f"{PART}.image_url", f"{PART}.image_url.url")
    assert ChatRequest.parse(parsed.model_dump(exclude_unset=True)).media() == parsed.media()


def test_input_video_has_options_of_video_url():
    options = {"fps": 0.5, "max_pixels": 20}
    parsed = ChatRequest.parse(request({"type": "input_video", "input_video": {"data": "AAAA", **options}}))
    assert parsed.media() == ChatRequest.parse(video(VIDEO_FILE, **options)).media()
    frames = ["a", "b"]
    parsed = ChatRequest.parse(request({"type": "input_video", "input_video": {"url": frames}}))
    assert parsed.media()[0].url == ("a", "b")
    (part,) = ChatRequest.parse(request({"type": "input_video", "uuid": "one"})).media()
    assert (part.kind, part.uuid, part.has_source) == ("video", "one", False)


OUTPUT = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "structured_outputs": {"json": {"type": "object"}, "regex": None, "disable_fallback": True},
}


@cases(
    ("fields", "kind", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "response_format"),
        ({"response_format": OUTPUT["response_format"]}, "json_schema", "response_format.json_schema.schema"),
        ({"guided_json": {"type": "object"}}, "json_schema", "guided_json"),
        ({"guided_json": '{"type": "object"}'}, "json_schema", "guided_json"),
        ({"guided_regex": "a+"}, "regex", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "choice", "guided_choice"),
        ({"structured_outputs": OUTPUT["structured_outputs"]}, "json_schema", "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"type": "object"}'}}, "json_schema", "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", "structured_outputs.choice"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "structured_outputs.json_object"),
    ],
)
def test_output_constraint(fields, kind, param):
    parsed = ChatRequest.parse(request(**fields, guided_decoding_backend="auto"))
    constraint = parsed.output_constraint
    assert (constraint.kind, constraint.param, constraint.field) == (kind, param, next(iter(fields)))
    expected = {
        "json_object": (None, "", ()),
        "json_schema": ({"type": "object"}, "", ()),
        "regex": (None, "a+", ()),
        "choice": (None, "", ("a", "b")),
    }
    assert (constraint.json_schema, constraint.regex, constraint.choices) == expected[kind]
    assert ChatRequest.parse(parsed.model_dump(mode="json", exclude_unset=True)).output_constraint == constraint


@cases("first", OUTPUT)
@cases("second", OUTPUT)
def test_only_one_output_constraint_is_accepted(first, second):
    if first == second:
        return
    error = rejection_of(request(**{first: OUTPUT[first], second: OUTPUT[second]}))
    assert error.param.partition(".")[0] in {first, second}
    assert "both define the output. Pass one of them." in error.message


# Unknown fields


@cases(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("max_tokns", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("MAX_TOKENS", "max_tokens"),
        ("max_completion_token", "max_completion_tokens"),
        ("temprature", "temperature"),
        ("temperatrue", "temperature"),
        ("topP", "top_p"),
        ("response_fromat", "response_format"),
        ("tool_choise", "tool_choice"),
        ("guided_jsn", "guided_json"),
        ("stops", "stop"),
    ],
)
def test_misspelled_field_gets_a_hint(name, meant):
    error = rejection_of(request(**{name: 5}))
    assert isinstance(error, InvalidParameter)
    assert (error.param, error.message) == (name, f"`{name}` is not a known field. Did you mean `{meant}`?")
    assert ChatRequest.parse(request(**{name: None})).sampling() == Sampling()


FIELDS_OF_OTHER_SERVERS = [
    "foo", "options", "priority", "request_id", "kv_transfer_params", "return_token_ids", "documents",
    "spaces_between_special_tokens", "include_reasoning", "return_tokens_as_token_ids", "lora_path", "no_stop_trim",
    "separate_reasoning", "stream_reasoning", "n_predict", "n_probs", "min_keep", "cache_prompt", "samplers", "id_slot",
    "timings_per_token", "tfs_z", "typical_p", "mirostat", "top_a", "top_n_sigma", "repeat_penalty", "keep_alive",
    "transforms", "provider", "route", "plugins", "think", "litellm_metadata", "extra_headers", "api_version", "x", "",
]  # fmt: skip


@cases("name", FIELDS_OF_OTHER_SERVERS)
def test_unknown_field_is_ignored(name):
    assert ChatRequest.parse(request(**{name: 1})).sampling() == Sampling()


def new_log():
    return NameLog(
        body.logger,
        "Requests have unknown fields, which are ignored: %s.",
        "Further unknown fields of requests are not logged.",
    )


def test_unknown_field_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(body, "_LOG", new_log())
    for _ in range(3):
        ChatRequest.parse(request(**{"logged once": 1, "forged\nline": 2}))
    assert [record.getMessage() for record in caplog.records] == [
        "Requests have unknown fields, which are ignored: 'logged once', 'forged\\nline'."
    ]


def test_log_of_unknown_fields_is_bounded(caplog):
    log = new_log()
    for index in range(MAX_LOGGED + 50):
        log.log([f"name {index}"])
    assert len(caplog.records) == MAX_LOGGED + 1
    assert caplog.records[-1].getMessage() == "Further unknown fields of requests are not logged."


def test_many_unknown_fields_are_accepted():
    names = {f"unknown {index} {'x' * 200}": index for index in range(50_000)}
    assert ChatRequest.parse(request(**names)).sampling() == Sampling()


def test_every_openai_field_is_in_exactly_one_group():
    theirs = CompletionCreateParamsNonStreaming.__annotations__.keys() | CompletionCreateParamsStreaming.__annotations__
    groups = [SUPPORTED_FIELDS, IGNORED_FIELDS, REJECTED_FIELDS.keys()]
    assert {name: sum(name in group for group in groups) for name in theirs} == dict.fromkeys(theirs, 1)
    assert set(SUPPORTED_FIELDS) <= ChatRequest.model_fields.keys()


def test_request_round_trips_through_json():
    data = {**request(IMAGE, VIDEO, stop=["a"], logit_bias={"1": 2}), "x-unknown": [1]}
    parsed = ChatRequest.parse(data)
    assert json.loads(parsed.model_dump_json(exclude_unset=True)) == data
    assert ChatRequest.parse(parsed) is parsed


def test_request_is_immutable_and_always_validated():
    parsed = ChatRequest.parse(request())
    with pytest.raises(ValidationError):
        parsed.temperature = 9
    with pytest.raises(InvalidParameter):
        ChatRequest(**request(top_logprobs=3))


def test_input_is_not_modified():
    data = request(IMAGE, temperature=None, tools=[])
    before = copy.deepcopy(data)
    ChatRequest.parse(data)
    assert data == before


def test_image_data_is_not_copied():
    url = "data:image/png;base64," + "A" * 50_000_000
    (part,) = ChatRequest.parse(image(url=url)).media()
    assert part.url is url


# Rejected requests

NUMBERS = [
    # field, minimum, maximum
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("frequency_penalty", -2, 2),
    ("presence_penalty", -2, 2),
    ("repetition_penalty", None, 2),
]
INTEGERS = [
    ("max_tokens", 1),
    ("max_completion_tokens", 1),
    ("min_tokens", 0),
    ("top_k", -1),
    ("seed", -(2**63)),
    ("top_logprobs", 0),
]
NOT_FINITE = [math.nan, math.inf, -math.inf, 1e309, 10**400]
NOT_NUMBERS = ["1", "", True, False, [], [1], {}]


@cases("value", NOT_FINITE + NOT_NUMBERS)
@cases("name", [name for name, *_ in NUMBERS + INTEGERS])
def test_number_must_be_finite(name, value):
    error = rejection_of(request(**{name: value}))
    assert isinstance(error, InvalidParameter)
    assert error.param == name


@cases(("name", "least", "most"), NUMBERS)
def test_number_must_be_in_range(name, least, most):
    for value in [most, least] if least is not None else [most]:
        ChatRequest.parse(request(**{name: value}))
    for value in [most + 1e-6, (least or 0) - 1e-6, 1e308]:
        assert rejection_of(request(**{name: value})).param == name


@cases(("name", "least"), INTEGERS)
def test_integer_must_be_in_range(name, least):
    ChatRequest.parse(request(**{name: least}, logprobs=True))
    for value in [least - 1, 10**25, 1.5, 1.0]:
        assert rejection_of(request(**{name: value}, logprobs=True)).param == name


FRAME = "messages[0].content[0].video_url.url"
PART = "messages[0].content[0]"
BAD = [
    # data, param
    ([], None),
    ("hello", None),
    (None, None),
    ({}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": {"role": "user", "content": "Hello"}}, "messages"),
    ({"messages": ["Hello"]}, "messages[0]"),
    ({"messages": [None]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": "a"}] * 4097}, "messages"),
    ({"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    (message("function", content="a"), "messages[0].role"),
    (message("User", content="a"), "messages[0].role"),
    (message(["user"], content="a"), "messages[0].role"),
    (message(content=None), "messages[0].content"),
    (message(content=5), "messages[0].content"),
    (message(content=[]), "messages[0].content"),
    (message(content={"type": "text", "text": "a"}), "messages[0].content"),
    (message(content=["a"]), PART),
    (message(content="a\ud800"), "messages[0].content"),
    (message(content=[{"type": "text", "text": "a"}] * 1025), "messages[0].content"),
    (message(content="a", name=5), "messages[0].name"),
    (message(content="a", name=""), "messages[0].name"),
    (message(content="a", tool_calls=[CALL]), "messages[0].tool_calls"),
    (message(content="a", refusal="no"), "messages[0].refusal"),
    (message("assistant"), "messages[0].content"),
    (message("assistant", reasoning_content=""), "messages[0].content"),
    (message("assistant", content="a", tool_calls=CALL), "messages[0].tool_calls"),
    (message("assistant", tool_calls=[{**CALL, "type": "custom"}]), "messages[0].tool_calls[0].type"),
    (message("assistant", tool_calls=[{"id": "a"}]), "messages[0].tool_calls[0].function"),
    (
        message("assistant", tool_calls=[{"id": "a", "function": {"name": "f", "arguments": {}}}]),
        "messages[0].tool_calls[0].function.arguments",
    ),
    (message("tool", content="a", tool_call_id=1), "messages[0].tool_call_id"),
    (message("system", content=[IMAGE]), PART),
    (message("developer", content=[IMAGE]), PART),
    (message("assistant", content=[VIDEO]), PART),
    (request({"text": "a"}), f"{PART}.type"),
    (request({"type": None, "text": "a"}), f"{PART}.type"),
    (request({"type": "image"}), f"{PART}.type"),
    (request({"type": ["text"]}), f"{PART}.type"),
    (request({"type": "t" * 100_000}), f"{PART}.type"),
    (request({"type": "text"}), f"{PART}.text"),
    (request({"type": "text", "text": None}), f"{PART}.text"),
    (request({"type": "text", "text": ["a"]}), f"{PART}.text"),
    (request({"type": "text", "text": "\udfff"}), f"{PART}.text"),
    (request({"type": "refusal", "refusal": "no"}), PART),
    (request({"type": "image_url"}), f"{PART}.image_url"),
    (request({"type": "image_url", "url": "a"}), f"{PART}.image_url"),
    (request({"type": "image_url", "image_url": ""}), f"{PART}.image_url"),
    (request({"type": "image_url", "image_url": 5}), f"{PART}.image_url"),
    (request({"type": "image_url", "image_url": ["a"]}), f"{PART}.image_url"),
    (request({"type": "image_url", "image_url": {}}), f"{PART}.image_url.url"),
    (
        request({"type": "text", "text": "a"}, IMAGE, {"type": "image_url", "image_url": {"url": 5}}),
        "messages[0].content[2].image_url.url",
    ),
    (image(url=""), f"{PART}.image_url.url"),
    (image(url=["a"]), f"{PART}.image_url.url"),
    (image(url="data:\ud800"), f"{PART}.image_url.url"),
    (image(detail="medium"), f"{PART}.image_url.detail"),
    (image(detail=1), f"{PART}.image_url.detail"),
    (image(min_pixels=0), f"{PART}.image_url.min_pixels"),
    (image(max_pixels=-1), f"{PART}.image_url.max_pixels"),
    (image(max_pixels=2**31), f"{PART}.image_url.max_pixels"),
    (image(max_pixels="1000"), f"{PART}.image_url.max_pixels"),
    (image(max_pixels=True), f"{PART}.image_url.max_pixels"),
    (image(max_pixels=1e3), f"{PART}.image_url.max_pixels"),
    (image(max_pixel=math.nan), f"{PART}.image_url.max_pixel"),
    (image(min_pixels=2, max_pixels=1), f"{PART}.image_url.min_pixels"),
    (image(min_pixel=2, max_pixel=1), f"{PART}.image_url.min_pixel"),
    (image(min_pixel=2, min_pixels=1), f"{PART}.image_url.min_pixel"),
    (image(max_pixel=2, max_pixels=1), f"{PART}.image_url.max_pixel"),
    (request({"type": "video_url"}), f"{PART}.video_url"),
    (request({"type": "video_url", "video_url": 5}), f"{PART}.video_url"),
    (request({"type": "video_url", "video_url": ""}), f"{PART}.video_url"),
    (request({"type": "input_video"}), f"{PART}.input_video"),
    (request({"type": "input_video", "input_video": "AAAA"}), f"{PART}.input_video"),
    (request({"type": "input_video", "input_video": {}}), f"{PART}.input_video.url"),
    (request({"type": "input_video", "input_video": {"data": ""}}), f"{PART}.input_video.data"),
    (request({"type": "input_video", "input_video": {"data": 5}}), f"{PART}.input_video.data"),
    (request({"type": "input_video", "input_video": {"data": "A", "url": "b"}}), f"{PART}.input_video.data"),
    (request({"type": "input_video", "input_video": {"data": "A", "fps": 0}}), f"{PART}.input_video.fps"),
    (
        request({"type": "input_video", "input_video": {"data": "A", "fps": 1, "num_frames": 2}}),
        f"{PART}.input_video.num_frames",
    ),
    (request({"type": "input_video", "input_video": {"data": "A"}, "video_url": "b"}), f"{PART}.video_url"),
    (request({"type": "video_url", "video_url": {"fps": 1}}), f"{PART}.video_url.url"),
    (video(url=5), FRAME),
    (video(url=""), FRAME),
    (video(url={"url": "a"}), FRAME),
    (video(url=[]), FRAME),
    (video(url=["a"] * 4097), FRAME),
    (request({"type": "file", "file": {"file_data": JPEG_FRAMES + "," * 4097}}), f"{PART}.file.file_data"),
    (request({"type": "file", "file": {}}), f"{PART}.file.file_data"),
    (request({"type": "file", "file": {"filename": "a.pdf"}}), f"{PART}.file.file_data"),
    *(
        (request({"type": "file", "file": {"file_data": PDF_FILE, "pages": pages}}), f"{PART}.file.pages")
        for pages in ("", "0", "1,", "2-1", "a", "1-2-3", "1" * 8, "٣", 7)
    ),
    (video(url=["a", ""]), f"{FRAME}[1]"),
    (video(url=["a", 5]), f"{FRAME}[1]"),
    (video(url=["a", None]), f"{FRAME}[1]"),
    (video(url=["a", {}]), f"{FRAME}[1].url"),
    (video(url=["a", {"url": ""}]), f"{FRAME}[1].url"),
    (video(url=["a", {"url": "b", "max_pixels": 9}]), f"{FRAME}[1]"),
    (video(url=[{"type": "image_url", "image_url": "a"}]), f"{FRAME}[0].image_url"),
    (video(url=[{"type": "image_url", "image_url": {"url": ""}}]), f"{FRAME}[0].image_url.url"),
    (video(url=[{"type": "image_url", "image_url": {"url": "a", "detail": "low"}}]), f"{FRAME}[0].image_url"),
    (video(url=[{"type": "text", "image_url": {"url": "a"}}]), f"{FRAME}[0].type"),
    (video(fps=0), f"{PART}.video_url.fps"),
    (video(fps=-1), f"{PART}.video_url.fps"),
    (video(fps=1001), f"{PART}.video_url.fps"),
    (video(fps=math.nan), f"{PART}.video_url.fps"),
    (video(fps=math.inf), f"{PART}.video_url.fps"),
    (video(fps="2"), f"{PART}.video_url.fps"),
    (video(fps=True), f"{PART}.video_url.fps"),
    (video(num_frames=0), f"{PART}.video_url.num_frames"),
    (video(num_frames=2.5), f"{PART}.video_url.num_frames"),
    (video(num_frames=4, fps=1), f"{PART}.video_url.num_frames"),
    (video(["a", "b"], num_frames=2), f"{PART}.video_url.num_frames"),
    (video(total_pixels=0), f"{PART}.video_url.total_pixels"),
    (video(min_pixels=2, max_pixels=1), f"{PART}.video_url.min_pixels"),
    (request(model=""), "model"),
    (request(model=5), "model"),
    (request(model="m" * 257), "model"),
    (request(stream="true"), "stream"),
    (request(stream=1), "stream"),
    (request(stream_options={"include_usage": True}), "stream_options"),
    (request(stream=True, stream_options=True), "stream_options"),
    (request(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
    (request(max_tokens=5, max_completion_tokens=6), "max_tokens"),
    (request(max_tokens=5, min_tokens=6), "min_tokens"),
    (request(max_completion_tokens=5, min_tokens=6), "min_tokens"),
    (request(top_logprobs=2), "top_logprobs"),
    (request(top_logprobs=2, logprobs=False), "top_logprobs"),
    (request(top_logprobs=21, logprobs=True), "top_logprobs"),
    (request(logprobs=1), "logprobs"),
    (request(logprobs="true"), "logprobs"),
    (request(logit_bias=[]), "logit_bias"),
    (request(logit_bias={"a": 1}), "logit_bias"),
    (request(logit_bias={"-1": 1}), "logit_bias"),
    (request(logit_bias={"01": 1}), "logit_bias"),
    (request(logit_bias={"1.0": 1}), "logit_bias"),
    (request(logit_bias={"\N{ARABIC-INDIC DIGIT ONE}": 1}), "logit_bias"),
    (request(logit_bias={"": 1}), "logit_bias"),
    (request(logit_bias={"\ud800": 1}), "logit_bias"),
    (request(logit_bias={"1" * 11: 1}), "logit_bias"),
    (request(logit_bias={"1": 101}), "logit_bias.1"),
    (request(logit_bias={"1": -100.5}), "logit_bias.1"),
    (request(logit_bias={"1": math.nan}), "logit_bias.1"),
    (request(logit_bias={"1": "1"}), "logit_bias.1"),
    (request(logit_bias={"1": True}), "logit_bias.1"),
    (request(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias"),
    (request(stop=""), "stop"),
    (request(stop=5), "stop"),
    (request(stop={}), "stop"),
    (request(stop=["a", ""]), "stop[1]"),
    (request(stop=["a", 5]), "stop[1]"),
    (request(stop=["a"] * 17), "stop"),
    (request(stop="a" * 257), "stop"),
    (request(stop=["\ud800"]), "stop[0]"),
    (request(stop_token_ids=5), "stop_token_ids"),
    (request(stop_token_ids=[-1]), "stop_token_ids[0]"),
    (request(stop_token_ids=[1, True]), "stop_token_ids[1]"),
    (request(stop_token_ids=[1] * 1025), "stop_token_ids"),
    (request(ignore_eos="yes"), "ignore_eos"),
    (request(skip_special_tokens=0), "skip_special_tokens"),
    (request(no_repeat_ngram_size=-1), "no_repeat_ngram_size"),
    (request(vllm_xargs=[1]), "vllm_xargs"),
    (request(vllm_xargs={"ngram_size": "20"}), "vllm_xargs.ngram_size"),
    (request(vllm_xargs={"window_size": 0}), "vllm_xargs.window_size"),
    (request(vllm_xargs={"whitelist_token_ids": [-1]}), "vllm_xargs.whitelist_token_ids[0]"),
    (request(vllm_xargs={"ngram_size": 20}, no_repeat_ngram_size=3), "vllm_xargs"),
    (request(include_stop_str_in_output=1), "include_stop_str_in_output"),
    (request(repetition_penalty=0), "repetition_penalty"),
    (request(repetition_penalty=1e-300), "repetition_penalty"),
    (request(top_p=-0.1), "top_p"),
    (request(guided_json=[1]), "guided_json"),
    (request(guided_json="{"), "guided_json"),
    (request(guided_json="[" * 50_000), "guided_json"),
    (request(guided_json="[1]"), "guided_json"),
    (request(guided_json=" " * 70_000), "guided_json"),
    (request(guided_json={"a": math.nan}), "guided_json"),
    (request(guided_regex=5), "guided_regex"),
    (request(guided_regex=""), "guided_regex"),
    (request(guided_regex="a" * 1025), "guided_regex"),
    (request(guided_regex="\ud800"), "guided_regex"),
    (request(guided_choice="a"), "guided_choice"),
    (request(guided_choice=[]), "guided_choice"),
    (request(guided_choice=["a", ""]), "guided_choice[1]"),
    (request(guided_choice=["a"] * 1025), "guided_choice"),
    (request(structured_outputs={}), "structured_outputs"),
    (request(structured_outputs={"regex": None, "json_object": False}), "structured_outputs"),
    (request(structured_outputs={"json": 5}), "structured_outputs.json"),
    (request(structured_outputs={"regex": "a", "foo": 5}), "structured_outputs.foo"),
    (request(structured_outputs={"regex": "a", "choice": ["b"]}), "structured_outputs.choice"),
    (request(coordinates="pixels"), "coordinates"),
    (request(coordinates="original", logprobs=True), "logprobs"),
]


@cases(("data", "param"), BAD)
def test_invalid_request_names_the_field(data, param):
    error = rejection_of(data)
    assert isinstance(error, InvalidParameter)
    assert error.param == param
    assert param is None or param.rpartition(".")[2] in error.message
    assert len(error.message) < 400


UNSUPPORTED = [
    *((request(**{name: value}), name) for name in REJECTED_FIELDS for value in [{"type": "odd"}, ["odd"], "odd", 7]),
    (request(store=True), "store"),
    *(
        (request(structured_outputs={"regex": "a", name: value}), f"structured_outputs.{name}")
        for name, value in (
            ("grammar", 'root ::= "a"'),
            ("structural_tag", {"type": "structural_tag"}),
            ("whitespace_pattern", " "),
            ("disable_any_whitespace", True),
            ("disable_additional_properties", True),
        )
    ),
    (request(modalities=["text", "audio"]), "modalities"),
    (request(service_tier="flex"), "service_tier"),
    (request({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}), f"{PART}.type"),
    (request({"type": "audio_url", "audio_url": {"url": "https://example.com/a.wav"}}), f"{PART}.type"),
    (request({"type": "file", "file": {"file_id": "a"}}), f"{PART}.file.file_id"),
    (request({"type": "file", "file": {"file_id": "a", "format": "video/mp4"}}), f"{PART}.file.file_id"),
    (request({"type": "file", "file": {"file_data": "data:text/plain;base64,JVBE"}}), f"{PART}.file.file_data"),
    (request({"type": "file", "file": {"file_data": "JVBE", "filename": "a.docx"}}), f"{PART}.file.file_data"),
    (request({"type": "file", "file": {"file_url": "https://example.com/a.txt"}}), f"{PART}.file.file_url"),
    (request({"type": "file", "file": {"file_data": PDF_FILE}, "uuid": "a"}), f"{PART}.uuid"),
    (request({"type": "file", "file": {"file_data": PDF_FILE, "file_id": "a"}}), f"{PART}.file.file_id"),
    (
        request({"type": "file", "file": {"file_data": PDF_FILE, "file_url": "https://a.org/a.pdf"}}),
        f"{PART}.file.file_url",
    ),
    (request({"type": "file", "file": {"file_data": PDF_FILE, "render": "text", "dpi": 72}}), f"{PART}.file.dpi"),
    (
        request({"type": "file", "file": {"file_data": PDF_FILE, "render": "text", "max_pixels": 9000}}),
        f"{PART}.file.max_pixels",
    ),
    (request({"type": "file", "file": {"file_data": IMAGE_FILE, "pages": "1"}}), f"{PART}.file.pages"),
    (
        request({"type": "file", "file": {"file_data": "AAAA", "filename": "a.mp4", "detail": "low"}}),
        f"{PART}.file.detail",
    ),
    (
        request({"type": "file", "file": {"file_data": VIDEO_FILE, "video_metadata": {"start_offset": "1s"}}}),
        f"{PART}.file.video_metadata",
    ),
    (message("assistant", content="a", function_call={"name": "f", "arguments": ""}), "messages[0].function_call"),
    (message("assistant", audio={"id": "a"}, content="a"), "messages[0].audio"),
]


@cases(("data", "param"), UNSUPPORTED)
def test_unsupported_value_is_rejected_by_name(data, param):
    error = rejection_of(data)
    assert isinstance(error, UnsupportedParameter)
    assert error.param == param
    assert error.message.endswith(".")


def test_error_states_next_step():
    error = rejection_of(request({"type": "image_url", "image_url": 5}))
    assert error.message == (
        '`messages[0].content[0].image_url` must be a string or an object; got 5. Write "image_url": {"url": "..."}.'
    )
    assert rejection_of(request(temperature=3)).message == "`temperature` must be at most 2; got 3."
    assert rejection_of(request(temperature=math.nan)).message == "`temperature` must be a finite number; got nan."
    assert rejection_of(request(seed=10**400)).message.endswith("; got a huge number.")
    assert rejection_of(request(stream=1)).message == "`stream` must be true or false; got 1."
    assert rejection_of(request(best_of=3)).message == (
        "`best_of` is not supported, got 3. Completions are not ranked. Use `n`."
    )


def test_error_does_not_echo_long_input():
    url = "A" * 1_000_000
    assert len(rejection_of(request({"type": "image_url", "image_url": {"url": "a", "detail": url}})).message) < 300
    assert len(rejection_of(request(logit_bias={url: 1})).message) < 300


def test_validation_stops_at_first_error():
    """Validation of a list stops at its first error; for two million errors, pydantic would keep gigabytes."""
    for wrong in (lambda items: {"messages": items}, video, lambda items: request(*items)):
        one, many = count_errors(wrong([5])), count_errors(wrong([5] * 10_000))
        assert many == one
        rejection_of(wrong([5] * 1_000_000))


def count_errors(data):
    """Return the number of errors found by pydantic."""
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(data)
    return caught.value.error_count()


@pytest.mark.slow
def test_deep_nesting_is_rejected_safely():
    deep: object = []
    for _ in range(100_000):
        deep = [deep]
    for data in [
        deep,
        {"messages": deep},
        request(tools=deep),
        request(stop=deep),
        request({"type": "text", "text": deep}),
    ]:
        rejection_of(data)
    parsed = ChatRequest.parse(request(unknown=deep))
    assert parsed.template_messages() == [{"role": "user", "content": "Hello"}]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec=None)), inner, max_size=4),
    max_leaves=10,
)
KNOWN = sorted(
    ChatRequest.model_fields.keys() | REJECTED_FIELDS.keys() | {"url", "type", "role", "content", "text", "function"}
)
WORDS = st.sampled_from(
    ["user", "assistant", "text", "image_url", "video_url", "input_video", "refusal", "", "auto", "none"]
)
PART_KEYS = ["image_url", "video_url", "input_video", "data", "fps", "detail", "1"]
NEAR = st.recursive(
    JSON | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KNOWN, *PART_KEYS]), inner, max_size=5)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.one_of(JSON, NEAR), st.dictionaries(st.sampled_from(KNOWN), NEAR, max_size=3), NEAR, NEAR)
@example([], {}, {"type": "video_url", "video_url": {"url": [{"image_url": None}]}}, None)
def test_only_request_errors_are_raised(anything, fields, part, content):
    for data in [
        anything,
        request(part, **fields),
        message("user", content=content),
        message("assistant", content=[part]),
    ]:
        check_parse(data)


def check_parse(data):
    try:
        parsed = ChatRequest.parse(data)
    except RequestError as error:
        error.message.encode()
        return
    contents = [turn["content"] for turn in parsed.template_messages() if isinstance(turn["content"], list)]
    assert len(parsed.media()) == sum(part["type"] != "text" for content in contents for part in content)
    assert isinstance(parsed.sampling(), Sampling)
