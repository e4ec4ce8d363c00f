"""JSON schema to rules: supports what OpenAI's and pydantic's schemas use, rejects what cannot be guaranteed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

from . import bounds
from .numbers import integers_between, numbers_between
from .rules import Rules, TooManyRules, literal, regex
from .schema_shape import ANNOTATIONS, SchemaError, check_keywords, merge, types_of

Schema: TypeAlias = Mapping[str, Any] | bool

_CHARACTER = r'([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])'
COMMA, COLON = regex(", ?"), regex(": ?")
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"})
_FORMAT_CHARACTERS = 256


def json_schema(rules: Rules, schema: Schema, *, field: str = "", lenient: bool = False) -> str:
    """Add the rules of the JSON texts that a schema allows: up to one space after `,` and `:`, none elsewhere.

    Properties are in the schema's order. Properties that it does not name are allowed only if `additionalProperties`
    is set.

    Args:
        rules: the rules to add to.
        schema: parsed JSON of bounded size and depth.
        field: the request field that contains the schema, for `Rules.patterns`.
        lenient: whether to ignore keywords that cannot be guaranteed.

    Returns:
        The name of the schema's rule.

    Raises:
        SchemaError: the schema is invalid, too complex, cannot be guaranteed, or allows no value.
    """
    try:
        rule = _Compiler(rules, schema, field=field, lenient=lenient).compile(schema, level=0, path="")
    except TooManyRules:
        raise SchemaError("", "is too large: make it simpler") from None
    if rule is None:
        raise SchemaError("", "allows no value")
    return rule


def any_object(rules: Rules) -> str:
    """Return the rule of any JSON object, nested to a bounded depth."""
    return _any_value(rules, bounds.ANY_DEPTH)[1]


def _string(min_length: int = 0, max_length: int = bounds.STRING_CHARACTERS) -> str:
    return regex(f'"{_CHARACTER}{{{min_length},{max_length}}}"')


def _any_value(rules: Rules, depth: int) -> tuple[str, str]:
    """Return the rules of any value and any object, nested up to `depth` deep."""
    scalars = ["true", "false", "null"]
    value = rules.either([*map(literal, scalars), _string(), regex(_number())])
    arrays = objects = ""
    for _ in range(depth):
        key = rules.terminal(_string(max_length=bounds.KEY_CHARACTERS))
        arrays = rules.add(_enclosed("[", _list_of(value, 0, bounds.ANY_ITEMS), "]"))
        pair = rules.add(f"{key} {COLON} {value}")
        objects = rules.add(_enclosed("{", _list_of(pair, 0, bounds.ANY_ITEMS), "}"))
        value = rules.either([value, arrays, objects])
    return value, objects


def _number() -> str:
    return rf"-?(0|[1-9][0-9]{{0,{bounds.INTEGER_DIGITS - 1}}})(\.[0-9]{{1,{bounds.DECIMAL_PLACES}}})?"


def _list_of(item: str, min_count: int, max_count: int) -> str:
    """Return the rule of a comma-separated list of `item` of bounded length."""
    if max_count == 0:
        return ""
    many = f"{item} {_more_of(item, max(min_count - 1, 0), max_count - 1)}".rstrip()
    return many if min_count else f"({many})?"


def _more_of(item: str, min_count: int, max_count: int) -> str:
    """Like `_list_of`, after another item."""
    return f"({COMMA} {item}){{{min_count},{max_count}}}" if max_count else ""


def _enclosed(left: str, body: str, right: str) -> str:
    return " ".join(filter(None, (literal(left), body, literal(right))))


class _Compiler:
    """Compiles the parts of one schema to rules; None represents a part that no value satisfies."""

    def __init__(self, rules: Rules, root: Schema, *, field: str, lenient: bool) -> None:
        self._rules = rules
        self._field = field
        self._root = root
        self._lenient = lenient
        self._steps = self._depth = 0
        self._rules_by_reference: dict[tuple[str, int], str | None] = {}
        self._references_by_pointer: dict[str, frozenset[str]] = {}
        self._compile_by_type: dict[str, Callable[[Mapping[str, Any], int, str], str | None]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": self._number,
            "integer": self._integer,
            "boolean": lambda *_: self._rules.add('"true" | "false"'),
            "null": lambda *_: literal("null"),
        }

    def compile(self, schema: Schema, level: int, path: str) -> str | None:
        """Compile a part of the schema; return its rule.

        Args:
            schema: the part.
            level: the number of recursive references that were followed.
            path: the path of the part, for messages.
        """
        self._count_step()
        self._depth += 1
        if self._depth > bounds.MAX_NESTING:
            raise SchemaError("", f"nests deeper than {bounds.MAX_NESTING} levels: make it flatter")
        try:
            return self._compile(schema, level, path)
        finally:
            self._depth -= 1

    def _compile(self, schema: Schema, level: int, path: str) -> str | None:
        if isinstance(schema, bool):
            return _any_value(self._rules, bounds.ANY_DEPTH)[0] if schema else None
        check_keywords(schema, path, lenient=self._lenient)
        keywords = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        if "$ref" in keywords:
            return self._reference(keywords, level, path)
        if "allOf" in keywords:
            return self._all_of(keywords, level, path)
        for key in ("anyOf", "oneOf"):
            if key in keywords:
                return self._any_of(keywords, key, level, path)
        return self._value(keywords, level, path)

    def _value(self, schema: Mapping[str, Any], level: int, path: str) -> str | None:
        if "const" in schema or "enum" in schema:
            return self._enum(schema, path)
        types = types_of(schema)
        if not types:
            return self.compile(True, level, path)
        rules = [rule for name in types if (rule := self._compile_by_type[name](schema, level, path)) is not None]
        return self._rules.either(rules) if rules else None

    # References and combinations

    def _reference(self, schema: Mapping[str, Any], level: int, path: str) -> str | None:
        pointer, siblings = schema["$ref"], {key: value for key, value in schema.items() if key != "$ref"}
        level += pointer in self._reachable_references(pointer, path)
        if level > bounds.MAX_RECURSION:
            return None
        if siblings:
            return self.compile(merge(self._dereference(pointer, path), siblings, path), level, path)
        if (pointer, level) not in self._rules_by_reference:
            self._rules_by_reference[pointer, level] = self.compile(self._dereference(pointer, path), level, pointer)
        return self._rules_by_reference[pointer, level]

    def _all_of(self, schema: Mapping[str, Any], level: int, path: str) -> str | None:
        whole: Schema = {key: value for key, value in schema.items() if key != "allOf"}
        for part in schema["allOf"]:
            self._count_step()
            if isinstance(part, Mapping) and isinstance(part.get("$ref"), str):
                pointer, siblings = part["$ref"], {key: value for key, value in part.items() if key != "$ref"}
                level += pointer in self._reachable_references(pointer, path)
                if level > bounds.MAX_RECURSION:
                    return None
                part = merge(self._dereference(pointer, path), siblings, path)  # noqa: PLW2901 - the part, dereferenced
            whole = merge(whole, part, path)
        return self.compile(whole, level, path)

    def _any_of(self, schema: Mapping[str, Any], key: str, level: int, path: str) -> str | None:
        siblings = {name: value for name, value in schema.items() if name != key}
        branches = schema[key]
        if key == "oneOf" and not self._lenient and not self._are_disjoint(branches, path):
            raise SchemaError(
                f"{path}.oneOf", "has alternatives that one value could satisfy at the same time: use `anyOf`"
            )
        rules = []
        for index, branch in enumerate(branches):
            whole = merge(branch, siblings, path) if siblings else branch
            rule = self.compile(whole, level, f"{path}.{key}[{index}]")
            rules += [rule] if rule is not None else []
        return self._rules.either(rules) if rules else None

    def _are_disjoint(self, branches: Sequence[Schema], path: str) -> bool:
        """Whether types and discriminators prove that no value satisfies two of the branches."""
        resolved = [self._resolve(branch, path) for branch in branches]
        return all(_disjoint(one, two) for index, one in enumerate(resolved) for two in resolved[:index])

    def _resolve(self, schema: Schema, path: str) -> Mapping[str, Any]:
        for _ in range(bounds.MAX_RECURSION):
            if isinstance(schema, bool) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._dereference(schema["$ref"], path)
        if isinstance(schema, bool):
            return {}
        check_keywords(schema, path, lenient=True)
        return schema

    def _dereference(self, pointer: str, path: str) -> Schema:
        """Return the target of a JSON Pointer (RFC 6901) within the schema."""
        target: Any = self._root
        try:
            if not pointer.startswith("#"):
                raise KeyError(pointer)
            for step in filter(None, pointer[1:].split("/")):
                key = step.replace("~1", "/").replace("~0", "~")
                target = target[int(key)] if isinstance(target, list) else target[key]
        except (KeyError, IndexError, ValueError, TypeError):
            raise SchemaError(f"{path}.$ref", "must refer to a part of the same schema, such as #/$defs/Name") from None
        if not isinstance(target, (Mapping, bool)):
            raise SchemaError(f"{path}.$ref", "does not refer to a schema")
        return target

    def _reachable_references(self, pointer: str, path: str) -> frozenset[str]:
        """Return all references that are reachable from the target of a reference."""
        if pointer not in self._references_by_pointer:
            seen: set[str] = set()
            waiting = [pointer]
            while waiting:
                for reference in _references(self._dereference(waiting.pop(), path)):
                    self._count_step()
                    if reference not in seen:
                        seen.add(reference)
                        waiting.append(reference)
            self._references_by_pointer[pointer] = frozenset(seen)
        return self._references_by_pointer[pointer]

    def _count_step(self) -> None:
        self._steps += 1
        if self._steps > bounds.MAX_STEPS:
            raise SchemaError("", "is too complex: make it smaller, or use fewer references")

    # Values

    def _enum(self, schema: Mapping[str, Any], path: str) -> str | None:
        """Return the rule of the values of `const` or `enum` that `type` allows."""
        siblings = sorted(schema.keys() - {"const", "enum", "type"})
        if siblings and not self._lenient:
            raise SchemaError(f"{path}.{siblings[0]}", "cannot be combined with `const` or `enum`: remove it")
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if "const" in schema:
            values = [value for value in values if _to_json(value) == _to_json(schema["const"])]
        kinds = types_of({"type": schema["type"]}) if "type" in schema else ()
        texts = [_to_json(value) for value in values if not kinds or _is_one_of(value, kinds)]
        return self._rules.terminal(" | ".join(map(literal, dict.fromkeys(texts)))) if texts else None

    def _object(self, schema: Mapping[str, Any], level: int, path: str) -> str | None:
        properties, required = dict(schema.get("properties", {})), schema.get("required", [])
        more = schema.get("additionalProperties", "properties" not in schema)
        for name in required:
            properties.setdefault(name, schema.get("additionalProperties", True))
        pairs: list[tuple[str, bool]] = []
        for name, part in properties.items():
            value = self.compile(part, level, f"{path}.properties.{name}")
            if value is None and name in required:
                return None
            if value is not None:
                pairs.append((f"{literal(_to_json(name))} {COLON} {value}", name in required))
        body = self._pairs(pairs, *self._additional_property(schema, properties, more, level, path))
        return None if body is None else self._rules.add(_enclosed("{", body, "}"))

    def _additional_property(
        self, schema: Mapping[str, Any], named: Mapping[str, Any], more: Schema, level: int, path: str
    ) -> tuple[str | None, int, int]:
        """Return the rule of a property that the schema does not name, and the minimum and maximum number of them."""
        required = len(set(schema.get("required", [])))
        min_count = max(schema.get("minProperties", 0) - required, 0)
        max_count = min(schema.get("maxProperties", math.inf) - len(named), max(min_count, bounds.EXTRA_PROPERTIES))
        if max_count < 0 and not self._lenient:
            raise SchemaError(f"{path}.maxProperties", "must be at least the number of properties")
        value = (
            self.compile(more, level, f"{path}.additionalProperties") if more is not False and max_count > 0 else None
        )
        if value is None:
            return None, min_count, 0
        key = regex(f'"{_CHARACTER}{{0,{bounds.KEY_CHARACTERS}}}"')
        named_keys = " | ".join(literal(_to_json(name)) for name in named)
        key = self._rules.terminal(f"{key} & ~({named_keys})" if named_keys else key)
        return self._rules.add(f"{key} {COLON} {value}"), min_count, int(max_count)

    def _pairs(self, pairs: list[tuple[str, bool]], extra: str | None, min_count: int, max_count: int) -> str | None:
        """Return the body of an object: named properties in order, the optional ones may be missing, then others."""
        if extra is None and min_count:
            return None
        parts = [(self._rules.add(pair), not required) for pair, required in pairs]
        if extra and max_count:
            parts.append(
                (
                    self._rules.add(f"{extra} {_more_of(extra, max(min_count - 1, 0), max_count - 1)}".rstrip()),
                    not min_count,
                )
            )
        if not parts:
            return ""
        sequence, may_be_empty = self._sequence(parts)
        return f"({sequence})?" if may_be_empty else sequence

    def _sequence(self, parts: list[tuple[str, bool]]) -> tuple[str, bool]:
        """Return the rule of parts in order, separated by commas; optional parts may be missing, but not all parts.

        Parts are split in halves recursively, so that the depth of the rules is logarithmic in their number.

        Returns:
            The rule, and whether all parts are optional.
        """
        if len(parts) == 1:
            return parts[0]
        (left, left_empty), (right, right_empty) = (
            self._sequence(half) for half in (parts[: len(parts) // 2], parts[len(parts) // 2 :])
        )
        alternatives = [f"{left} {COMMA} {right}", *([left] if right_empty else []), *([right] if left_empty else [])]
        return self._rules.either(alternatives) if len(alternatives) > 1 else self._rules.add(
            alternatives[0]
        ), left_empty and right_empty

    def _array(self, schema: Mapping[str, Any], level: int, path: str) -> str | None:
        min_count = schema.get("minItems", 0)
        max_count = min(schema.get("maxItems", max(min_count, bounds.ARRAY_ITEMS)), bounds.MAX_ARRAY_ITEMS)
        if min_count > max_count:
            return None
        fixed = [
            self.compile(part, level, f"{path}.prefixItems[{index}]")
            for index, part in enumerate(schema.get("prefixItems", [])[:max_count])
        ]
        if None in fixed:
            return None
        items = schema.get("items", not fixed)
        item = self.compile(items, level, f"{path}.items") if items is not False and max_count > len(fixed) else None
        if item is None and min_count > len(fixed):
            return None
        body = f" {COMMA} ".join(part for part in fixed if part)
        if item:
            rest = _more_of if fixed else _list_of
            body += " " + rest(item, max(min_count - len(fixed), 0), max_count - len(fixed))
        return self._rules.add(_enclosed("[", body, "]"))

    def _string(self, schema: Mapping[str, Any], _level: int, path: str) -> str | None:
        min_length = schema.get("minLength", 0)
        format_name = schema.get("format") if schema.get("format") in _FORMATS else None
        default = _FORMAT_CHARACTERS if format_name else bounds.STRING_CHARACTERS
        max_length = min(schema.get("maxLength", max(min_length, default)), bounds.MAX_STRING_CHARACTERS)
        if min_length > max_length:
            return None
        if "pattern" not in schema and format_name is None:
            return self._rules.terminal(_string(min_length, max_length))
        text = {"type": "string", "minLength": min_length, "maxLength": max_length}
        text |= {
            key: schema[key] for key in ("pattern", "format") if key in schema and (key != "format" or format_name)
        }
        rule = self._rules.add(f"%json {json.dumps(text)}")
        path = f"{path}.{'pattern' if 'pattern' in schema else 'format'}"
        self._rules.patterns.setdefault((self._field, path.removeprefix(".")), rule)
        return rule

    def _integer(self, schema: Mapping[str, Any], _level: int, _path: str) -> str | None:
        low, high = _range(schema)
        first, last = math.ceil(low), math.floor(high)
        if first > last:
            return None
        if "multipleOf" in schema:
            text = {"type": "integer", "minimum": first, "maximum": last, "multipleOf": int(schema["multipleOf"])}
            return self._rules.add(f"%json {json.dumps(text)}")
        pattern = integers_between(first, last)
        return None if pattern is None else self._rules.terminal(regex(pattern))

    def _number(self, schema: Mapping[str, Any], level: int, path: str) -> str | None:
        if "multipleOf" in schema:
            return self._integer(schema, level, path)
        if not schema.keys() & {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}:
            return self._rules.terminal(regex(_number()))
        pattern = numbers_between(*_range(schema), places=bounds.DECIMAL_PLACES)
        return None if pattern is None else self._rules.terminal(regex(pattern))


def _range(schema: Mapping[str, Any]) -> tuple[Fraction, Fraction]:
    """Return the minimum and the maximum; a missing bound is far from the other one.

    A bound is the decimal number as written. An exclusive bound excludes the number in double precision, because
    parsers round: the range starts at the next double.
    """
    lows = [Fraction(str(schema[key])) for key in ("minimum",) if key in schema]
    highs = [Fraction(str(schema[key])) for key in ("maximum",) if key in schema]
    lows += [_next_float(schema[key], math.inf) for key in ("exclusiveMinimum",) if key in schema]
    highs += [_next_float(schema[key], -math.inf) for key in ("exclusiveMaximum",) if key in schema]
    default = Fraction(10**bounds.INTEGER_DIGITS - 1)
    low = max(lows) if lows else min([-default, *(10 * high for high in highs)])
    high = min(highs) if highs else max(default, 10 * low)
    return low, high


def _next_float(bound: float, towards: float) -> Fraction:
    return Fraction(repr(math.nextafter(float(bound), towards)))


def _references(schema: object) -> Iterator[str]:
    """Yield all `$ref`s within a part of a schema."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            if isinstance(part.get("$ref"), str):
                yield part["$ref"]
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


def _disjoint(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    kinds = set(types_of(one)), set(types_of(two))
    if all(kinds) and not kinds[0] & kinds[1] and not {"integer", "number"} <= kinds[0] | kinds[1]:
        return True
    if kinds == ({"object"}, {"object"}):
        named = set(one.get("required", [])) & set(two.get("required", []))
        return any(_have_disjoint_values(_property(one, name), _property(two, name)) for name in named)
    return _have_disjoint_values(one, two)


def _property(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = schema.get("properties", {}).get(name)
    return part if isinstance(part, Mapping) else {}


def _have_disjoint_values(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Whether both enumerate their values and have none in common."""
    lists = [
        part["enum"] if "enum" in part else [part["const"]] for part in (one, two) if {"const", "enum"} & part.keys()
    ]
    return len(lists) == 2 and not any(value in lists[1] for value in lists[0])


def _is_one_of(value: object, kinds: Sequence[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, int):
        return "integer" in kinds or "number" in kinds
    named = {str: "string", float: "number", list: "array", dict: "object", type(None): "null"}
    return named.get(type(value)) in kinds


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
