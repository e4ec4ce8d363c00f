"""Structured output of the bundled model: every response matches its format in any batch."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.errors import InvalidParameter, UnsupportedParameter
from dashinfer_vlm_core.protocol.sampling import SAMPLING_PARAMETERS
from dashinfer_vlm_core.testing import scripted_engine
from tests.cases import cases
from tests.samples import image_url
from tests.schemas import random_schema

MESSAGES = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": image_url()}},
            {"type": "text", "text": "What is in the picture?"},
        ],
    }
]
SCENE = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "shape": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 20},
    },
    "required": ["colour", "shape", "count"],
}
JSON = {"response_format": {"type": "json_object"}}


@pytest.fixture(scope="module")
def engine():
    with Engine(EngineConfig()) as engine:
        yield engine


def schema_request(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "scene", "schema": schema}}}


def complete(engine, **fields):
    return engine.chat({"messages": MESSAGES, "seed": 1, **fields}).choices[0]


def complete_streamed(engine, **fields):
    chunks = [chunk.choices[0] for chunk in engine.stream({"messages": MESSAGES, "seed": 1, "stream": True, **fields})]
    return "".join(choice.delta.content or "" for choice in chunks), chunks[-1].finish_reason


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_output_follows_random_schemas(engine):
    """Check each schema in a batch, at a temperature with erratic output."""

    def check(seed):
        schema = random_schema(seed)
        choice = complete(engine, **schema_request(schema), seed=seed, temperature=1.5)
        assert choice.finish_reason == "stop", (seed, choice)
        jsonschema.validate(json.loads(choice.message.content), schema)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, range(180)))


@pytest.mark.parametrize(
    "form", [schema_request(SCENE), JSON, schema_request({"type": "array", "items": {"type": "number"}})]
)
def test_streamed_equals_plain(engine, form):
    choice = complete(engine, **form, max_tokens=60)
    assert complete_streamed(engine, **form, max_tokens=60) == (choice.message.content, choice.finish_reason)


def test_guided_and_free_requests_are_independent(engine):
    requests = [
        schema_request(SCENE),
        {},
        JSON | {"max_tokens": 40},
        {"logprobs": True, "top_logprobs": 2},
        {"temperature": 0},
    ]
    alone = [complete(engine, **request) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda request: complete(engine, **request), requests))
    assert together == alone


def test_truncated_output_has_finish_reason_length(engine):
    choice = complete(engine, **schema_request(SCENE), max_tokens=5)
    assert choice.finish_reason == "length"
    assert choice.message.content.startswith("{")


@cases(
    "options",
    [
        {"temperature": 0},
        {"top_k": 1},
        {"top_p": 0.1},
        {"min_tokens": 30},
        {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 2.0},
        {"logit_bias": {"756": 100}},
        {"temperature": 2.0, "seed": 7},
    ],
)
def test_sampling_options_cannot_break_format(engine, options):
    """Not even a bias of 100 for the end token, nor min_tokens of 30 where the schema ends earlier."""
    choice = complete(engine, **schema_request(SCENE), **options)
    jsonschema.validate(json.loads(choice.message.content), SCENE)
    assert choice.finish_reason == "stop"


def test_logprobs_are_before_the_mask(engine):
    """Masked tokens still count: a token forced by the grammar may be very unlikely."""
    schema = {"const": "zebra"}
    choice = complete(engine, **schema_request(schema), temperature=0, logprobs=True, top_logprobs=3)
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content == '"zebra"'
    first = choice.logprobs.content[0]
    assert first.logprob < first.top_logprobs[0].logprob
    assert first.token not in {other.token for other in first.top_logprobs[:1]}


@pytest.mark.supports("structured-output", backend="torch-cpu")
def test_stop_string_ends_guided_output(engine):
    choice = complete(engine, **schema_request({"const": {"a": 1, "b": 2}}), stop=['"b"'])
    assert (choice.message.content, choice.finish_reason) == ('{"a":1,', "stop")


def test_ignore_eos_with_format_is_rejected(engine):
    with pytest.raises(InvalidParameter) as caught:
        complete(engine, **JSON, ignore_eos=True)
    assert caught.value.param == "ignore_eos"


def test_decoder_without_masks_rejects_formats():
    with scripted_engine("{}", supported_params=SAMPLING_PARAMETERS) as engine:
        for form in (JSON, schema_request(SCENE)):
            with pytest.raises(UnsupportedParameter) as caught:
                complete(engine, **form)
            assert caught.value.param == "response_format"
        assert complete(engine, response_format={"type": "text"}).message.content == "{}"


HOSTILE = [
    {"type": "string", "pattern": "(" * 500 + "a" + "+)+" * 250},
    {"type": "string", "pattern": "((a{1,100}){1,100}){1,100}b"},
    {"type": "object", "properties": {name: {"$ref": "#"} for name in "abcdefgh"}},
    {"enum": [str(index) for index in range(9000)]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}},
    {"type": "array", "items": {"type": "array", "items": {"type": "array", "items": {"type": "null"}}}},
]


@pytest.mark.parametrize("schema", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.timeout(300)
def test_next_request_works_after_hostile_schema(engine, schema):
    try:
        outcome = complete(engine, **schema_request(schema), max_tokens=30).finish_reason
    except InvalidParameter as error:
        outcome = error.param
    assert outcome in {"stop", "length", "response_format.json_schema.schema"}
    assert json.loads(complete(engine, **schema_request(SCENE)).message.content)


# vLLM's fields

COLORS = ["red", "red and blue", "blau/grün", 'a "quoted" one']


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": SCENE},
        {"guided_json": json.dumps(SCENE)},
        {"structured_outputs": {"json": SCENE}},
        {"structured_outputs": {"json": json.dumps(SCENE)}},
    ],
    ids=["object", "text", "structured_outputs", "text in structured_outputs"],
)
def test_guided_json_equals_response_format(engine, fields):
    assert complete(engine, **fields) == complete(engine, **schema_request(SCENE))


@cases("seed", range(3))
@cases("name", ["guided_choice", "structured_outputs"])
def test_guided_choice_returns_one_of_the_choices(engine, name, seed):
    fields = {"guided_choice": COLORS} if name == "guided_choice" else {"structured_outputs": {"choice": COLORS}}
    choice = complete(engine, **fields, seed=seed, temperature=2.0)
    assert (choice.message.content in COLORS, choice.finish_reason) == (True, "stop")


PATTERNS = [
    r"[0-9]{4}-[0-9]{2}",
    r"^(red|blue)/\d{1,4}$",
    r"[^\n]{3}\n[a-c]{1,5}!",
    r"\\ [\"']",
    r"(?:yes|no)\.",
    "a\nb",
]


@cases("pattern", PATTERNS)
@cases("name", ["guided_regex", "structured_outputs"])
def test_guided_regex_matches_the_whole_completion(engine, name, pattern):
    fields = {"guided_regex": pattern} if name == "guided_regex" else {"structured_outputs": {"regex": pattern}}
    choice = complete(engine, **fields, temperature=1.5)
    assert re.fullmatch(pattern, choice.message.content), choice
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("pattern", ["(", "(?=a)a", r"(a)\1", "a\\", r"a\\\\\\"[:-1]])
def test_unsupported_regex_is_rejected(engine, pattern):
    for fields, param in (
        ({"guided_regex": pattern}, "guided_regex"),
        ({"structured_outputs": {"regex": pattern}}, "structured_outputs.regex"),
    ):
        with pytest.raises(InvalidParameter) as caught:
            complete(engine, **fields)
        assert caught.value.param == param
        assert param in caught.value.message


@pytest.mark.parametrize(
    "fields", [{"guided_regex": "a"}, {"guided_choice": ["a"]}, {"structured_outputs": {"json_object": True}}], ids=str
)
def test_decoder_without_masks_rejects_guided_fields(fields):
    with scripted_engine("a", supported_params=SAMPLING_PARAMETERS) as engine:
        with pytest.raises(UnsupportedParameter) as caught:
            complete(engine, **fields)
        assert caught.value.param == next(iter(fields))


def test_guided_choice_with_optional_tool():
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {}}}}
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    with scripted_engine("red", call) as engine:
        fields = {"guided_choice": ["red", "blue"], "tools": [tool]}
        assert complete(engine, **fields).message.content == "red"
        assert complete(engine, **fields).message.tool_calls[0].function.name == "look"
