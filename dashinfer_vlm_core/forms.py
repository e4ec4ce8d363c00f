"""What a request wants its answer to look like -> a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import InvalidParameter
from .grammar import Rules, SchemaFault, any_object, json_schema
from .schema import ChatRequest

SCHEMA_PARAM = "response_format.json_schema.schema"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Form:
    """A grammar that an answer has to follow.

    Attributes:
        rules: of the grammar.
        start: the rule that the answer follows.
        param: the field that asks for it.
    """

    rules: Rules
    start: str
    param: str

    @property
    def field(self) -> str:
        """The field of the request that `param` belongs to."""
        return self.param.partition(".")[0].partition("[")[0]


def form_of(request: ChatRequest) -> Form | None:
    """The grammar that a request asks for; None if its answer is free.

    Raises:
        InvalidParameter: a schema is malformed or too large, or cannot be guaranteed; `param` names it.
    """
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    rules = Rules()
    if wanted.json_schema is None:
        return Form(rules=rules, start=any_object(rules), param="response_format")
    start = _compiled(rules, wanted.json_schema.json_schema, SCHEMA_PARAM)
    return Form(rules=rules, start=start, param=SCHEMA_PARAM)


def _compiled(rules: Rules, schema: Mapping[str, Any], param: str, *, lenient: bool = False) -> str:
    try:
        return json_schema(rules, schema, lenient=lenient)
    except SchemaFault as fault:
        place = f" at {fault.place!r}" if fault.place else ""
        raise InvalidParameter(f"`{param}`{place} {fault.words}.", param=param) from None
