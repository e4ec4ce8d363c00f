"""Coordinates in pixels of the original image: converted in prompts, responses, schemas and tool calls."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashinfer_vlm_core import Engine, EngineConfig, ImageCoordinates
from dashinfer_vlm_core.errors import InvalidParameter
from dashinfer_vlm_core.models.coordinates import NAMES, CoordinateSpec, CoordinateStream
from dashinfer_vlm_core.structured_output.coordinate_schema import with_model_coordinates
from dashinfer_vlm_core.structured_output.grammar.rules import Steps
from dashinfer_vlm_core.structured_output.grammar.schema_shape import SchemaError
from dashinfer_vlm_core.testing import Script, scripted_registry
from tests.cases import cases
from tests.conversations import as_openai, blurred_image, user

IMAGE = ImageCoordinates(source_size=(300, 200), extent=(1000, 1000))
SIZE = (300, 200)
WORDS = "Where is the star?"


# Conversions


@pytest.mark.parametrize(
    ("spec", "extent"),
    [
        (CoordinateSpec(extent=1000, pairs=True), (1000, 1000)),
        (CoordinateSpec(extent=1000), (1000, 1000)),
        (CoordinateSpec(extent=None), (140, 84)),
    ],
    ids=["Qwen2-VL", "Qwen3-VL", "Qwen2.5-VL"],
)
def test_extent_of_families(spec, extent):
    image = spec.for_image((300, 200), (140, 84))
    assert (image.source_size, image.extent, image.pairs) == (SIZE, extent, spec.pairs)
    assert image.to_original((*extent, 0, 0)) == (300, 200, 0, 0)
    assert image.to_model((300, 200)) == extent
    assert max(extent) <= spec.maximum


def test_coordinates_are_rounded_and_limited_to_the_image():
    assert IMAGE.to_original((333, 333)) == (100, 67)
    assert IMAGE.to_original((-5, 2000.5)) == (0, 200)
    assert IMAGE.to_model((1, 1)) == (3, 5)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 5000), st.integers(0, 5000))
def test_round_trip_is_exact_within_one_step_of_the_model(width, height, x, y):
    image = ImageCoordinates(source_size=(width, height), extent=(1000, 1000))
    point = min(x, width), min(y, height)
    back = image.to_original(image.to_model(point))
    assert abs(back[0] - point[0]) <= width / 2000 + 1
    assert abs(back[1] - point[1]) <= height / 2000 + 1


NOTATIONS = [
    ('{"bbox_2d": [100, 200, 500, 1000], "label": "star"}', '{"bbox_2d": [30, 40, 150, 200], "label": "star"}'),
    (
        '```json\n[\n\t{"bbox_2d": [\n  0,\n  0,\n  10,\n  15\n]}]',
        '```json\n[\n\t{"bbox_2d": [\n  0,\n  0,\n  3,\n  3\n]}]',
    ),
    ("{'point_2d':[500,500]}", "{'point_2d':[150,100]}"),
    ('{"action": "click", "coordinate": [500.5, 1000]}', '{"action": "click", "coordinate": [150, 200]}'),
    ('<p data-bbox="0 0 1000 1000">', '<p data-bbox="0 0 300 200">'),
    ("the star(100,200),(500,1000)", "the star(30,40),(150,200)"),
    ("at (100, 200).", "at (30, 40)."),
]
UNCHANGED = [
    "12, 13 and [100, 200, 500, 1000]",
    '{"count": [1, 2], "bbox_2d": null}',
    '{"bbox_2d": [1, 2, 3]}',
    '{"bbox_2d": ["1", "2"]}',
    "(1,2,3) or (1) or (a,b) or ()",
    "(12345678,1)",
    '"bbox_2d", [1, 2]',
]


@cases(("text", "expected"), NOTATIONS)
def test_notations_are_found_in_text(text, expected):
    assert IMAGE.text_to_original(text) == expected


@cases("name", NAMES)
def test_every_name_is_converted_in_both_directions(name):
    assert IMAGE.text_to_original(f'"{name}": [500, 500]') == f'"{name}": [150, 100]'
    assert IMAGE.text_to_model(f'"{name}": [150, 100]') == f'"{name}": [500, 500]'


@cases("text", UNCHANGED)
def test_other_text_is_unchanged(text):
    assert IMAGE.text_to_original(text) == text


def test_pairs_are_converted_only_for_models_that_write_them():
    image = CoordinateSpec(extent=1000).for_image(SIZE, SIZE)
    assert image.text_to_original('(500,500) "point": [500,500]') == '(500,500) "point": [150,100]'


FRAGMENTS = [
    *(text for text, _ in NOTATIONS),
    *UNCHANGED,
    *(text[: len(text) // 2] for text, _ in NOTATIONS),
    *'"([],:)0 \n=-.',
    "data-bbox=",
    '"bbox_2d"',
    "It is there.",
]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=8), st.lists(st.integers(0, 200), max_size=30), st.booleans())
def test_streamed_conversion_equals_conversion_of_the_whole(fragments, cuts, pairs):
    image = ImageCoordinates(source_size=(300, 200), extent=(1000, 1000), pairs=pairs)
    text, stream = "".join(fragments), CoordinateStream(image)
    ends = [*sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    assert "".join(map(stream.feed, pieces)) + stream.flush() == image.text_to_original(text)


def test_stream_holds_back_only_what_may_become_coordinates():
    stream = CoordinateStream(IMAGE)
    assert stream.feed("It is at (5") == "It is at "
    assert stream.feed("00,500)") == "(150,100)"
    assert stream.feed(" (see below") == " (see below"
    assert stream.feed(' "label') == " "
    assert stream.feed('": 5') == '"label": 5'


# Schemas


def test_schema_has_coordinates_of_the_model():
    pixels = {"type": "array", "items": {"type": "integer", "maximum": 300}, "minItems": 4, "maxItems": 4}
    model = {"type": "integer", "minimum": 0, "maximum": 1000}
    box = {"type": "array", "items": model, "minItems": 4, "maxItems": 4}
    point = {"type": "array", "items": model, "minItems": 2, "maxItems": 2}
    schema = {
        "$defs": {"Box": pixels},
        "type": "array",
        "items": {
            "properties": {
                "bbox_2d": pixels,
                "box": {"$ref": "#/$defs/Box"},
                "bbox": {"anyOf": [pixels, {"type": "null"}]},
                "point_2d": {"type": "array", "prefixItems": [{"type": "number"}] * 2, "items": False},
                "point": {"type": "string", "maxLength": 5},
                "label": {"enum": [{"properties": {"box": pixels}}]},
                "score": pixels,
            },
            "required": ["bbox_2d"],
        },
    }
    properties = with_model_coordinates(schema, 1000, Steps())["items"]["properties"]
    assert properties == schema["items"]["properties"] | {
        "bbox_2d": box,
        "box": box,
        "bbox": {"anyOf": [box, {"type": "null"}]},
        "point_2d": point,
    }


@cases(
    "schema",
    [
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "array"}},
        {"type": "array", "minItems": 5},
        {"type": "array", "maxItems": 3},
        {"type": "array", "minItems": "4"},
        {"type": "array", "items": 4},
    ],
)
def test_box_that_is_not_four_numbers_is_rejected(schema):
    with pytest.raises(SchemaError) as caught:
        with_model_coordinates({"properties": {"box": schema}}, 1000, Steps())
    assert caught.value.path.startswith("properties.box")


@pytest.mark.parametrize(
    "definition",
    [{"anyOf": [{"$ref": "#/$defs/a"}]}, {"type": "object", "properties": {"box": {"$ref": "#/$defs/a"}}}],
    ids=["alternatives", "objects"],
)
def test_security_35_recursive_definitions_of_a_box_end(definition):
    schema = {"properties": {"box": {"$ref": "#/$defs/a"}}, "$defs": {"a": definition}}
    assert with_model_coordinates(schema, 1000, Steps())["$defs"].keys() == {"a"}


def test_security_35_definitions_of_a_box_that_multiply_are_rejected():
    definitions = {f"a{index}": {"anyOf": [{"$ref": f"#/$defs/a{index + 1}"}] * 20} for index in range(6)}
    with pytest.raises(SchemaError, match="makes the request too complex"):
        with_model_coordinates({"properties": {"box": {"$ref": "#/$defs/a0"}}, "$defs": definitions}, 1000, Steps())


# Requests


@contextmanager
def scripted(checkpoint, *responses, **options):
    script = Script(*responses)
    config = EngineConfig(model=str(checkpoint), decoder="scripted", **options)
    with Engine(config, registry=scripted_registry(script)) as engine:
        yield engine, script


def request(*parts, **fields):
    messages = as_openai([user(*(parts or (blurred_image(1, *SIZE), WORDS)))])
    return {"messages": messages, "coordinates": "original", **fields}


def stream_text(engine, body):
    chunks = engine.stream({**body, "stream": True})
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


RESPONSES = [text for text, _ in NOTATIONS] + ["It is at (500,", "(", '{"bbox_2d": [1, 2']


@pytest.mark.slow
def test_response_has_pixels_of_the_original(tiny_checkpoint):
    with scripted(tiny_checkpoint, *(response for response in RESPONSES for _ in range(5))) as (engine, _):
        for response in RESPONSES:
            content = engine.chat(request()).choices[0].message.content
            assert content == IMAGE.text_to_original(response)
            assert stream_text(engine, request()) == content
            assert engine.chat(request(coordinates="model")).choices[0].message.content == response
            choices = engine.chat(request(n=2)).choices
            assert [choice.message.content for choice in choices] == [content] * 2


def test_prompt_has_coordinates_of_the_model(tiny_checkpoint):
    call = {"name": "click", "arguments": '{"coordinate": [150, 100]}'}
    body = request()
    body["messages"][0]["content"][1]["text"] = "What is at (30,40),(150,200)?"
    body["messages"] += [
        {
            "role": "assistant",
            "content": "A star(150,100)",
            "tool_calls": [{"id": "a", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": '{"point": [300, 200]}'}]},
    ]
    body["messages"].insert(0, {"role": "system", "content": "Write (150,100)."})
    with scripted(tiny_checkpoint, "Yes.") as (engine, script):
        engine.chat(body)
        engine.chat({**body, "coordinates": "model"})
        converted, unchanged = (asyncio.run(engine.adecode(item.token_ids.tolist())) for item in script.requests)
        assert asyncio.run(engine.atokenize(body)) == script.requests[0].token_ids.tolist()
        assert engine.preview(body).prompt_tokens == len(script.requests[0].token_ids)
    for text in (
        "(100,200),(500,1000)?",
        "A star(500,500)",
        "[500, 500]",
        '{"point": [1000, 1000]}',
        "Write (150,100).",
    ):
        assert text in converted
    for text in ("(30,40),(150,200)?", "A star(150,100)", "[150, 100]", '{"point": [300, 200]}', "Write (150,100)."):
        assert text in unchanged


BOX = {
    "type": "object",
    "properties": {
        "bbox_2d": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 300}, "maxItems": 4},
        "label": {"type": "string", "maxLength": 20},
    },
    "required": ["bbox_2d", "label"],
}


@pytest.mark.parametrize("field", ["response_format", "guided_json"])
def test_schema_with_a_box(tiny_checkpoint, field):
    formats = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "box", "schema": BOX}},
        "guided_json": BOX,
    }
    with scripted(tiny_checkpoint, '{"bbox_2d": [500, 500, 1000, 1000], "label": "(5,5)"}') as (engine, _):
        content = engine.chat(request(**{field: formats[field]})).choices[0].message.content
    assert json.loads(content)["bbox_2d"] == [150, 100, 300, 200]


@pytest.mark.slow
def test_random_model_writes_boxes_within_the_image():
    with Engine(EngineConfig()) as engine:
        for seed in range(3):
            content = engine.chat(request(guided_json=BOX, seed=seed, temperature=2.0)).choices[0].message.content
            left, top, right, bottom = json.loads(content)["bbox_2d"]
            assert max(left, right) <= SIZE[0]
            assert max(top, bottom) <= SIZE[1]


CLICK = {
    "type": "function",
    "function": {
        "name": "click",
        "parameters": {"properties": {"coordinate": {"type": "array", "items": {"type": "integer", "maximum": 300}}}},
    },
}


def test_tool_calls_have_pixels_of_the_original(tiny_checkpoint):
    calls = [
        f'<tool_call>\n{{"name": "click", "arguments": {{"coordinate": [{x}, 500]}}}}\n</tool_call>'
        for x in (500, 1000)
    ]
    body = request(tools=[CLICK])
    with scripted(tiny_checkpoint, "\n".join(calls)) as (engine, _):
        message = engine.chat(body).choices[0].message
        chunks = list(engine.stream({**body, "stream": True}))
    expected = ['{"coordinate": [150, 100]}', '{"coordinate": [300, 100]}']
    assert [call.function.arguments for call in message.tool_calls] == expected
    streamed = ["", ""]
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or ():
            streamed[call.index] += call.function.arguments or ""
    assert streamed == expected


def test_image_known_by_uuid_keeps_its_original_size(tiny_checkpoint):
    body = request()
    body["messages"][0]["content"][0]["uuid"] = "one"
    with scripted(tiny_checkpoint, "(500,500)") as (engine, _):
        engine.chat(body)
        body["messages"][0]["content"][0] = {"type": "image_url", "uuid": "one"}
        assert engine.chat(body).choices[0].message.content == "(150,100)"


def test_video_and_images_of_one_size_are_accepted(tiny_checkpoint):
    with scripted(tiny_checkpoint, "(500,500)") as (engine, _):
        body = request(blurred_image(1, *SIZE), [blurred_image(seed, *SIZE) for seed in (2, 3)], WORDS)
        assert engine.chat(body).choices[0].message.content == "(150,100)"


@pytest.mark.parametrize(
    ("parts", "message"),
    [((WORDS,), "requires an image"), ((blurred_image(1), blurred_image(2, *SIZE)), "requires images of one size")],
    ids=["no image", "two sizes"],
)
def test_request_without_one_size_is_rejected(tiny_checkpoint, parts, message):
    with scripted(tiny_checkpoint, "(500,500)") as (engine, _), pytest.raises(InvalidParameter) as caught:
        engine.chat(request(*parts))
    assert caught.value.param == "coordinates"
    assert message in caught.value.message


def test_preview_converts_coordinates(tiny_checkpoint):
    with scripted(tiny_checkpoint, "") as (engine, _):
        first, second = engine.preview(request(blurred_image(1), blurred_image(2, *SIZE), coordinates="model")).items
    assert second.coordinates.to_original((500, 500)) == (150, 100)
    assert first.coordinates.source_size == (112, 112)
