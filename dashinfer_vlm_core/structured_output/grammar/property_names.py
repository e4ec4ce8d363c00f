"""`propertyNames` of a schema: which names the properties of an object may have."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import bounds
from .any_value import string_body
from .part_compiler import PartCompiler
from .rules import Rules, literal
from .schema_shape import ANNOTATIONS, SchemaError, types_of
from .string_schema import string_rule

_LENGTHS = frozenset({"minLength", "maxLength"})
_UNSUPPORTED = "can be guaranteed only with `enum`, `const`, and keywords of strings: remove it"


@dataclass(frozen=True, kw_only=True, slots=True)
class PropertyNames:
    """The allowed names.

    Attributes:
        listed: all of them, in order; None if `text` describes them.
        text: keywords of a schema of strings.
    """

    listed: Mapping[str, None] | None = None
    text: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_pattern(self) -> bool:
        """Whether names have a pattern or a format, which is checked only while they are generated."""
        return not self.text.keys() <= _LENGTHS

    def allow(self, name: str) -> bool:
        if self.listed is not None:
            return name in self.listed
        return bool(self.text.get("minLength", 0) <= len(name) <= self.text.get("maxLength", math.inf))

    def key_rule(self, rules: Rules, named: Collection[str], path: str) -> str | None:
        """Add the rule of the names other than `named`; None if there are none."""
        min_length = self.text.get("minLength", 0)
        max_length = min(self.text.get("maxLength", math.inf), max(bounds.KEY_CHARACTERS, min_length))
        if min_length > max_length:
            return None
        if self.has_pattern:
            return string_rule(rules, {**self.text, "maxLength": max_length}, f"{path}.propertyNames")
        keys = string_body(min_length, int(max_length))
        excluded = " | ".join(literal(json.dumps(name, ensure_ascii=False)) for name in named)
        return rules.terminal(f"{keys} & ~({excluded})" if excluded else keys)


def read_property_names(compiler: PartCompiler, schema: Mapping[str, Any], path: str) -> PropertyNames:
    """Return the names that `propertyNames` allows.

    Raises:
        SchemaError: it has other keywords than those of strings, `enum` and `const`.
    """
    part = schema.get("propertyNames", True)
    if part is False:
        return PropertyNames(listed={})
    path = f"{path}.propertyNames"
    if part is not True and "$ref" in part and not part.keys() <= {"$ref", *ANNOTATIONS}:
        raise SchemaError(path, _UNSUPPORTED)
    names = compiler.resolve(part, path)
    if "type" in names and "string" not in types_of(names):
        return PropertyNames(listed={})
    if names.keys() & {"enum", "const"}:
        values = compiler.enum_values(names, path)
        return PropertyNames(listed=dict.fromkeys(value for value in values if isinstance(value, str)))
    text = {key: value for key, value in names.items() if key != "type"}
    if not text.keys() <= {*_LENGTHS, "pattern", "format"}:
        raise SchemaError(path, _UNSUPPORTED)
    return PropertyNames(text=text)
