"""Structured answers of the bundled model: every one is what was asked for, whoever shares its batch."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.errors import InvalidParameter, UnsupportedParameter
from dashinfer_vlm_core.protocol.sampling import SAMPLING_PARAMETERS
from dashinfer_vlm_core.testing import scripted_engine
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


def follow(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "scene", "schema": schema}}}


def ask(engine, **fields):
    return engine.chat({"messages": MESSAGES, "seed": 1, **fields}).choices[0]


def streamed(engine, **fields):
    chunks = [chunk.choices[0] for chunk in engine.stream({"messages": MESSAGES, "seed": 1, "stream": True, **fields})]
    return "".join(choice.delta.content or "" for choice in chunks), chunks[-1].finish_reason


def check_schemas(engine, seeds):
    """Each schema alone and beside others, at a temperature where the model rambles."""

    def check(seed):
        schema = random_schema(seed)
        choice = ask(engine, **follow(schema), seed=seed, temperature=1.5)
        assert choice.finish_reason == "stop", (seed, choice)
        jsonschema.validate(json.loads(choice.message.content), schema)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, seeds))


@pytest.mark.slow
def test_answers_follow_random_schemas(engine):
    check_schemas(engine, range(60))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_answers_follow_many_random_schemas(engine):
    check_schemas(engine, range(60, 300))


@pytest.mark.parametrize("form", [follow(SCENE), JSON, follow({"type": "array", "items": {"type": "number"}})])
def test_streamed_is_plain(engine, form):
    choice = ask(engine, **form, max_tokens=60)
    assert streamed(engine, **form, max_tokens=60) == (choice.message.content, choice.finish_reason)


def test_guided_and_free_answers_do_not_disturb_each_other(engine):
    requests = [follow(SCENE), {}, JSON | {"max_tokens": 40}, {"logprobs": True, "top_logprobs": 2}, {"temperature": 0}]
    alone = [ask(engine, **request) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda request: ask(engine, **request), requests))
    assert together == alone


def test_an_answer_cut_short_says_length(engine):
    choice = ask(engine, **follow(SCENE), max_tokens=5)
    assert choice.finish_reason == "length"
    assert choice.message.content.startswith("{")


@pytest.mark.parametrize(
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
    ids=str,
)
def test_options_of_sampling_cannot_break_the_format(engine, options):
    """Not even a bias of 100 for the end, nor 30 tokens at least of an answer that the schema ends before."""
    choice = ask(engine, **follow(SCENE), **options)
    jsonschema.validate(json.loads(choice.message.content), SCENE)
    assert choice.finish_reason == "stop"


def test_log_probabilities_are_those_of_the_model(engine):
    """What the grammar bars still counts: a token that it forces may be very unlikely."""
    schema = {"const": "zebra"}
    choice = ask(engine, **follow(schema), temperature=0, logprobs=True, top_logprobs=3)
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content == '"zebra"'
    first = choice.logprobs.content[0]
    assert first.logprob < first.top_logprobs[0].logprob
    assert first.token not in {other.token for other in first.top_logprobs[:1]}


def test_a_stop_string_ends_a_guided_answer(engine):
    choice = ask(engine, **follow({"const": {"a": 1, "b": 2}}), stop=['"b"'])
    assert (choice.message.content, choice.finish_reason) == ('{"a":1,', "stop")


def test_an_end_that_is_ignored_contradicts_a_format(engine):
    with pytest.raises(InvalidParameter) as caught:
        ask(engine, **JSON, ignore_eos=True)
    assert caught.value.param == "ignore_eos"


def test_a_decoder_without_masks_refuses_formats_by_name():
    with scripted_engine("{}", supported_params=SAMPLING_PARAMETERS) as engine:
        for form in (JSON, follow(SCENE)):
            with pytest.raises(UnsupportedParameter) as caught:
                ask(engine, **form)
            assert caught.value.param == "response_format"
        assert ask(engine, response_format={"type": "text"}).message.content == "{}"


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
def test_after_a_hostile_schema_the_next_request_works(engine, schema):
    try:
        outcome = ask(engine, **follow(schema), max_tokens=30).finish_reason
    except InvalidParameter as error:
        outcome = error.param
    assert outcome in {"stop", "length", "response_format.json_schema.schema"}
    assert json.loads(ask(engine, **follow(SCENE)).message.content)
