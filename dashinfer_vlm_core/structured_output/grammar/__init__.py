"""Grammars for guided decoding, from which a library computes token masks.

    JSON schema, regular expression or choices ─▶ Rules: Lark rules without recursion

Every language is finite: the length of strings, arrays, objects and numbers and the depth of recursion are bounded by
the schema, or by the defaults in `bounds`. A completion that follows its grammar therefore always ends. This package
only creates the grammars; `grammar_compiler` compiles them.
"""

from .any_value import COLON, COMMA, any_object
from .json_schema import json_schema, widest
from .rules import Rules, literal
from .schema_shape import TYPES, SchemaError
from .steps import Steps
from .texts import matching_text, one_of

__all__ = [
    "COLON",
    "COMMA",
    "TYPES",
    "Rules",
    "SchemaError",
    "Steps",
    "any_object",
    "json_schema",
    "literal",
    "matching_text",
    "one_of",
    "widest",
]
