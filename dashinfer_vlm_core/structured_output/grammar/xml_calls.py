"""JSON schema to rules of a tool call in XML: a parameter per property, strings as they are, other values as JSON.

The rule of a value includes the tag after it: the lexer takes the longest text that a rule allows, and a string could
continue where a number ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from . import bounds
from .formats import FORMATS
from .json_schema import CompileType, SchemaCompiler
from .parameters import PARAMETER_END, parameter_json, parameter_types
from .rules import Rules, literal, regex
from .schema_shape import TYPES, Schema, SchemaError
from .values import any_value, escaped, named_properties, string_limits

_TAG = PARAMETER_END.strip()
_END = literal(PARAMETER_END)
_CHARACTER = r"[^\x00-\x08\x0B-\x1F\x7F]"
_NAME_CHARACTER = r"[^<>\x00-\x1F\x7F]"
_ANYTHING = r"(.|\n)*"
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""The parts of a regular expression: escapes, classes and characters."""

_WHITE_SPACE = r"[ \t\r\n]*"
_NESTED = {"object": "{", "array": r"\["}
_SCALARS = {
    "null": "null|None",
    "boolean": "true|false|True|False",
    "integer": r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?",
}
"""Texts that are read as a value of a type."""


def _text_without(tag: str) -> str:
    """Return the pattern of texts that do not contain `tag`, whose first character is nowhere else in it.

    It is not written as a complement, because the compiler proves that an intersection with one is empty in as many
    steps as the text may have characters.
    """
    rest = ""
    for char in map(escaped, reversed(tag[1:])):
        other = f"[^{tag[0]}{char}][^{tag[0]}]*"
        rest = f"(({other})?|{char}{rest})" if rest else f"({other})?"
    return f"[^{tag[0]}]*({tag[0]}{rest})*"


_WITHOUT_TAG = regex(_text_without(_TAG))


class CallCompiler(SchemaCompiler):
    """Compiles the schema of a tool's arguments to the rule of its parameters, and of the end of the call.

    Args:
        rules: the rules to add to.
        root: the schema, whose type is object.
        widened: as in `json_schema`.
        end: the text after the parameters.
    """

    def __init__(self, rules: Rules, root: Mapping[str, Any], widened: list[str] | None, *, end: str) -> None:
        super().__init__(rules, root, widened)
        self._end = literal(end)
        self._values_of_types: dict[frozenset[str], _ValueCompiler] = {}
        self.compile_by_type = {"object": self._object}

    def _any_value(self, _types: Collection[str] = TYPES) -> str:
        # The schema may be too complex to look at the types that it names.
        value = _ValueCompiler(self._rules, {}, None, types=frozenset(TYPES)).widest(True)
        return self._rules.add(f"{_repeated(self._parameter((), value), 0, bounds.EXTRA_PROPERTIES)} {self._end}")

    def _enum(self, schema: Mapping[str, Any], path: str) -> str | None:
        key = "enum" if "enum" in schema else "const"
        raise SchemaError(f"{path}.{key}", "cannot be guaranteed for the arguments of a call: remove it")

    def _object(self, schema: Mapping[str, Any], level: int, path: str) -> str | None:
        names = self._property_names(schema, f"{path}.propertyNames")
        more: Schema = schema.get("additionalProperties", "properties" not in schema)
        named = named_properties(schema, names, more)
        min_count, max_count = self._numbers_of_others(schema, named, path)
        is_closed = more is False or max_count <= 0 or names.listed is not None
        if is_closed and min_count:
            raise SchemaError(f"{path}.minProperties", "cannot be guaranteed without `additionalProperties`: remove it")
        if names.text and not is_closed:
            raise SchemaError(f"{path}.propertyNames", "cannot be guaranteed for the arguments of a call: remove it")
        parts = self._named_parts(named, frozenset(schema.get("required", ())), level, path)
        if parts is None:
            return None
        body = [f"({rule})?" if may_be_missing else rule for rule, may_be_missing in parts]
        other = None if is_closed else self._other_parameter(named, more, level, f"{path}.additionalProperties")
        if other:
            body.append(_repeated(other, min_count, max_count))
        return self._rules.add(" ".join([*body, self._end]))

    def _pair(self, name: str, schema: Schema, level: int, path: str) -> str | None:
        if not re.fullmatch(f"{_NAME_CHARACTER}+", name):
            raise SchemaError(path, "cannot be the name of a parameter: remove <, > and control characters from it")
        value = self._value(name, schema, level, path)
        return None if value is None else self._rules.add(f"{literal(_begin(name))} {value}")

    def _other_parameter(self, named: Collection[str], schema: Schema, level: int, path: str) -> str | None:
        value = self._value("", schema, level, path)
        return None if value is None else self._parameter(named, value)

    def _parameter(self, excluded_names: Collection[str], value: str) -> str:
        key = regex(_begin(f"{_NAME_CHARACTER}{{1,{bounds.KEY_CHARACTERS}}}").replace("\n", r"\n"))
        excluded = " | ".join(literal(_begin(name)) for name in excluded_names)
        key = self._rules.terminal(f"{key} & ~({excluded})" if excluded else key)
        return self._rules.add(f"{key} {value}")

    def _value(self, name: str, schema: Schema, level: int, path: str) -> str | None:
        types = parameter_types(self._root, name, self._steps)
        if types not in self._values_of_types:
            self._values_of_types[types] = _ValueCompiler(self._rules, self._root, self._widened, types=types)
        return self._values_of_types[types].compile(schema, level, path)


