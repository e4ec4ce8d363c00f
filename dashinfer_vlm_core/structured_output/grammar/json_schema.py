"""JSON schema to rules: supports what OpenAI's and pydantic's schemas use; rejects or widens the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from . import bounds
from .any_value import COMMA, any_value, enclosed, list_of, more_of
from .disjoint import are_disjoint
from .merging import SchemaMerger
from .number_schema import integer_rule, number_rule
from .object_schema import object_rule
from .references import References
from .rules import Rules, literal
from .schema_shape import ANNOTATIONS, TYPES, InvalidSchema, SchemaError, comparable, find_faults, normalized, types_of
from .steps import TooComplex
from .string_schema import string_rule

Schema: TypeAlias = Mapping[str, Any] | bool

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
    count = len(rules)
    try:
        return _compile_root(rules, schema, widened)
    except TooComplex:
        if widened is None:
            reason = "makes the request too complex: make its schemas smaller, or use fewer references"
            raise SchemaError("", reason) from None
    rules.discard(count)
    widened.append("")
    try:
        return widest(rules, schema)
    except TooComplex:
        raise SchemaError("", "is too large: make it simpler") from None


def widest(rules: Rules, schema: Schema) -> str:
    """Add the rule of any value of the types that a schema names."""
    named = schema.get("type") if isinstance(schema, Mapping) else None
    types = [named] if isinstance(named, str) else named
    if not isinstance(types, list) or not types or not all(name in TYPES for name in types):
        return any_value(rules)
    return any_value(rules, types)


def _compile_root(rules: Rules, schema: Mapping[str, Any], widened: list[str] | None) -> str:
    compiler = SchemaCompiler(rules, schema, widened)
    rule = compiler.compile(schema, level=0, path="")
    if rule is None:
        compiler.tolerate(SchemaError("", "allows no value"))
        return widest(rules, schema)
    return rule


class SchemaCompiler:
    """Compiles the parts of one schema to rules; None represents a part that no value satisfies.

    Args:
        rules: the rules to add to.
        root: the schema, in which references are looked up.
        widened: as in `json_schema`.
    """

    def __init__(self, rules: Rules, root: Mapping[str, Any], widened: list[str] | None) -> None:
        self.rules = rules
        self._steps = rules.steps
        self._references = References(root, self._steps)
        self._merge = SchemaMerger(self._steps).merge
        self._widened = widened
        self._depth = 0
        self._rules_by_reference: dict[tuple[str, int], str | None] = {}
        # Scalars are first, and arrays last: what is wrong is found before the parts of the others are compiled.
        self._compile_by_type: dict[str, Callable[[Mapping[str, Any], int, str], str | None]] = {
            "string": lambda schema, _, path: string_rule(self.rules, schema, path),
            "number": lambda schema, _, path: number_rule(self.rules, schema, path),
            "integer": lambda schema, _, path: integer_rule(self.rules, schema, path),
            "boolean": lambda *_: self.rules.add('"true" | "false"'),
            "null": lambda *_: literal("null"),
            "object": lambda schema, level, path: object_rule(self, schema, level, path),
            "array": self._array,
        }

    def compile(self, schema: Schema, level: int, path: str) -> str | None:
        """Compile a part of the schema; return its rule.

        Args:
            schema: the part.
            level: the number of recursive references that were followed.
            path: the path of the part, for messages.
        """
        self._depth += 1
        try:
            self._steps.count_text(path)
            if self._depth > bounds.MAX_NESTING:
                raise SchemaError("", f"nests deeper than {bounds.MAX_NESTING} levels: make it flatter")
            return self._compile(schema, level, path)
        except SchemaError as error:
            self.tolerate(error)
            reduced = _without_fault(schema, error, path)
        finally:
            self._depth -= 1
        return widest(self.rules, schema) if reduced is None else self.compile(reduced, level, path)

    def tolerate(self, error: SchemaError) -> None:
        """Record the path of something that cannot be guaranteed, and raise its error unless it may be widened."""
        if self._widened is None or isinstance(error, InvalidSchema):
            raise error
        self._widened.append(error.path)

    def _compile(self, schema: Schema, level: int, path: str) -> str | None:
        if isinstance(schema, bool):
            return any_value(self.rules) if schema else None
        keywords = self._keywords(schema, path)
        if "$ref" in keywords:
            return self._reference(keywords, level, path)
        if "allOf" in keywords:
            return self._all_of(keywords, level, path)
        for key in ("anyOf", "oneOf"):
            if key in keywords:
                return self._any_of(keywords, key, level, path)
        return self._value(keywords, level, path)

    def _keywords(self, schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        """Return the keywords that constrain values and can be guaranteed."""
        self._steps.count_keywords(schema)
        dropped = set(ANNOTATIONS)
        for key, error in find_faults(schema, path):
            self.tolerate(error)
            dropped.add(key)
        return normalized({key: value for key, value in schema.items() if key not in dropped})

    def _without_faults(self, schema: Schema, path: str) -> Schema:
        """Return a schema that can be merged."""
        return schema if isinstance(schema, bool) else self._keywords(schema, path)

    def _value(self, schema: Mapping[str, Any], level: int, path: str) -> str | None:
        if "const" in schema or "enum" in schema:
            return self._enum(schema, path)
        types = types_of(schema)
        if not types:
            return self.compile(True, level, path)
        compilers = [compiler for name, compiler in self._compile_by_type.items() if name in types]
        rules = [rule for compiler in compilers if (rule := compiler(schema, level, path)) is not None]
        return self.rules.either(rules) if rules else None

    # References and combinations

    def _reference(self, schema: Mapping[str, Any], level: int, path: str) -> str | None:
        pointer = schema["$ref"]
        if len(schema) > 1:
            whole, level = self._dereferenced(schema, level, path)
            return self.compile(whole, level, path)
        level += self._references.is_recursive(pointer)
        if level > bounds.MAX_RECURSION:
            return None
        if (pointer, level) not in self._rules_by_reference:
            target = self._references.target(pointer, path)
            self._rules_by_reference[pointer, level] = self.compile(target, level, pointer)
        return self._rules_by_reference[pointer, level]

    def _dereferenced(self, schema: Mapping[str, Any], level: int, path: str) -> tuple[Schema, int]:
        """Merge the target of a reference with the keywords next to it; return the level of their parts as well."""
        pointer = schema["$ref"]
        level += self._references.is_recursive(pointer)
        if level > bounds.MAX_RECURSION:
            return False, level
        target = self._without_faults(self._references.target(pointer, path), pointer)
        return self._merge(target, {key: value for key, value in schema.items() if key != "$ref"}, path), level

    def _all_of(self, schema: Mapping[str, Any], level: int, path: str) -> str | None:
        whole: Schema = {key: value for key, value in schema.items() if key != "allOf"}
        for index, part in enumerate(schema["allOf"]):
            merged: Schema = part
            if isinstance(part, Mapping) and isinstance(part.get("$ref"), str):
                merged, level = self._dereferenced(part, level, path)
            whole = self._merge(whole, self._without_faults(merged, f"{path}.allOf[{index}]"), path)
        return self.compile(whole, level, path)

    def _any_of(self, schema: Mapping[str, Any], key: str, level: int, path: str) -> str | None:
        siblings = {name: value for name, value in schema.items() if name != key}
        paths = {f"{path}.{key}[{index}]": branch for index, branch in enumerate(schema[key])}
        if key == "oneOf" and self._widened is None and not self._are_disjoint(paths):
            reason = "has alternatives that one value could satisfy at the same time: use `anyOf`"
            raise SchemaError(f"{path}.oneOf", reason)
        if siblings:  # all before one is compiled: without a fault, they are compiled again
            paths = {
                place: self._merge(self._without_faults(branch, place), siblings, path)
                for place, branch in paths.items()
            }
        compiled = [self.compile(branch, level, place) for place, branch in paths.items()]
        rules = [rule for rule in compiled if rule is not None]
        return self.rules.either(rules) if rules else None

    def _are_disjoint(self, branches: Mapping[str, Schema]) -> bool:
        """Whether types and discriminators prove that no value satisfies two of the branches."""
        return are_disjoint([self.resolve(branch, path) for path, branch in branches.items()], self._steps)

    def resolve(self, schema: Schema, path: str) -> Mapping[str, Any]:
        """Return the keywords of a part, or if it is a reference, of its target."""
        for _ in range(bounds.MAX_RECURSION):
            if isinstance(schema, bool) or not isinstance(schema.get("$ref"), str):
                break
            schema = self._references.target(schema["$ref"], path)
        return {} if isinstance(schema, bool) else self._keywords(schema, path)

    # Values

    def _enum(self, schema: Mapping[str, Any], path: str) -> str | None:
        texts = dict.fromkeys(map(_to_json, self.enum_values(schema, path)))
        return self.rules.terminal(" | ".join(map(literal, texts))) if texts else None

    def enum_values(self, schema: Mapping[str, Any], path: str) -> list[Any]:
        """Return the values of `const` or `enum` that `type` allows."""
        for key in sorted(schema.keys() - {"const", "enum", "type"}):
            self.tolerate(SchemaError(f"{path}.{key}", "cannot be combined with `const` or `enum`: remove it"))
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        self._steps.count_values(values)
        if "const" in schema:
            const = comparable(schema["const"])
            values = [value for value in values if comparable(value) == const]
        kinds = types_of({"type": schema["type"]}) if "type" in schema else ()
        return [value for value in values if not kinds or _is_one_of(value, kinds)]

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
        items = schema.get("items", "prefixItems" not in schema)
        item = self.compile(items, level, f"{path}.items") if items is not False and max_count > len(fixed) else None
        if item is None and min_count > len(fixed):
            return None
        body = f" {COMMA} ".join(part for part in fixed if part)
        if item:
            rest = more_of if fixed else list_of
            body += " " + rest(item, max(min_count - len(fixed), 0), max_count - len(fixed))
        return self.rules.add(enclosed("[", body, "]"))


def _without_fault(schema: Schema, error: SchemaError, path: str) -> Schema | None:
    """Return a schema without the keyword at fault; None if no keyword can be blamed."""
    if isinstance(schema, bool):
        return None
    key = error.path.removeprefix(path.removeprefix(".")).removeprefix(".")
    key = next((name for name in (key, *_COMBINATIONS) if name in schema), "")
    return {name: value for name, value in schema.items() if name != key} if key else None


def _is_one_of(value: object, kinds: Sequence[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, int):
        return "integer" in kinds or "number" in kinds
    named = {str: "string", float: "number", list: "array", dict: "object", type(None): "null"}
    return named.get(type(value)) in kinds


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
