"""`with_structured_output`: what is asked of the model, and what reads its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_function, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from dashinfer_vlm_core.errors import InvalidParameter

if TYPE_CHECKING:
    from langchain_core.language_models import LanguageModelInput
    from langchain_core.messages import AIMessage

Method: TypeAlias = Literal["json_schema", "function_calling", "json_mode"]
Schema: TypeAlias = Any
"""A pydantic class (of version 1 too), a TypedDict, or a JSON schema with `title`."""

Reader: TypeAlias = "Runnable[Any, Any]"


def bind_schema(method: str, schema: Schema | None, strict: bool | None) -> dict[str, Any]:
    """What to bind to the model. `tools` are those of `bind_tools`.

    Raises:
        InvalidParameter: there is no such method, or it needs a schema.
    """
    if method not in _ASK:
        raise InvalidParameter(f"`method` must be one of {', '.join(_ASK)}; got {method!r}.", param="method")
    if schema is None and method != "json_mode":
        raise InvalidParameter(f"`schema` is required with the method {method}.", param="schema")
    if method == "json_mode" and strict is not None:
        raise InvalidParameter("`strict` does not go with json_mode, which follows no schema.", param="strict")
    told = {"kwargs": {"method": method} | ({} if strict is None else {"strict": strict}), "schema": schema}
    return _ASK[method](schema, strict) | ({} if schema is None else {"ls_structured_output_format": told})


def output_parser(method: str, schema: Schema | None) -> Reader:
    """What makes an object of an answer: of the class if the schema is a pydantic one, else a dictionary."""
    pydantic = isinstance(schema, type) and is_basemodel_subclass(schema)
    if method != "function_calling":
        return PydanticOutputParser(pydantic_object=schema) if pydantic else JsonOutputParser()
    if pydantic:
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    return JsonOutputKeyToolsParser(key_name=_tool_name(schema), first_tool_only=True)


def with_raw(
    model: Runnable[LanguageModelInput, AIMessage], read: Reader
) -> Runnable[LanguageModelInput, dict[str, Any]]:
    """The answer beside what was read of it: `raw`, `parsed` and `parsing_error`, one of which is None."""
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | read, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _tool_name(schema: Schema) -> str:
    return str(convert_to_openai_tool(schema)["function"]["name"])


def _by_schema(schema: Schema, strict: bool | None) -> dict[str, Any]:
    function = convert_to_openai_function(schema, strict=strict)
    described = {key: function[key] for key in ("name", "description") if function.get(key)}
    written = described | {"schema": function["parameters"], "strict": bool(strict)}
    return {"response_format": {"type": "json_schema", "json_schema": written}}


def _by_call(schema: Schema, strict: bool | None) -> dict[str, Any]:
    return {"tools": [schema], "tool_choice": _tool_name(schema), "strict": strict, "parallel_tool_calls": False}


def _by_format(_schema: Schema, _strict: bool | None) -> dict[str, Any]:
    return {"response_format": {"type": "json_object"}}


_ASK: Mapping[str, Callable[[Schema, bool | None], dict[str, Any]]] = MappingProxyType(
    {"json_schema": _by_schema, "function_calling": _by_call, "json_mode": _by_format}
)
