"""JSON schemas as grammars: all allowed output is valid and finite."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from concurrent.futures import CancelledError
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from random import Random
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dashinfer_vlm_core.errors import InvalidParameter
from dashinfer_vlm_core.structured_output.grammar.bounds import MAX_PATTERNS, STRING_CHARACTERS
from dashinfer_vlm_core.structured_output.grammar.json_schema import json_schema
from dashinfer_vlm_core.structured_output.grammar.numbers import numbers_between
from dashinfer_vlm_core.structured_output.grammar.rules import Rules, Steps
from dashinfer_vlm_core.structured_output.grammar.schema_shape import InvalidSchema, SchemaError
from dashinfer_vlm_core.structured_output.grammar.values import any_value, matching_text
from dashinfer_vlm_core.structured_output.grammar.xml_calls import CallCompiler
from dashinfer_vlm_core.structured_output.grammar_compiler import MAX_CACHED_GRAMMARS, GrammarCompiler
from tests.cases import cases
from tests.schemas import damaged, random_schema

CHECKPOINT = Path(__file__).parents[2] / "plugins" / "dashinfer_vlm_demo" / "checkpoint"
TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
STOP = TOKENIZER.token_to_id("<|im_end|>")
SIZE = 800  # a model may have more rows than the tokenizer has tokens


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENIZER, SimpleNamespace(vocab_size=SIZE, tokens=SimpleNamespace(stop=(STOP,))))


def compiled(compiler, schema, **options):
    rules = Rules(compiler.compiles)
    return compiler.compile(rules, json_schema(rules, schema, **options), param="schema")


def random_output(grammar, seed, *, max_tokens=20_000):
    """Generate text from random allowed tokens; where the end is allowed, end with probability 1/2."""
    rng, matcher, ids = np.random.default_rng(seed), grammar.copy(), []
    for _ in range(max_tokens):
        allowed = np.flatnonzero(matcher.allowed_tokens())
        token = STOP if STOP in allowed and rng.random() < 0.5 else int(rng.choice(allowed))
        if token == STOP:
            return TOKENIZER.decode(ids, skip_special_tokens=False)
        ids.append(token)
        matcher.accept_token(token)
    raise AssertionError("it does not end")


def accepts(grammar, text):
    matcher = grammar.copy()
    for token in [*TOKENIZER.encode(text, add_special_tokens=False).ids, STOP]:
        if not matcher.allowed_tokens()[token]:
            return False
        matcher.accept_token(token)
    return True


# Allowed output is valid


@cases("seed", range(40))
def test_allowed_output_is_valid(compiler, seed):
    schema = random_schema(seed)
    grammar = compiled(compiler, schema)
    for attempt in range(3):
        jsonschema.validate(json.loads(random_output(grammar, attempt)), schema)


def test_json_object_grammar_gives_object(compiler):
    rules = Rules()
    grammar = compiler.compile(rules, any_value(rules, ("object",)), param="schema")
    assert accepts(grammar, '{"a": [1, {"b": null}], "c": -2.50}')
    assert not accepts(grammar, "[1]")
    assert not accepts(grammar, '{"a": 1')
    for seed in range(5):
        assert isinstance(json.loads(random_output(grammar, seed)), dict)


SAMPLES = {
    "properties in order, the rest of them optional": (
        {"properties": {"a": {"type": "integer"}, "b": {"type": "null"}, "c": {"type": "boolean"}}, "required": ["b"]},
        ['{"b":null}', '{"a": 1, "b": null, "c": true}', '{"b": null,"c":false}'],
        ["{}", '{"a":1}', '{"b":null,"a":1}', '{"b":null,}', '{"b":null,"d":1}', '{ "b":null}', '{"b":\nnull}'],
    ),
    "other properties, none of them twice": (
        {"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
        ["{}", '{"a":null,"b":1}', '{"b":1,"c":2}'],
        ['{"a":null,"a":1}', '{"a":1}', '{"b":"x"}'],
    ),
    "a free object": ({"type": "object"}, ["{}", '{"a":{"b":[]}}'], ["[]", '{"a"}']),
    "no properties": ({"type": "object", "properties": {}}, ["{}"], ['{"a":1}']),
    "a tuple": (
        {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}]},
        ["[null,true]", "[null, false]"],
        ["[null]", "[null,true,1]", "[]"],
    ),
    "a list": (
        {"type": "array", "items": {"enum": [1, 12]}, "minItems": 1, "maxItems": 2},
        ["[1]", "[12,1]"],
        ["[]", "[1,1,1]", "[2]"],
    ),
    "a string of a length": (
        {"type": "string", "minLength": 1, "maxLength": 2},
        ['"a"', '"ü\\n"'],
        ['""', '"abc"', '"\n"', "a"],
    ),
    "a pattern is searched for": (
        {"type": "string", "pattern": "b+", "maxLength": 4},
        ['"abba"', '"b"'],
        ['"a"', '"abbba"'],
    ),
    "a pattern with a quote": ({"type": "string", "pattern": '^"[a-c]$'}, ['"\\"a"'], ['""a"', '"a"']),
    "types": ({"type": ["null", "boolean"]}, ["null", "true"], ["1", '"null"']),
    "nullable by anyOf": ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, ["null", "-7"], ["true"]),
    "keywords next to anyOf": (
        {"type": "object", "properties": {"a": {"type": "null"}}, "anyOf": [{"required": ["a"]}]},
        ['{"a":null}'],
        ["{}"],
    ),
    "all of": (
        {"allOf": [{"$ref": "#/$defs/a"}, {"maximum": 3}], "$defs": {"a": {"type": "integer", "minimum": 2}}},
        ["2", "3"],
        ["1", "4"],
    ),
    "numbers": (
        {"type": "number", "minimum": -0.5, "exclusiveMaximum": 1},
        ["0", "-0.5", "0.999999"],
        ["1", "-0.51", "01", "1e0", "-0"],
    ),
    "whole numbers": (
        {"type": "integer", "minimum": 0.5, "exclusiveMaximum": 12},
        ["1", "11"],
        ["0", "12", "1.0", "011"],
    ),
    "multiples with decimals": (
        {"type": "number", "multipleOf": 0.25, "minimum": -1, "exclusiveMaximum": 100000},
        ["0", "-0.75", "1.5", "99999.75", "0.50"],
        ["0.3", "0.125", "-1.25", "00.25", "100000", "-0"],
    ),
    "names in a list": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}},
        ["{}", '{"a":null}', '{"a":null,"b":null}'],
        ['{"c":null}', '{"a":null,"a":null}', '{"a":1}'],
    ),
    "names with a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": {"type": "null"}},
        ["{}", '{"x":null}', '{"xy":null,"x":null}'],
        ['{"y":null}', '{"x' + "y" * 64 + '":null}'],
    ),
    "a tuple of draft 7": (
        {"type": "array", "items": [{"type": "null"}, {"type": "boolean"}], "additionalItems": {"type": "null"}},
        ["[null,true]", "[null,true,null]"],
        ["[null,true,1]", "[true,true]"],
    ),
    "a tuple of nothing": ({"type": "array", "items": []}, ["[]"], ["[1]", "[[]]"]),
    "a tuple of nothing, then others": (
        {"type": "array", "items": [], "additionalItems": {"type": "null"}},
        ["[]", "[null]"],
        ["[1]"],
    ),
    "a limit on properties, one of which is forbidden": (
        {"type": "object", "properties": {"a": False, "b": {"type": "integer"}}, "maxProperties": 1},
        ["{}", '{"b":1}'],
        ['{"a":1}'],
    ),
    "a limit on properties, one of which has no allowed name": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "propertyNames": {"enum": ["b"]},
            "maxProperties": 1,
        },
        ["{}", '{"b":null}'],
        ['{"a":null}'],
    ),
    "multiples": ({"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 20}, ["0", "18"], ["1", "21"]),
    "a recursion": (
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        ["{}", '{"next":{"next":{}}}'],
        ['{"next":null}', '{"next":' * 40 + "{}" + "}" * 40],
    ),
    "a reference with escapes": ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"const": "x"}}}, ['"x"'], ['"y"']),
    "a reference with percent encoding": (
        {"$ref": "#/definitions/Foo%3Cint%3E", "definitions": {"Foo<int>": {"const": "x"}}},
        ['"x"'],
        ['"y"'],
    ),
}


@cases(("schema", "good", "bad"), SAMPLES.values())
def test_texts_allowed_by_schema(compiler, schema, good, bad):
    grammar = compiled(compiler, schema)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_number_range_allows_exactly_its_numbers(seed):
    rng = Random(seed)
    scale = 10 ** rng.randint(0, 3)
    low, high = sorted(Fraction(rng.randint(-3000, 3000), scale) for _ in range(2))
    pattern = numbers_between(low, high, places=2)
    numbers = [f"{value / 100:.2f}" for value in range(-400, 401)] + [str(value) for value in range(-3000, 3001, 7)]
    numbers += ["007", "-0", "+1", "1.", ".5", ""]
    for number in numbers:
        canonical = re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]{1,2})?", number) and not re.fullmatch(r"-0(\.0+)?", number)
        inside = bool(canonical) and low <= Fraction(number) <= high
        assert bool(pattern and re.fullmatch(pattern, number)) == inside, (number, low, high)


# Keywords that cannot be guaranteed are rejected with their path, or ignored. Invalid schemas are always rejected.

INVALID = {
    "a type that is no name": ({"type": 5}, "type"),
    "properties that are a list": ({"properties": []}, "properties"),
    "a property that is no schema": ({"properties": {"a": 5}}, "properties"),
    "a bound that is no number": ({"properties": {"a": {"minimum": "1"}}}, "properties.a.minimum"),
    "a boolean for a number": ({"maxLength": True}, "maxLength"),
    "names that are no list": ({"required": "a"}, "required"),
    "no alternatives": ({"anyOf": []}, "anyOf"),
    "a step of zero": ({"multipleOf": 0}, "multipleOf"),
    "enum that is no list": ({"enum": "a"}, "enum"),
    "a part of a tuple": ({"items": [{"type": "null"}, {"minItems": -1}]}, "prefixItems[1].minItems"),
}

NOT_GUARANTEED = {
    "an unknown type": ({"type": "strin"}, "type", [0]),
    "a type of draft 3 in a list": ({"type": ["string", "any"]}, "type", [0, "a"]),
    "required of draft 3": ({"type": "string", "required": True}, "required", ["a"]),
    "an exclusive bound of draft 4": (
        {"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "exclusiveMinimum", [3, 4]
    ),
    "no values": ({"type": "string", "enum": []}, "enum", ["a"]),
    "not": ({"properties": {"a": {"type": "null", "not": {}}}}, "properties.a.not", [{"a": None}]),
    "unique items": ({"type": "array", "uniqueItems": True}, "uniqueItems", [[1, 1]]),
    "a reference to elsewhere": ({"$ref": "https://example.com/a"}, "$ref", [0]),
    "a reference to nothing": ({"items": {"$ref": "#/$defs/a"}}, "items.$ref", [[1, "a"]]),
    "parts that differ": ({"type": "string", "allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "pattern", ["c"]),
    "a part that forbids another": (
        {"allOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"b": {}}}]},
        "additionalProperties",
        [{"b": 1}],
    ),
    "enum with bounds": ({"enum": [1, 2], "minimum": 2}, "minimum", [1, 2]),
    "nothing": ({"properties": {"a": False}, "required": ["a"]}, "", [{"a": 1}]),
    "an empty range": ({"type": "integer", "minimum": 3, "maximum": 2}, "", [3]),
    "a loop": ({"$ref": "#"}, "", [3]),
    "a recursion without an end": ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "", [{"a": 1}]),
    "multiples of thirds": ({"type": "number", "multipleOf": 0.3}, "multipleOf", [1.5]),
    "multiples of a large number": ({"type": "integer", "multipleOf": 65_537}, "multipleOf", [1]),
    "numbers with many digits": ({"type": "number", "minimum": 1e40}, "minimum", [1]),
    "look-around": ({"type": "string", "pattern": "^(?=.*d).{8,}$"}, "pattern", ["a"]),
    "a long pattern": ({"type": "string", "pattern": "a" * 1025}, "pattern", ["a"]),
    "a pattern of names next to properties": (
        {"properties": {"a": {"const": 1}}, "propertyNames": {"pattern": "^a$"}}, "propertyNames", [{"a": 1}]
    ),
    "a reference to names, with a length": (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/k", "minLength": 2}, "$defs": {"k": {"enum": ["a"]}}},
        "propertyNames",
        [{"a": 1}],
    ),
    "an alternative of an unknown type": (
        {"type": ["null", "integer"], "oneOf": [{"type": "null"}, {"type": "any", "minimum": 3}]},
        "oneOf[1].type",
        [None, 5],
    ),
    "names with other keywords": (
        {"type": "object", "propertyNames": {"anyOf": [{"const": "a"}]}}, "propertyNames", [{"a": 1}]
    ),
    "references that multiply": (
        {
            "$ref": "#/$defs/a0",
            "$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}", "minLength": 1}] * 8} for i in range(30)}
            | {"a30": {"type": "string"}},
        },
        "",
        ["a"],
    ),
    "too many rules": (
        {"type": "object", "properties": {f"p{i}": {"enum": [i, f"{i}"]} for i in range(7000)}}, "", [{"a": 1}]
    ),
}  # fmt: skip


@cases(("schema", "place"), INVALID.values())
def test_invalid_schema_is_rejected(schema, place):
    for widened in (None, []):
        with pytest.raises(SchemaError) as caught:
            json_schema(Rules(), schema, widened=widened)
        assert caught.value.path == place


@cases(("schema", "place"), [(schema, place) for schema, place, _ in NOT_GUARANTEED.values()])
def test_schema_that_cannot_be_guaranteed_is_rejected(compiler, schema, place):
    with pytest.raises(SchemaError) as caught:
        json_schema(Rules(compiler.compiles), schema)
    assert caught.value.path == place


@cases(("schema", "place", "values"), NOT_GUARANTEED.values())
def test_schema_that_cannot_be_guaranteed_is_widened(compiler, schema, place, values):
    widened = []
    grammar = compiled(compiler, schema, widened=widened)
    assert place in widened
    assert [value for value in values if not accepts(grammar, json.dumps(value))] == []
    json.loads(random_output(grammar, 0))


def test_only_the_faulty_parts_are_widened(compiler):
    schema = {
        "type": "object",
        "properties": {
            "price": {"type": "number", "minimum": 0, "multipleOf": 0.07},
            "id": {"type": "string", "pattern": "^(?!x)", "maxLength": 3},
            "kind": {"type": "any"},
            "size": {"enum": ["S", "M"], "uniqueItems": True},
        },
        "required": ["price", "id", "kind", "size"],
    }
    widened = []
    grammar = compiled(compiler, schema, widened=widened)
    names = {"price": "multipleOf", "id": "pattern", "kind": "type", "size": "uniqueItems"}
    assert sorted(set(widened)) == sorted(f"properties.{name}.{keyword}" for name, keyword in names.items())
    assert accepts(grammar, '{"price": 0.5, "id": "abc", "kind": [1], "size": "S"}')
    assert not accepts(grammar, '{"price": -1, "id": "abc", "kind": [1], "size": "S"}')
    assert not accepts(grammar, '{"price": 0.5, "id": "abcd", "kind": [1], "size": "S"}')
    assert not accepts(grammar, '{"price": 0.5, "id": "abc", "kind": [1], "size": "L"}')


DISJOINT = {
    "types": [{"type": "string"}, {"type": ["integer", "null"]}, {"type": "boolean"}],
    "values": [{"const": 1}, {"enum": [2, True]}, {"const": "1"}],
    "a type, then values": [{"type": "null"}, {"type": "string", "const": "a"}, {"type": "string", "enum": ["b", "c"]}],
    "a property": [
        {"type": "object", "properties": {"k": {"const": kind}, "a": {"const": 1}}, "required": ["k", "a"]}
        for kind in "xyz"
    ],
    "two properties": [
        {"type": "object", "properties": {"k": {"const": k}, "v": {"enum": v}}, "required": ["k", "v"]}
        for k, v in [("x", [1, 2]), ("x", [3]), ("y", [1, 2]), ("y", [4])]
    ],
}
OVERLAPPING = {
    "numbers": [{"type": "number"}, {"minimum": 3}],
    "integers are numbers": [{"type": "integer"}, {"type": "number"}],
    "values that are equal": [{"const": [1]}, {"const": "a"}, {"const": [1.0]}],
    "a property that may be missing": [
        {"type": "object", "properties": {"k": {"const": kind}}, "required": ["k"][: kind == "x"]} for kind in "xy"
    ],
    "any value": [{"const": 1}, True],
}


@pytest.mark.parametrize("branches", DISJOINT.values(), ids=DISJOINT)
def test_one_of_disjoint_alternatives_is_guaranteed(branches):
    json_schema(Rules(), {"oneOf": branches})


@pytest.mark.parametrize("branches", OVERLAPPING.values(), ids=OVERLAPPING)
def test_one_of_overlapping_alternatives_needs_no_strict(branches):
    json_schema(Rules(), {"oneOf": branches}, widened=[])
    with pytest.raises(SchemaError, match="alternatives that one value could satisfy") as caught:
        json_schema(Rules(), {"oneOf": branches})
    assert caught.value.path == "oneOf"


@pytest.mark.parametrize(
    ("types", "texts"),
    [("string", ['"a"']), (["array", "string"], ['"a"', "[1]"]), ("array", ["[1]"]), ("object", ['{"a":1}'])],
    ids=str,
)
def test_schema_without_values_is_widened_to_its_types(compiler, types, texts):
    least = dict.fromkeys(("minLength", "minItems", "minProperties"), 10**400)
    grammar = compiled(compiler, {"type": types, **least, "maxProperties": 0}, widened=[])
    assert [text for text in ('"a"', "[1]", '{"a":1}', "1", "null") if accepts(grammar, text)] == texts


# The work is bounded, and linear


class CountedText(str):
    """A text that counts how often it is compared."""

    count = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        CountedText.count += 1
        return str.__eq__(self, other)


MANY = {
    "alternatives": lambda texts: {"oneOf": [{"const": text} for text in texts]},
    "alternatives with values": lambda texts: {"oneOf": [{"enum": texts[::2]}, {"enum": texts[1::2]}]},
    "parts with values": lambda texts: {"allOf": [{"enum": texts}, {"enum": texts[::-1]}]},
    "names": lambda texts: {"type": "object", "propertyNames": {"enum": texts}},
    "required names": lambda texts: {"properties": {text: {"type": "null"} for text in texts}, "required": texts},
}


@pytest.mark.parametrize("make", MANY.values(), ids=MANY)
def test_security_35_values_are_compared_in_linear_time(make):
    def comparisons(count):
        CountedText.count = 0
        json_schema(Rules(), make([CountedText(f"v{index}") for index in range(count)]))
        return CountedText.count

    assert comparisons(200) < 20 * 200


TOO_MANY_STEPS = {
    "alternatives that are compared again for each reference": {
        "$defs": {"a": {"oneOf": [{"const": index} for index in range(400)]}},
        "anyOf": [{"$ref": "#/$defs/a", "type": "integer"} for _ in range(40)],
    },
    "parts that are merged into a growing one": {"allOf": [{"properties": {f"{i}": {}}} for i in range(1000)]},
    "merged parts that grow inside": {
        "allOf": [{"properties": {"a": {"properties": {f"{i}": {}}}}} for i in range(1000)]
    },
    "properties next to many alternatives": {
        "properties": {f"{i}": {} for i in range(1000)}, "anyOf": [{"properties": {}}] * 200
    },
    "one target under many names": {
        "properties": {"a": {"default": [0] * 2000}}
        | {f"p{i}": {"$ref": "#" + "/" * (i + 1) + "properties/a"} for i in range(60)}
    },
    "a long value for each reference": {
        "$defs": {"a": {"const": "x" * 100_000}},
        "anyOf": [{"$ref": "#/$defs/a", "type": "string"} for _ in range(300)],
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("schema", TOO_MANY_STEPS.values(), ids=TOO_MANY_STEPS)
def test_security_35_steps_of_a_schema_are_bounded(schema):
    widened = []
    json_schema(Rules(), schema, widened=widened)
    assert widened[-1] == ""
    with pytest.raises(SchemaError, match="makes the request too complex"):
        json_schema(Rules(), schema)


def test_security_35_steps_are_those_of_all_schemas_of_a_request():
    rules, schema = Rules(), {"enum": [f"v{index}" for index in range(20_000)]}
    json_schema(rules, schema)
    json_schema(rules, schema)
    with pytest.raises(SchemaError, match="makes the request too complex"):
        json_schema(rules, schema)


@cases("schema", TOO_MANY_STEPS.values())
def test_security_35_canceled_schema_ends_at_its_next_step(schema):
    checks = iter(range(100))

    def check():
        if next(checks, None) is None:
            raise CancelledError

    for widened in (None, []):
        with pytest.raises(CancelledError):
            json_schema(Rules(steps=Steps(check)), schema, widened=widened)


def test_security_35_faults_of_a_part_are_found_before_its_parts_are_compiled():
    def nested(depth):
        if not depth:
            return {"type": "integer"}
        return {"type": ["object", "string"], "pattern": "(", "properties": {"a": nested(depth - 1)}}

    widened = []
    json_schema(Rules(lambda _: False), nested(12), widened=widened)
    assert len(widened) == 12


def test_number_of_patterns_is_bounded():
    def schema(count):
        return {"properties": {f"p{i}": {"type": "string", "pattern": f"^a{{{i}}}$"} for i in range(count)}}

    json_schema(Rules(), schema(MAX_PATTERNS))
    with pytest.raises(SchemaError, match=f"more than {MAX_PATTERNS} regular expressions"):
        json_schema(Rules(), schema(MAX_PATTERNS + 1))


def exact(text):
    """Parse JSON with decimal numbers, which jsonschema divides exactly."""
    return json.loads(text, parse_float=Decimal)


EXACT = {
    "cents": '{"type": "number", "minimum": -3, "maximum": 20.5, "multipleOf": 0.01}',
    "cents without bounds": '{"type": "number", "multipleOf": 0.01}',
    "quarters": '{"type": "number", "minimum": 0, "multipleOf": 0.25}',
    "steps of 2.5": '{"type": "number", "maximum": 100, "multipleOf": 2.5}',
    "integers among steps of 2.5": '{"type": "integer", "maximum": 1000, "multipleOf": 2.5}',
    "thirds between bounds": '{"type": "number", "minimum": -2, "maximum": 3, "multipleOf": 0.3}',
    "very small steps": '{"type": "number", "minimum": 0.1, "multipleOf": 0.00000001}',
    "thousands": '{"type": "integer", "multipleOf": 1000}',
    "multiples of 7": '{"type": "integer", "multipleOf": 7}',
    "large bounds": '{"type": "number", "minimum": -1.7e308, "maximum": 1e30}',
    "a large exclusive bound": '{"type": "integer", "minimum": 5, "exclusiveMaximum": 1e300}',
    "names that are strings": '{"propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}',
    "names in a list": (
        '{"type": "object", "propertyNames": {"$ref": "#/$defs/k"}, "additionalProperties": {"type": "null"},'
        ' "minProperties": 1, "$defs": {"k": {"type": "string", "enum": ["a", "b", "c d"]}}}'
    ),
    "names in a list, one required": (
        '{"type": "object", "propertyNames": {"enum": ["a", "b"]}, "required": ["b"],'
        ' "properties": {"b": {"type": "null"}, "x": {}}, "additionalProperties": {"type": "integer"}}'
    ),
    "names with a pattern": '{"type": "object", "propertyNames": {"pattern": "^[a-z]{2}$"}}',
    "names with lengths": (
        '{"type": "object", "properties": {"abc": {}, "x": {}}, "additionalProperties": {"type": "null"},'
        ' "propertyNames": {"minLength": 2, "maxLength": 4}}'
    ),
    "no names": '{"type": "object", "propertyNames": {"type": "integer"}}',
}


@cases("text", EXACT.values())
def test_output_is_valid_with_exact_numbers(compiler, text):
    validator = jsonschema.Draft202012Validator(exact(text))
    grammar = compiled(compiler, json.loads(text))
    outputs = [random_output(grammar, seed) for seed in range(8)]
    for output in outputs:
        validator.validate(exact(output))
    assert len(set(outputs)) > 1 or "integer" in text


@pytest.mark.parametrize(
    "items",
    [
        {"items": [{"type": "null"}, {"type": "boolean"}]},
        {"items": [{"type": "null"}], "additionalItems": {"type": "boolean"}, "maxItems": 3},
        {"items": [{"type": "null"}], "additionalItems": False},
        {"items": {"type": "null"}, "additionalItems": {"type": "boolean"}},
        {"additionalItems": {"type": "boolean"}, "maxItems": 2},
    ],
    ids=str,
)
def test_tuples_of_draft_7(compiler, items):
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", **items}
    for seed in range(8):
        jsonschema.Draft7Validator(schema).validate(json.loads(random_output(compiled(compiler, schema), seed)))


# Texts other than JSON


TEXTS = {
    "the whole text": (r"[0-9]+-(a|b)", ["12-a", "1-b"], ["12-", "x12-a", "12-ab", ""]),
    "anchors at the ends": (r"^a|b$", ["a", "b"], ["", "ab"]),
    "an escaped dollar at the end": (r"a\$", ["a$"], ["a"]),
    "slashes": (r"/[/]\/", ["///"], ["//"]),
    "line breaks": ("a\nb\\n", ["a\nb\n"], ["a\\nb\n"]),
    "quotes and other marks of the grammar": (r""""x" & # ~""", ['"x" & # ~'], ["x"]),
    "a dot": (".{2}", ["ab", "ü "], ["a\n"]),
}