class _ValueCompiler(SchemaCompiler):
    """Compiles values of parameters, each with the tag after it. No string is read as a value of another type.

    Args:
        rules: the rules to add to.
        root: the schema of the arguments.
        widened: as in `json_schema`.
        types: the types as which the parser reads a value.
    """

    def __init__(
        self, rules: Rules, root: Mapping[str, Any], widened: list[str] | None, *, types: frozenset[str]
    ) -> None:
        super().__init__(rules, root, widened)
        self._types = types
        self._text = " & ".join([_WITHOUT_TAG, *_not_read_as(types)])
        json_types = SchemaCompiler(rules, root, widened).compile_by_type
        self.compile_by_type = {name: self._ending(compiler) for name, compiler in json_types.items()}
        self.compile_by_type["string"] = self._string

    def _ending(self, compiler: CompileType) -> CompileType:
        def compile_value(schema: Mapping[str, Any], level: int, path: str) -> str | None:
            rule = compiler(schema, level, path)
            if rule and "multipleOf" in schema and not _is_terminal(rule) and "string" in self._types:
                reason = "cannot be guaranteed for a parameter that may be a string: remove it"
                raise SchemaError(f"{path}.multipleOf", reason)
            return rule and self._with_end(rule)

        return compile_value

    def _with_end(self, rule: str) -> str:
        body = f"{rule} {_END}"
        return self._rules.lazy(body) if _is_terminal(rule) else self._rules.add(body)

    def _any_value(self, types: Collection[str] = TYPES) -> str:
        rules = [self.compile_by_type[name]({}, 0, "") for name in types if name not in _NESTED]
        if nested := [name for name in types if name in _NESTED]:
            rules.append(self._with_end(any_value(self._rules, nested)))
        return self._rules.either([rule for rule in rules if rule])

    def _enum(self, schema: Mapping[str, Any], path: str) -> str | None:
        texts = []
        for value in self._values(schema, path):
            encoded = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            text = value if isinstance(value, str) else encoded
            if _TAG not in text and parameter_json(text, self._types) == encoded:
                texts.append(text)
        return self._with_end(self._rules.one_of(texts)) if texts else None

    def _string(self, schema: Mapping[str, Any], _level: int, path: str) -> str | None:
        keywords, min_length, max_length = string_limits(schema)
        if min_length > max_length:
            return None
        text = f"{regex(f'{_CHARACTER}{{{min_length},{max_length}}}')} & {self._text}"
        if not keywords:
            return self._with_end(self._rules.terminal(text))
        patterns = [_containing(keywords["pattern"])] if "pattern" in keywords else []
        patterns += [FORMATS[keywords["format"]]] if "format" in keywords else []
        body = " & ".join([*map(regex, patterns), text])
        return self._with_end(self._rules.pattern(body, f"{path}.{next(iter(keywords))}", is_terminal=True))


def _begin(name: str) -> str:
    return f"<parameter={name}>\n"


def _repeated(rule: str, min_count: int, max_count: int) -> str:
    return f"({rule}){{{min_count},{max_count}}}"


def _is_terminal(rule: str) -> bool:
    return rule[0] in 'T"'


def _not_read_as(types: Collection[str]) -> list[str]:
    """Return the bodies of the rules of texts that are not read as a value of these types other than a string."""
    if "string" not in types:
        return []
    bodies = []
    if scalars := [pattern for name, pattern in _SCALARS.items() if name in types]:
        bodies.append("~" + regex(f"{_WHITE_SPACE}({'|'.join(scalars)}){_WHITE_SPACE}"))
    if first := "".join(char for name, char in _NESTED.items() if name in types):
        bodies.append(regex(rf"{_WHITE_SPACE}([^ \t\r\n{first}]{_ANYTHING})?"))
    return bodies


def _containing(pattern: str) -> str:
    """Return the pattern of texts that contain a match, with `^` and `$` only at the ends of its alternatives."""
    alternatives: list[list[str]] = [[]]
    depth = 0
    for part in _PARTS.findall(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            alternatives.append([])
        else:
            alternatives[-1].append(part)
    return "|".join(map(_unanchored, alternatives))


def _unanchored(parts: list[str]) -> str:
    begin = "" if parts[:1] == ["^"] else _ANYTHING
    end = "" if parts[-1:] == ["$"] else _ANYTHING
    middle = parts[not begin : len(parts) - (not end)]
    return f"{begin}({escaped(''.join(middle))}){end}"
