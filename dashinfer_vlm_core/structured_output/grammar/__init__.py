"""What a guided answer may look like, as a grammar that a library turns into token masks.

    JSON schema ─▶ Rules: Lark rules, none of which refers back to itself

Every language here is finite: strings, arrays, objects, digits and recursion end at bounds that the schema sets, else
at those of `bounds`. An answer that follows its grammar therefore always ends by itself. Nothing is compiled here.
"""

from .json_schema import COLON, COMMA, any_object, json_schema
from .rules import Rules, literal
from .schema_shape import SchemaError

__all__ = ["COLON", "COMMA", "Rules", "SchemaError", "any_object", "json_schema", "literal"]
