"""JSON schema to rules: supports what OpenAI's and pydantic's schemas use; rejects or widens the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from . import bounds
from .combinations import SchemaMerger, are_disjoint
from .numbers import number_rule
from .references import References
from .rules import Rules, TooComplex, literal
from .schema_shape import (
    ANNOTATIONS,
    TYPES,
    InvalidSchema,
    Schema,
    SchemaError,
    comparable,
    find_faults,
    is_one_of,
    is_types,
    normalized,
    types_of,
)
from .values import (
    COLON,
    COMMA,
    LENGTHS,
    Part,
    PropertyNames,
    any_value,
    list_of,
    more_of,
    named_properties,
    sequence,
    string_rule,
)

CompileType: TypeAlias = Callable[[Mapping[str, Any], int, str], str | None]
"""Compiles a schema of one type, from its keywords, its level and its path."""

_COMBINATIONS = ("$ref", "allOf", "anyOf", "oneOf")


def json_schema(rules: Rules, schema: Mapping[str, Any], *, widened: list[str] | None = None) -> str:
    """Add the rules of the JSON texts that a schema allows: up to one space after `,` and `:`, none elsewhere.

    Properties are in the schema's order. Properties that it does not name are allowed only if `additionalProperties`
    is set.

    Args:
        rules: the rules to add to.
        schema: parsed JSON of bounded size and depth.
        widened: what cannot be guaranteed is ignored, and its path is added to this list; None rejects it. A schema
            that is not valid is always rejected.

    Returns:
        The name of the schema's rule.

    Raises:
        SchemaError: the schema is invalid; or, without `widened`, is too complex, cannot be guaranteed, or allows no
            value.
    """
    return SchemaCompiler(rules, schema, widened).compile_root()


class SchemaCompiler:
    """Compiles the parts of one schema to rules; None represents a part that no value satisfies.

    Subclasses write some values in another way than JSON.

    Args:
        rules: the rules to add to.
        root: the schema, in which references are looked up.
        widened: as in `json_schema`.
    """

    def __init__(self, rules: Rules, root: Mapping[str, Any], widened: list[str] | None) -> None:
        self._rules = rules
        self._root = root
        self._steps = rules.steps
        self._references = References(root, self._steps)
        self._merge = SchemaMerger(self._steps).merge
        self._widened = widened
        self._rules_by_reference: dict[tuple[str, int], str | None] = {}
        # Scalars are first, and arrays last: what is wrong is found before the parts of the others are compiled.
        self.compile_by_type: dict[str, CompileType] = {
            "string": lambda schema, _, path: string_rule(rules, schema, path),
            "number": lambda schema, _, path: number_rule(rules, schema, path, places=bounds.DECIMAL_PLACES),
            "integer": lambda schema, _, path: number_rule(rules, schema, path, places=0),
            "boolean": lambda *_: rules.one_of(("true", "false")),
            "null": lambda *_: literal("null"),
            "object": self._object,
            "array": self._array,
        }

    def compile_root(self) -> str:
        """Compile the whole schema; raises like `json_schema`."""
        count = len(self._rules)
        try:
            rule = self.compile(self._root, level=0, path="")
            if rule is not None:
                return rule
            self.tolerate(SchemaError("", "allows no value"))
        except TooComplex:
            if self._widened is None:
                raise
            self._rules.discard(count)
            self._widened.append("")
        return self.widest(self._root)

    def compile(self, schema: Schema, level: int, path: str) -> str | None:
        """Compile a part of the schema; return its rule.

        Args:
            schema: the part.
            level: the number of recursive references that were followed.
            path: the path of the part, for messages.
        """
        try:
            with self._steps.nested():
                self._steps.count_text(path)
                return self._compile(schema, level, path)
        except TooComplex:
            raise
        except SchemaError as error:
            self.tolerate(error)
            reduced = _without_fault(schema, error, path)
        return self.widest(schema) if reduced is None else self.compile(reduced, level, path)

    def widest(self, schema: Schema) -> str:
        """Return the rule of any value of the types that a schema names."""
        named = schema.get("type") if isinstance(schema, Mapping) else None
        return self._any_value(types_of({"type": named}) if is_types(named) else TYPES)

    def tolerate(self, error: SchemaError) -> None:
        """Record the path of something that cannot be guaranteed, and raise its error unless it may be widened."""
        if self._widened is None or isinstance(error, InvalidSchema):
            raise error
        self._widened.append(error.path)

    def _compile(self, schema: Schema, level: int, path: str) -> str | None:
        if isinstance(schema, bool):
            return self._any_value() if schema else None
        keywords = self._keywords(schema, path)
        if "$ref" in keywords:
            return self._reference(keywords, level, path)
        if "allOf" in keywords:
            return self._all_of(keywords, level, path)
        for key in ("anyOf", "oneOf"):
            if key in keywords:
                return self._any_of(keywords, key, level, path)
        if keywords.keys() & {"const", "enum"}:
            return self._enum(keywords, path)
        types = types_of(keywords)
        if not types:
            return self._any_value()
        compilers = [compiler for name, compiler in self.compile_by_type.items() if name in types]
        return self._either([compiler(keywords, level, path) for compiler in compilers])

    def _keywords(self, schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        self._steps.count_keywords(schema)
        dropped = set(ANNOTATIONS)
        for key, error in find_faults(schema, path):
            self.tolerate(error)
            dropped.add(key)
        return normalized({key: value for key, value in schema.items() if key not in dropped})

    def _without_faults(self, schema: Schema, path: str) -> Schema:
        return schema if isinstance(schema, bool) else self._keywords(schema, path)

    def _either(self, rules: list[str | None]) -> str | None:
        possible = [rule for rule in rules if rule is not None]
        return self._rules.either(possible) if possible else None

    # References and combinations

    def _reference(self, schema: Mapping[str, Any], level: int, path: str) -> str | None:
        pointer = schema["$ref"]
        if len(schema) > 1:
            return self._all_of({"allOf": [{"$ref": pointer}, _without(schema, "$ref")]}, level, path)
        level += self._references.is_recursive(pointer)
        if level > bounds.MAX_RECURSION:
            return None
        if (pointer, level) not in self._rules_by_reference:
            target = self._references.target(pointer, path)
            self._rules_by_reference[pointer, level] = self.compile(target, level, pointer)
        return self._rules_by_reference[pointer, level]

    def _all_of(self, schema: Mapping[str, Any], level: int, path: str) -> str | None:
        whole: Schema = _without(schema, "allOf")
        for index, part in enumerate(schema["allOf"]):
            siblings = part
            if isinstance(part, Mapping) and isinstance(part.get("$ref"), str):
                level += self._references.is_recursive(part["$ref"])
                if level > bounds.MAX_RECURSION:
                    return None
                target = self._references.target(part["$ref"], path)
                whole = self._merge(whole, self._without_faults(target, part["$ref"]), path)
                siblings = _without(part, "$ref")
            whole = self._merge(whole, self._without_faults(siblings, f"{path}.allOf[{index}]"), path)
        return self.compile(whole, level, path)

    def _any_of(self, schema: Mapping[str, Any], key: str, level: int, path: str) -> str | None:
        siblings = _without(schema, key)
        paths = {f"{path}.{key}[{index}]": branch for index, branch in enumerate(schema[key])}
        if key == "oneOf" and self._widened is None and not self._are_disjoint(paths):
            reason = "has alternatives that one value could satisfy at the same time: use `anyOf`"
            raise SchemaError(f"{path}.oneOf", reason)
        if siblings:  # all before one is compiled: without a fault, they are compiled again
            paths = {
                place: self._merge(self._without_faults(branch, place), siblings, path)
                for place, branch in paths.items()
            }
        return self._either([self.compile(branch, level, place) for place, branch in paths.items()])

    def _are_disjoint(self, branches: Mapping[str, Schema]) -> bool:
        return are_disjoint([self._resolve(branch, path) for path, branch in branches.items()], self._steps)

    def _resolve(self, schema: Schema, path: str) -> Mapping[str, Any]:
        for _ in range(bounds.MAX_RECURSION):
            if isinstance(schema, bool) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._references.target(schema["$ref"], path)
        return {} if isinstance(schema, bool) else self._keywords(schema, path)

    # Values

    def _any_value(self, types: Collection[str] = TYPES) -> str:
        return any_value(self._rules, types)

    def _enum(self, schema: Mapping[str, Any], path: str) -> str | None:
        texts = [json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in self._values(schema, path)]
        return self._rules.one_of(texts) if texts else None

    def _values(self, schema: Mapping[str, Any], path: str) -> list[Any]:
        for key in sorted(schema.keys() - {"const", "enum", "type"}):
            self.tolerate(SchemaError(f"{path}.{key}", "cannot be combined with `const` or `enum`: remove it"))
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        self._steps.count_values(values)
        if "const" in schema:
            const = comparable(schema["const"])
            values = [value for value in values if comparable(value) == const]
        kinds = types_of({"type": schema["type"]}) if "type" in schema else ()
        return [value for value in values if not kinds or is_one_of(value, kinds)]

    def _array(self, schema: Mapping[str, Any], level: int, path: str) -> str | None:
        min_count = schema.get("minItems", 0)
        max_count = min(schema.get("maxItems", max(min_count, bounds.ARRAY_ITEMS)), bounds.MAX_ARRAY_ITEMS)
        if min_count > max_count:
            return None
        fixed: list[str] = []
        for index, part in enumerate(schema.get("prefixItems", [])[:max_count]):
            rule = self.compile(part, level, f"{path}.prefixItems[{index}]")
            if rule is None:
                return None
            fixed.append(rule)
        items = schema.get("items", "prefixItems" not in schema)
        item = self.compile(items, level, f"{path}.items") if items is not False and max_count > len(fixed) else None
        if item is None and min_count > len(fixed):
            return None
        body = f" {COMMA} ".join(fixed)
        if item:
            rest = more_of if fixed else list_of
            body += " " + rest(item, max(min_count - len(fixed), 0), max_count - len(fixed))
        return self._rules.add(f'"[" {body} "]"')

    def _object(self, schema: Mapping[str, Any], level: int, path: str) -> str | None:
        # Named properties are in order, others follow: if `additionalProperties` is set, or the schema names none.
        names = self._property_names(schema, f"{path}.propertyNames")
        more: Schema = schema.get("additionalProperties", "properties" not in schema)
        named = named_properties(schema, names, more)
        if named and names.has_pattern:
            raise SchemaError(f"{path}.propertyNames", "cannot be guaranteed next to `properties`: remove it")
        # What can be wrong is found before the properties are compiled: without the fault, they are compiled again.
        min_count, max_count = self._numbers_of_others(schema, named, path)
        is_closed = more is False or max_count <= 0
        key = None if is_closed else names.key_rule(self._rules, named, f"{path}.propertyNames")
        required = frozenset(schema.get("required", ()))
        parts = self._named_parts(named, required, level, path)
        if parts is None:
            return None
        value = self.compile(more, level, f"{path}.additionalProperties") if key else None
        if value:
            pair = self._rules.add(f"{key} {COLON} {value}")
            others = list_of(pair, max(min_count, 1), max_count)
            parts.append((self._rules.add(others), not min_count))
        elif min_count and (min_count > 1 or required or not parts):
            return None
        body, may_be_empty = sequence(self._rules, parts) if parts else ("", False)
        content = f"({body})?" if may_be_empty and not min_count else body
        return self._rules.add(f'"{{" {content} "}}"')

    def _named_parts(
        self, named: Mapping[str, Schema], required: frozenset[str], level: int, path: str
    ) -> list[Part] | None:
        """Return the parts of the named properties; None if a required one has no value."""
        parts: list[Part] = []
        for name, part in named.items():
            pair = self._pair(name, part, level, f"{path}.properties.{name}")
            if pair is not None:
                parts.append((pair, name not in required))
            elif name in required:
                return None
        return parts

    def _pair(self, name: str, schema: Schema, level: int, path: str) -> str | None:
        value = self.compile(schema, level, path)
        key = literal(json.dumps(name, ensure_ascii=False))
        return None if value is None else self._rules.add(f"{key} {COLON} {value}")

    def _numbers_of_others(self, schema: Mapping[str, Any], named: Mapping[str, Schema], path: str) -> tuple[int, int]:
        min_count = max(schema.get("minProperties", 0) - len(set(schema.get("required", ()))), 0)
        max_count = max(min_count, bounds.EXTRA_PROPERTIES)
        if "maxProperties" in schema:
            num_allowed = sum(part is not False for part in named.values())
            max_count = min(schema["maxProperties"] - num_allowed, max_count)
        if max_count < 0:
            self.tolerate(SchemaError(f"{path}.maxProperties", "must be at least the number of properties"))
        return min_count, max_count

    def _property_names(self, schema: Mapping[str, Any], path: str) -> PropertyNames:
        reason = "can be guaranteed only with `enum`, `const`, and keywords of strings: remove it"
        part = schema.get("propertyNames", True)
        if isinstance(part, Mapping) and "$ref" in part and not part.keys() <= {"$ref", *ANNOTATIONS}:
            raise SchemaError(path, reason)
        names = self._resolve(part, path)
        if part is False or ("type" in names and "string" not in types_of(names)):
            return PropertyNames(listed={})
        if names.keys() & {"enum", "const"}:
            listed = [value for value in self._values(names, path) if isinstance(value, str)]
            return PropertyNames(listed=dict.fromkeys(listed))
        text = _without(names, "type")
        if not text.keys() <= {*LENGTHS, "pattern", "format"}:
            raise SchemaError(path, reason)
        return PropertyNames(text=text)


def _without(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return {name: value for name, value in schema.items() if name != key}


def _without_fault(schema: Schema, error: SchemaError, path: str) -> Schema | None:
    """Return a schema without the keyword at fault; None if no keyword can be blamed."""
    if isinstance(schema, bool):
        return None
    key = error.path.removeprefix(path.removeprefix(".")).removeprefix(".")
    key = next((name for name in (key, *_COMBINATIONS) if name in schema), "")
    return _without(schema, key) if key else None