@cases(("pattern", "good", "bad"), TEXTS.values())
def test_texts_allowed_by_regular_expression(compiler, pattern, good, bad):
    rules = Rules()
    grammar = compiler.compile(rules, matching_text(rules, pattern), param="guided_regex")
    assert ([accepts(grammar, text) for text in good], [accepts(grammar, text) for text in bad]) == (
        [True] * len(good),
        [False] * len(bad),
    )


def test_text_of_regular_expression_is_bounded(compiler):
    rules = Rules()
    grammar = compiler.compile(rules, matching_text(rules, "(a|\n)*"), param="guided_regex")
    assert accepts(grammar, "a\n" * (STRING_CHARACTERS // 2))
    assert not accepts(grammar, "a\n" * (STRING_CHARACTERS // 2) + "a")


def test_one_of_allows_exactly_its_texts(compiler):
    texts = ["a", "ab", 'quo"te', "line\nbreak", "grün", "<|im_end|>"]
    rules = Rules()
    grammar = compiler.compile(rules, rules.one_of([*texts, "a"]), param="guided_choice")
    assert all(accepts(grammar, text) for text in texts if "<" not in text)
    assert not any(accepts(grammar, text) for text in ("", "b", "abc", "aab"))
    assert {random_output(grammar, seed) for seed in range(100)} == set(texts)


# Bounds


@pytest.mark.slow
def test_grammar_has_no_recursive_rule():
    """Nor an unbounded repetition: the languages are finite."""
    rules = Rules()
    starts = [json_schema(rules, random_schema(seed)) for seed in range(100)] + [any_value(rules, ("object",))]
    starts += [json_schema(rules, json.loads(text)) for text in EXACT.values()]
    starts += [json_schema(rules, schema, widened=[]) for schema, *_ in list(NOT_GUARANTEED.values())[:-1]]
    lines = dict(line.split(": ", 1) for line in rules.text(" | ".join(starts)).splitlines())
    lines = {name.removesuffix("[lazy]"): body for name, body in lines.items()}
    for name, body in lines.items():
        if not body.startswith("%json"):
            bare = re.sub(r'"([^"\\]|\\.)*"|/([^/\\]|\\.)*/', " ", body)
            found = re.findall(r"\b[rT]\d+\b", bare)
            assert name == "start" or all(int(other[1:]) < int(name[1:]) for other in found), (name, body)
            pieces = re.findall(r"/(?:[^/\\]|\\.)*/", body)
            assert not any(re.search(r"[\])][*+]|\{\d+,\}", piece) for piece in [*pieces, bare]), body


HOSTILE = {
    "a pattern of nested repetition": {"type": "string", "pattern": "(a+)+$"},
    "a pattern of counts in counts": {"type": "string", "pattern": "((a{1,100}){1,100}){1,100}b"},
    "a pattern of many alternatives": {"type": "string", "pattern": "^(.*a.{20}|.*b.{20})$"},
    "a pattern that is broken": {"type": "string", "pattern": "(("},
    "a pattern that looks ahead": {"type": "string", "pattern": "(?=a)(?!b).*\\1"},
    "a long string": {"type": "string", "minLength": 65_536, "maxLength": 10**9},
    "a long list": {"type": "array", "items": {"type": "array", "items": {"type": "null"}, "minItems": 4096}},
    "many values": {"enum": [f"value {index}" for index in range(3000)]},
    "many properties": {"properties": {f"p{index}": {"type": "integer"} for index in range(1500)}},
    "several thousand properties": {"properties": {f"p{index}": {} for index in range(4000)}},
    "several thousand properties, all required": {
        "properties": {f"p{index}": {"type": "null"} for index in range(2000)},
        "required": [f"p{index}" for index in range(2000)],
    },
    "a chain of references": {
        "$ref": "#/$defs/a0",
        "$defs": {
            **{f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}, "required": ["x"]} for i in range(900)},
            "a900": {},
        },
    },
    "a pattern of nested groups": {"type": "string", "pattern": "(" * 500 + "a" + ")" * 500},
    "many alternatives": {"anyOf": [{"type": "string", "pattern": f"^a*{index}$"} for index in range(500)]},
    "a recursion that branches": {
        "type": "object",
        "properties": {name: {"$ref": "#"} for name in "abcdefgh"},
    },
    "huge numbers": {"type": "number", "minimum": -(10**29), "maximum": 10**29 + 0.5},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.timeout(300)
def test_hostile_schema_is_rejected_or_followed_in_time(compiler, schema):
    with contextlib.suppress(InvalidParameter, SchemaError):
        matcher = compiled(compiler, schema).copy()
        rng = np.random.default_rng(0)
        for _ in range(50):
            token = int(rng.choice(np.flatnonzero(matcher.allowed_tokens())))
            if token == STOP:
                return
            matcher.accept_token(token)


@pytest.mark.slow
def test_damaged_schemas_are_rejected_or_followed(compiler):
    """2,000 schemas; only the two expected errors may be raised. Every second one may be widened, if it is valid."""
    outcomes = Counter()
    for seed in range(2000):
        rng = Random(seed)
        schema = damaged(rng, random_schema(seed), rng.choice((0.02, 0.1, 0.3)))
        schema = schema if isinstance(schema, dict) else {}
        widened = [] if seed % 2 == 0 else None
        try:
            matcher = compiled(compiler, schema, widened=widened).copy()
        except (SchemaError, InvalidParameter) as error:
            outcomes[type(error), widened is None] += 1
        else:
            outcomes["widened" if widened else "followed"] += 1
            assert matcher.allowed_tokens().any()
    assert outcomes["followed"] > 100
    assert outcomes["widened"] > 20
    assert outcomes[SchemaError, True] > 50
    assert outcomes[SchemaError, False] == 0
    assert outcomes[InvalidSchema, False] > 50


def test_grammar_cache_is_keyed_by_content_and_bounded(compiler):
    first = compiled(compiler, {"const": "kept"})
    assert compiled(compiler, {"const": "kept", "title": "a label"}) is first
    for index in range(MAX_CACHED_GRAMMARS):
        compiled(compiler, {"const": f"other {index}"})
    assert compiled(compiler, {"const": "kept"}) is not first
    assert len(compiler._grammars) == MAX_CACHED_GRAMMARS


def test_matchers_are_independent_and_queries_have_no_effect(compiler):
    grammar = compiled(compiler, {"enum": ["ab", "cd"]})
    one, two = grammar.copy(), grammar.copy()
    before = one.allowed_tokens()
    assert np.array_equal(one.allowed_tokens(), before)
    one.accept_token(int(np.flatnonzero(before)[0]))
    assert np.array_equal(two.allowed_tokens(), before)
    assert len(before) == SIZE
    assert not before[TOKENIZER.get_vocab_size() :].any()


FORCING = {
    "type": "object",
    "properties": {
        "number of circles": {"type": "integer"},
        "color": {"enum": ["red", "green", "greenish"]},
        "inner": {"type": "array", "items": {"enum": ["one", "two words"]}, "minItems": 2, "maxItems": 3},
        "text": {"type": "string", "maxLength": 6},
        "constant": {"const": "always the same, twice: always the same"},
        "visible": {"type": "boolean"},
    },
    "required": ["number of circles", "color", "inner", "text", "constant", "visible"],
}


def trained_tokenizer():
    """Train a tokenizer on JSON, whose tokens span punctuation and text, as those of large vocabularies do."""
    texts = [
        json.dumps(random_schema(seed), separators=separators)
        for seed in range(40)
        for separators in (None, (",", ":"))
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|im_end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*texts, json.dumps(FORCING)], trainer)
    return tokenizer


def xml_call(rules, schema):
    return CallCompiler(rules, schema, None, end="</function>").compile_root()


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: TOKENIZER, trained_tokenizer], ids=["bundled", "trained"])
@pytest.mark.parametrize("write", [json_schema, xml_call])
def test_forced_tokens_are_the_only_allowed_ones(make, write):
    tokenizer = make()
    stop = tokenizer.token_to_id("<|im_end|>")
    compiler = GrammarCompiler(tokenizer, SimpleNamespace(vocab_size=SIZE, tokens=SimpleNamespace(stop=(stop,))))
    rules = Rules(compiler.compiles)
    grammar = compiler.compile(rules, write(rules, FORCING), param="schema")
    num_forced = 0
    for seed in range(20):
        rng, matcher, token, announced = np.random.default_rng(seed), grammar.copy(), -1, []
        while token != stop:
            allowed, forced = np.flatnonzero(matcher.allowed_tokens()), matcher.forced_tokens()
            assert forced[: len(announced)] == announced
            assert not forced or allowed.tolist() == forced[:1]
            assert matcher.count_allowed(forced) == len(forced)
            token = int(rng.choice(allowed))
            announced = forced[1:]
            num_forced += bool(forced)
            matcher.accept_token(token)
    assert num_forced > 500


def test_matcher_copies_are_independent(compiler):
    matcher = compiled(compiler, {"enum": ["ab", "cd"]}).copy()
    first = TOKENIZER.encode('"ab"', add_special_tokens=False).ids
    advanced, before = matcher.copy(), matcher.allowed_tokens()
    assert matcher.count_allowed([*first, first[0], 1]) == len(first)
    for token in first:
        advanced.accept_token(token)
    assert np.array_equal(matcher.allowed_tokens(), before)
    assert np.flatnonzero(advanced.allowed_tokens()).tolist() == [STOP]
