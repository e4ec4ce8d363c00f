"""JSON schema -> rules: what OpenAI's and pydantic's schemas use, and a refusal of what could not be guaranteed."""

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
    """The rule of the JSON texts that a schema describes: one blank at most after `,` and `:`, none elsewhere.

    Properties come in the schema's order. Properties that it does not name are left out unless `additionalProperties`
    asks for them.

    Args:
        rules: get the rules.
        schema: parsed JSON of bounded size and depth.
        field: of the request that holds it, for `Rules.patterns`.
        lenient: pass over keywords that cannot be guaranteed.

    Raises:
        SchemaError: it is malformed, too complex, cannot be guaranteed, or describes nothing.
    """
    try:
        rule = _Compiler(rules, schema, field=field, lenient=lenient).compile(schema, level=0, place="")
    except TooManyRules:
        raise SchemaError("", "is too large: make it simpler") from None
    if rule is None:
        raise SchemaError("", "describes no value that could be written")
    return rule


def any_object(rules: Rules) -> str:
    """The rule of any JSON object, nested to a bounded depth."""
    return _free(rules, bounds.ANY_DEPTH)[1]


def _string(least: int = 0, most: int = bounds.STRING_CHARACTERS) -> str:
    return regex(f'"{_CHARACTER}{{{least},{most}}}"')


def _free(rules: Rules, depth: int) -> tuple[str, str]:
    """Rules of any value and any object; arrays and objects nest `depth` deep."""
    scalars = ["true", "false", "null"]
    value = rules.either([*map(literal, scalars), _string(), regex(_number())])
    held = pairs = ""
    for _ in range(depth):
        key = rules.terminal(_string(most=bounds.KEY_CHARACTERS))
        held = rules.add(_braced("[", _list_of(value, 0, bounds.ANY_ITEMS), "]"))
        pair = rules.add(f"{key} {COLON} {value}")
        pairs = rules.add(_braced("{", _list_of(pair, 0, bounds.ANY_ITEMS), "}"))
        value = rules.either([value, held, pairs])
    return value, pairs


def _number() -> str:
    return rf"-?(0|[1-9][0-9]{{0,{bounds.INTEGER_DIGITS - 1}}})(\.[0-9]{{1,{bounds.DECIMAL_PLACES}}})?"


def _list_of(item: str, least: int, most: int) -> str:
    """Between `least` and `most` of `item`, with commas between them."""
    if most == 0:
        return ""
    many = f"{item} {_more_of(item, max(least - 1, 0), most - 1)}".rstrip()
    return many if least else f"({many})?"


def _more_of(item: str, least: int, most: int) -> str:
    """As `_list_of`, behind another item."""
    return f"({COMMA} {item}){{{least},{most}}}" if most else ""


def _braced(left: str, body: str, right: str) -> str:
    return " ".join(filter(None, (literal(left), body, literal(right))))


