"""The request fields and output parsers of `with_structured_output`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_function, convert_to_openai_tool
from langchain_core.utils.json import parse_json_markdown
from langchain_core.utils.pydantic import TBaseModel, is_basemodel_subclass

from dashinfer_vlm_core.errors import InvalidParameter

if TYPE_CHECKING:
    from langchain_core.language_models import LanguageModelInput
    from langchain_core.messages import AIMessage

Method: TypeAlias = Literal["json_schema", "function_calling", "json_mode"]
Schema: TypeAlias = Any
"""A pydantic class (of version 1 too), a TypedDict, or a JSON schema with `title`."""

OutputParser: TypeAlias = "Runnable[Any, Any]"


class _JsonParser(JsonOutputParser):
    """Rejects JSON that is not complete, except while it is streamed. LangChain's parser completes it."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        if not partial:
            text = result[0].text
            try:
                parse_json_markdown(text, parser=json.loads)
            except json.JSONDecodeError as error:
                raise OutputParserException(f"Invalid JSON: {text}", llm_output=text) from error
        return super().parse_result(result, partial=partial)


class _PydanticParser(PydanticOutputParser[TBaseModel], _JsonParser):
    pass


def bind_schema(method: str, schema: Schema | None, strict: bool | None) -> dict[str, Any]:
    """Return the arguments to bind to the model; `tools` are for `bind_tools`.

    Raises:
        InvalidParameter: the method does not exist, or requires a schema.
    """
    if method not in _METHODS:
        raise InvalidParameter(f"`method` must be one of {', '.join(_METHODS)}, got {method!r}.", param="method")
    if schema is None and method != "json_mode":
        raise InvalidParameter(f"`schema` is required with the method {method}.", param="schema")
    if method == "json_mode" and strict is not None:
        raise InvalidParameter("`strict` cannot be combined with json_mode, which has no schema.", param="strict")
    format_info = {"kwargs": {"method": method} | ({} if strict is None else {"strict": strict}), "schema": schema}
    return _METHODS[method](schema, strict) | ({} if schema is None else {"ls_structured_output_format": format_info})


def output_parser(method: str, schema: Schema | None) -> OutputParser:
    """Return a parser for responses. It returns an instance of a pydantic schema, or else a dictionary."""
    pydantic = isinstance(schema, type) and is_basemodel_subclass(schema)
    if method != "function_calling":
        return _PydanticParser(pydantic_object=schema) if pydantic else _JsonParser()
    if pydantic:
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    return JsonOutputKeyToolsParser(key_name=_tool_name(schema), first_tool_only=True)


def with_raw(
    model: Runnable[LanguageModelInput, AIMessage], parser: OutputParser
) -> Runnable[LanguageModelInput, dict[str, Any]]:
    """Return `raw`, `parsed` and `parsing_error`. Either `parsed` or `parsing_error` is None."""
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _tool_name(schema: Schema) -> str:
    return str(convert_to_openai_tool(schema)["function"]["name"])


def _json_schema_fields(schema: Schema, strict: bool | None) -> dict[str, Any]:
    function = convert_to_openai_function(schema, strict=strict)
    description = {key: function[key] for key in ("name", "description") if function.get(key)}
    json_schema = description | {"schema": function["parameters"], "strict": bool(strict)}
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


def _tool_fields(schema: Schema, strict: bool | None) -> dict[str, Any]:
    return {"tools": [schema], "tool_choice": _tool_name(schema), "strict": strict, "parallel_tool_calls": False}


def _json_mode_fields(_schema: Schema, _strict: bool | None) -> dict[str, Any]:
    return {"response_format": {"type": "json_object"}}


_METHODS: Mapping[str, Callable[[Schema, bool | None], dict[str, Any]]] = {
    "json_schema": _json_schema_fields,
    "function_calling": _tool_fields,
    "json_mode": _json_mode_fields,
}
