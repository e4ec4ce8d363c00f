"""Random satisfiable JSON schemas with the keywords clients use: objects, arrays, enums, bounds, references."""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]

NAMES = ("name", "colour", "size", "count", "items", "note", "x y", 'a "b"', "größe", "kind")
WORDS = ("red", "blue", "a/b", 'say "hi"', "back\\slash", "ß", "", "two words")


def random_schema(seed: int) -> Schema:
    """Return an object schema with definitions that its properties reference, one of them recursive."""
    rng = Random(seed)
    pair = {"type": "object", "properties": {"a": _scalar(rng), "b": _scalar(rng)}, "required": ["a"]}
    return {**_object(rng, 3), "$defs": {"leaf": _scalar(rng), "pair": pair, "tree": _tree(rng)}}


def _tree(rng: Random) -> Schema:
    child: Schema = {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}
    if rng.random() < 0.5:
        child = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
    return {
        "type": "object",
        "properties": {"value": {"type": "boolean"}, "child": child},
        "required": ["value"],
        "additionalProperties": False,
    }


def _object(rng: Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0 if depth < 3 else 1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _part(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.5],
    }
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
    elif rng.random() < 0.4:
        schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 99}
        schema["maxProperties"] = len(names) + rng.randint(0, 3)
    return schema


def _part(rng: Random, depth: int) -> Schema:
    makers = [_scalar, _scalar, _reference]
    if depth > 0:
        makers += [lambda rng: _object(rng, depth), lambda rng: _array(rng, depth), lambda rng: _union(rng, depth)]
    return rng.choice(makers)(rng)


def _reference(rng: Random) -> Schema:
    return {"$ref": f"#/$defs/{rng.choice(('leaf', 'pair', 'tree'))}"} if rng.random() < 0.8 else {"type": "boolean"}


def _array(rng: Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    schema: Schema = {"type": "array", "items": _part(rng, depth - 1), "minItems": least, "maxItems": least + 2}
    if rng.random() < 0.2:
        schema = {"type": "array", "prefixItems": [_scalar(rng), _scalar(rng)], "items": False, "minItems": 2}
    return schema


def _union(rng: Random, depth: int) -> Schema:
    if rng.random() < 0.3:
        kinds = rng.sample(WORDS[:4], 2)
        tag = {
            kind: {"properties": {"kind": {"const": kind}, "v": _scalar(rng)}, "required": ["kind"]} for kind in kinds
        }
        return {"oneOf": [{"type": "object", **branch} for branch in tag.values()]}
    return {"anyOf": [_part(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _scalar(rng: Random) -> Schema:
    low = rng.randint(-1000, 1000)
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(0, 12)},
            {"type": "string", "minLength": 2, "maxLength": 6},
            {"type": "string", "pattern": rng.choice(("^[A-Z]{2}[0-9]+$", "^(a|b)*c$", r"\d{3}-\d")), "maxLength": 8},
            {"type": "string", "format": rng.choice(("date", "time", "uuid", "ipv4"))},
            {"type": "integer", "minimum": low, "maximum": low + rng.choice((0, 1, 17, 5000))},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 3},
            {"type": "integer", "multipleOf": rng.choice((2, 5, 7)), "minimum": 0, "maximum": 700},
            {"type": "integer"},
            {"type": "number", "minimum": low / 8, "maximum": low / 8 + rng.choice((0.5, 1, 1000))},
            {"type": "number", "exclusiveMinimum": low / 10, "exclusiveMaximum": low / 10 + 0.3},
            {"type": "number"},
            {"type": ["integer", "null"], "minimum": 3, "maximum": 5},
            {"enum": rng.sample([*WORDS, 1, -2.5, True, None, [1, "a"], {"a": 1}], rng.randint(1, 5))},
            {"const": rng.choice(WORDS)},
            {"type": "boolean"},
            {"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 4}]},
        ]
    )


KEYWORDS = (
    "type", "enum", "const", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems",
    "maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "anyOf", "oneOf", "allOf", "$ref", "minProperties", "maxProperties", "not",
)  # fmt: skip


def damaged(rng: Random, schema: Any, share: float) -> Any:
    """Return the schema with some parts replaced by common mistakes."""
    if rng.random() < share:
        return _junk(rng)
    if isinstance(schema, dict):
        whole = {key: damaged(rng, value, share) for key, value in schema.items()}
        return whole | {rng.choice(KEYWORDS): _junk(rng)} if rng.random() < share else whole
    return [damaged(rng, item, share) for item in schema] if isinstance(schema, list) else schema


def _junk(rng: Random, depth: int = 3) -> Any:
    plain = [None, True, False, 0, -1, 3, 2.5, 1e300, 10**400, "", "string", "object", "array", [], {}, ["a"]]
    texts = ["#", "#/$defs/leaf", "#/properties", "(a|b)*", "[", r"\p{L}+$", "^.{3,}$", ["string", "null"]]
    if depth and rng.random() < 0.2:
        return rng.choice([{rng.choice(KEYWORDS): _junk(rng, depth - 1)}, [_junk(rng, depth - 1)]])
    return rng.choice([*plain, *texts])