class _Compiler:
    """Turns the parts of one schema into rules; None stands for a part that nothing can satisfy."""

    def __init__(self, rules: Rules, root: Schema, *, field: str, lenient: bool) -> None:
        self._rules = rules
        self._field = field
        self._root = root
        self._lenient = lenient
        self._steps = self._depth = 0
        self._referred: dict[tuple[str, int], str | None] = {}
        self._reached: dict[str, frozenset[str]] = {}
        self._of_type: dict[str, Callable[[Mapping[str, Any], int, str], str | None]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": self._number,
            "integer": self._integer,
            "boolean": lambda *_: self._rules.add('"true" | "false"'),
            "null": lambda *_: literal("null"),
        }

    def compile(self, schema: Schema, level: int, place: str) -> str | None:
        """The rule of a part of the schema.

        Args:
            schema: the part.
            level: how many references that lead back to themselves were followed.
            place: where the part stands, for messages.
        """
        self._count()
        self._depth += 1
        if self._depth > bounds.MAX_NESTING:
            raise SchemaError("", f"nests deeper than {bounds.MAX_NESTING} levels: make it flatter")
        try:
            return self._compiled(schema, level, place)
        finally:
            self._depth -= 1

    def _compiled(self, schema: Schema, level: int, place: str) -> str | None:
        if isinstance(schema, bool):
            return _free(self._rules, bounds.ANY_DEPTH)[0] if schema else None
        check_keywords(schema, place, lenient=self._lenient)
        asked = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        if "$ref" in asked:
            return self._reference(asked, level, place)
        if "allOf" in asked:
            return self._together(asked, level, place)
        for key in ("anyOf", "oneOf"):
            if key in asked:
                return self._one_of(asked, key, level, place)
        return self._value(asked, level, place)

    def _value(self, schema: Mapping[str, Any], level: int, place: str) -> str | None:
        if "const" in schema or "enum" in schema:
            return self._listed(schema, place)
        types = types_of(schema)
        if not types:
            return self.compile(True, level, place)
        found = [rule for name in types if (rule := self._of_type[name](schema, level, place)) is not None]
        return self._rules.either(found) if found else None

    # References and combinations

    def _reference(self, schema: Mapping[str, Any], level: int, place: str) -> str | None:
        pointer, beside = schema["$ref"], {key: value for key, value in schema.items() if key != "$ref"}
        level += pointer in self._reachable(pointer, place)
        if level > bounds.MAX_RECURSION:
            return None
        if beside:
            return self.compile(merge(self._resolved(pointer, place), beside, place), level, place)
        if (pointer, level) not in self._referred:
            self._referred[pointer, level] = self.compile(self._resolved(pointer, place), level, pointer)
        return self._referred[pointer, level]

    def _together(self, schema: Mapping[str, Any], level: int, place: str) -> str | None:
        whole: Schema = {key: value for key, value in schema.items() if key != "allOf"}
        for part in schema["allOf"]:
            self._count()
            if isinstance(part, Mapping) and isinstance(part.get("$ref"), str):
                pointer, beside = part["$ref"], {key: value for key, value in part.items() if key != "$ref"}
                level += pointer in self._reachable(pointer, place)
                if level > bounds.MAX_RECURSION:
                    return None
                part = merge(self._resolved(pointer, place), beside, place)  # noqa: PLW2901 - the part, spelled out
            whole = merge(whole, part, place)
        return self.compile(whole, level, place)

    def _one_of(self, schema: Mapping[str, Any], key: str, level: int, place: str) -> str | None:
        beside = {name: value for name, value in schema.items() if name != key}
        branches = schema[key]
        if key == "oneOf" and not self._lenient and not self._apart(branches, place):
            raise SchemaError(f"{place}.oneOf", "has alternatives that one value could satisfy at once: write `anyOf`")
        found = []
        for index, branch in enumerate(branches):
            whole = merge(branch, beside, place) if beside else branch
            rule = self.compile(whole, level, f"{place}.{key}[{index}]")
            found += [rule] if rule is not None else []
        return self._rules.either(found) if found else None

    def _apart(self, branches: Sequence[Schema], place: str) -> bool:
        """Whether no value can satisfy two of the branches, as far as types and discriminators tell."""
        plain = [self._plain(branch, place) for branch in branches]
        return all(_disjoint(one, two) for index, one in enumerate(plain) for two in plain[:index])

    def _plain(self, schema: Schema, place: str) -> Mapping[str, Any]:
        for _ in range(bounds.MAX_RECURSION):
            if isinstance(schema, bool) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._resolved(schema["$ref"], place)
        if isinstance(schema, bool):
            return {}
        check_keywords(schema, place, lenient=True)
        return schema

    def _resolved(self, pointer: str, place: str) -> Schema:
        """What a reference within the schema (RFC 6901) leads to."""
        found: Any = self._root
        try:
            if not pointer.startswith("#"):
                raise KeyError(pointer)
            for step in filter(None, pointer[1:].split("/")):
                key = step.replace("~1", "/").replace("~0", "~")
                found = found[int(key)] if isinstance(found, list) else found[key]
        except (KeyError, IndexError, ValueError, TypeError):
            raise SchemaError(f"{place}.$ref", "must name a part of the same schema, such as #/$defs/Name") from None
        if not isinstance(found, (Mapping, bool)):
            raise SchemaError(f"{place}.$ref", "leads to what is no schema")
        return found

    def _reachable(self, pointer: str, place: str) -> frozenset[str]:
        """The references that can be met from where a reference leads to."""
        if pointer not in self._reached:
            seen: set[str] = set()
            waiting = [pointer]
            while waiting:
                for found in _references(self._resolved(waiting.pop(), place)):
                    self._count()
                    if found not in seen:
                        seen.add(found)
                        waiting.append(found)
            self._reached[pointer] = frozenset(seen)
        return self._reached[pointer]

    def _count(self) -> None:
        self._steps += 1
        if self._steps > bounds.MAX_STEPS:
            raise SchemaError("", "is too complex: make it smaller, or its references fewer")

    # Values

    def _listed(self, schema: Mapping[str, Any], place: str) -> str | None:
        """One of the values of `const` or `enum`, of those that `type` allows."""
        beside = sorted(schema.keys() - {"const", "enum", "type"})
        if beside and not self._lenient:
            raise SchemaError(f"{place}.{beside[0]}", "cannot stand beside `const` and `enum`: leave it out")
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if "const" in schema:
            values = [value for value in values if _spelled(value) == _spelled(schema["const"])]
        kinds = types_of({"type": schema["type"]}) if "type" in schema else ()
        spelled = [_spelled(value) for value in values if not kinds or _is_one_of(value, kinds)]
        return self._rules.terminal(" | ".join(map(literal, dict.fromkeys(spelled)))) if spelled else None

    def _object(self, schema: Mapping[str, Any], level: int, place: str) -> str | None:
        properties, required = dict(schema.get("properties", {})), schema.get("required", [])
        more = schema.get("additionalProperties", "properties" not in schema)
        for name in required:
            properties.setdefault(name, schema.get("additionalProperties", True))
        pairs: list[tuple[str, bool]] = []
        for name, part in properties.items():
            value = self.compile(part, level, f"{place}.properties.{name}")
            if value is None and name in required:
                return None
            if value is not None:
                pairs.append((f"{literal(_spelled(name))} {COLON} {value}", name in required))
        body = self._pairs(pairs, *self._extra(schema, properties, more, level, place))
        return None if body is None else self._rules.add(_braced("{", body, "}"))

    def _extra(
        self, schema: Mapping[str, Any], named: Mapping[str, Any], more: Schema, level: int, place: str
    ) -> tuple[str | None, int, int]:
        """The rule of a property that the schema does not name, and how many of them there are: least and most."""
        required = len(set(schema.get("required", [])))
        least = max(schema.get("minProperties", 0) - required, 0)
        most = min(schema.get("maxProperties", math.inf) - len(named), max(least, bounds.EXTRA_PROPERTIES))
        if most < 0 and not self._lenient:
            raise SchemaError(f"{place}.maxProperties", "must not be below the number of properties")
        value = self.compile(more, level, f"{place}.additionalProperties") if more is not False and most > 0 else None
        if value is None:
            return None, least, 0
        key = regex(f'"{_CHARACTER}{{0,{bounds.KEY_CHARACTERS}}}"')
        taken = " | ".join(literal(_spelled(name)) for name in named)
        key = self._rules.terminal(f"{key} & ~({taken})" if taken else key)
        return self._rules.add(f"{key} {COLON} {value}"), least, int(most)

    def _pairs(self, pairs: list[tuple[str, bool]], extra: str | None, least: int, most: int) -> str | None:
        """The inside of an object: named pairs in order, those that are not required may be missing, then others."""
        if extra is None and least:
            return None
        parts = [(self._rules.add(pair), not required) for pair, required in pairs]
        if extra and most:
            parts.append(
                (self._rules.add(f"{extra} {_more_of(extra, max(least - 1, 0), most - 1)}".rstrip()), not least)
            )
        if not parts:
            return ""
        row, may_be_empty = self._row(parts)
        return f"({row})?" if may_be_empty else row

    def _row(self, parts: list[tuple[str, bool]]) -> tuple[str, bool]:
        """Parts in order with commas between them, those that may be missing or not, but not all of them missing.

        Halved again and again: rules stand within each other as deep as the logarithm of their number.

        Returns:
            The rule, and whether all parts may be missing.
        """
        if len(parts) == 1:
            return parts[0]
        (left, left_empty), (right, right_empty) = (
            self._row(half) for half in (parts[: len(parts) // 2], parts[len(parts) // 2 :])
        )
        ways = [f"{left} {COMMA} {right}", *([left] if right_empty else []), *([right] if left_empty else [])]
        return self._rules.either(ways) if len(ways) > 1 else self._rules.add(ways[0]), left_empty and right_empty

    def _array(self, schema: Mapping[str, Any], level: int, place: str) -> str | None:
        least = schema.get("minItems", 0)
        most = min(schema.get("maxItems", max(least, bounds.ARRAY_ITEMS)), bounds.MAX_ARRAY_ITEMS)
        if least > most:
            return None
        fixed = [
            self.compile(part, level, f"{place}.prefixItems[{index}]")
            for index, part in enumerate(schema.get("prefixItems", [])[:most])
        ]
        if None in fixed:
            return None
        free = schema.get("items", not fixed)
        item = self.compile(free, level, f"{place}.items") if free is not False and most > len(fixed) else None
        if item is None and least > len(fixed):
            return None
        body = f" {COMMA} ".join(part for part in fixed if part)
        if item:
            rest = _more_of if fixed else _list_of
            body += " " + rest(item, max(least - len(fixed), 0), most - len(fixed))
        return self._rules.add(_braced("[", body, "]"))

    def _string(self, schema: Mapping[str, Any], _level: int, place: str) -> str | None:
        least = schema.get("minLength", 0)
        form = schema.get("format") if schema.get("format") in _FORMATS else None
        usual = _FORMAT_CHARACTERS if form else bounds.STRING_CHARACTERS
        most = min(schema.get("maxLength", max(least, usual)), bounds.MAX_STRING_CHARACTERS)
        if least > most:
            return None
        if "pattern" not in schema and form is None:
            return self._rules.terminal(_string(least, most))
        text = {"type": "string", "minLength": least, "maxLength": most}
        text |= {key: schema[key] for key in ("pattern", "format") if key in schema and (key != "format" or form)}
        rule = self._rules.add(f"%json {json.dumps(text)}")
        place = f"{place}.{'pattern' if 'pattern' in schema else 'format'}"
        self._rules.patterns.setdefault((self._field, place.removeprefix(".")), rule)
        return rule

    def _integer(self, schema: Mapping[str, Any], _level: int, _place: str) -> str | None:
        low, high = _range(schema)
        first, last = math.ceil(low), math.floor(high)
        if first > last:
            return None
        if "multipleOf" in schema:
            text = {"type": "integer", "minimum": first, "maximum": last, "multipleOf": int(schema["multipleOf"])}
            return self._rules.add(f"%json {json.dumps(text)}")
        pattern = integers_between(first, last)
        return None if pattern is None else self._rules.terminal(regex(pattern))

    def _number(self, schema: Mapping[str, Any], level: int, place: str) -> str | None:
        if "multipleOf" in schema:
            return self._integer(schema, level, place)
        if not schema.keys() & {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}:
            return self._rules.terminal(regex(_number()))
        pattern = numbers_between(*_range(schema), places=bounds.DECIMAL_PLACES)
        return None if pattern is None else self._rules.terminal(regex(pattern))


def _range(schema: Mapping[str, Any]) -> tuple[Fraction, Fraction]:
    """The least and the largest number; a missing bound is far from the other one.

    A bound is the decimal number that was written. What is excluded is the number in double precision: the range begins
    at the next one, since readers round.
    """
    lows = [Fraction(str(schema[key])) for key in ("minimum",) if key in schema]
    highs = [Fraction(str(schema[key])) for key in ("maximum",) if key in schema]
    lows += [_beyond(schema[key], math.inf) for key in ("exclusiveMinimum",) if key in schema]
    highs += [_beyond(schema[key], -math.inf) for key in ("exclusiveMaximum",) if key in schema]
    usual = Fraction(10**bounds.INTEGER_DIGITS - 1)
    low = max(lows) if lows else min([-usual, *(10 * high for high in highs)])
    high = min(highs) if highs else max(usual, 10 * low)
    return low, high


def _beyond(bound: float, towards: float) -> Fraction:
    return Fraction(repr(math.nextafter(float(bound), towards)))


def _references(schema: object) -> Iterator[str]:
    """The `$ref`s anywhere within a part of a schema."""
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
        return any(_values_apart(_property(one, name), _property(two, name)) for name in named)
    return _values_apart(one, two)


def _property(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = schema.get("properties", {}).get(name)
    return part if isinstance(part, Mapping) else {}


def _values_apart(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Whether both list their values, and share none."""
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


def _spelled(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
