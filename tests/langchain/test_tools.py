"""Tools and structured output, with the bundled model or scripted responses."""

from __future__ import annotations

import asyncio
import json
import os
import warnings
from typing import Annotated, Literal

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.engine.shared import SHARED
from dashinfer_vlm_core.errors import InvalidParameter, UnsupportedParameter
from dashinfer_vlm_langchain import ChatDashInferVLM
from tests.langchain.test_chat import call_all_ways
from tests.langchain.test_content import CIRCLE, text
from tests.server.conftest import serving

IMAGE = [HumanMessage([{"type": "image", "base64": CIRCLE, "mime_type": "image/png"}, text("Describe the picture.")])]


class Scene(BaseModel):
    """The contents of an image."""

    shape: str = Field(pattern="^(circle|square|star)$")
    count: int = Field(ge=1, le=9)


class SceneDict(TypedDict):
    """The contents of an image."""

    shape: str
    count: int


@tool
def weather(city: Literal["Rome", "Oslo"], days: Annotated[int, Field(ge=1, le=9)]) -> str:
    """Return the weather of a city."""
    return f"Sunny in {city} for {days} days."


@tool
def clock() -> str:
    """Return the time."""
    return "Noon."


def tool_call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def names_and_args(calls):
    return [(call["name"], call["args"]) for call in calls]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_from_image(demo, method):
    chat = demo.with_structured_output(Scene, method=method)
    for scene in (chat.invoke(IMAGE), asyncio.run(chat.ainvoke(IMAGE)), list(chat.stream(IMAGE))[-1]):
        assert isinstance(scene, Scene)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", [Scene.model_json_schema(), SceneDict], ids=["JSON schema", "TypedDict"])
def test_other_schemas_return_dictionaries(scripted, schema, method):
    response = {"shape": "star", "count": 3}
    provider = scripted(json.dumps(response) if method == "json_schema" else tool_call(_name(schema), **response))
    chat = provider.chat.with_structured_output(schema, method=method)
    assert chat.invoke("?") == response
    pieces = list(chat.stream("?"))
    assert pieces[-1] == response
    assert len(pieces) > 1


def _name(schema):
    return convert_to_openai_tool(schema)["function"]["name"]


def test_json_mode_returns_any_object(scripted):
    chat = scripted('{"a": [1, 2]}').chat
    assert chat.with_structured_output(method="json_mode").invoke("?") == {"a": [1, 2]}


class Note(BaseModel):
    words: str


def test_truncated_structured_output_is_rejected(scripted):
    chat = scripted(json.dumps({"words": "red star " * 50}), max_tokens=40).chat
    for schema in (Note, Note.model_json_schema()):
        with pytest.raises(OutputParserException, match="Invalid JSON"):
            chat.with_structured_output(schema).invoke("?")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_include_raw_returns_message_and_parsing_error(scripted, method):
    response = {"shape": "star", "count": 3}
    whole = json.dumps(response) if method == "json_schema" else tool_call("Scene", **response)
    provider = scripted(whole, whole)
    result = provider.chat.with_structured_output(Scene, method=method, include_raw=True).invoke("?")
    assert result["parsed"] == Scene(**response)
    assert result["parsing_error"] is None
    assert result["raw"].usage_metadata["output_tokens"] > 0
    short = provider.chat.model_copy(update={"max_tokens": 12})
    cut = short.with_structured_output(Scene, method=method, include_raw=True).invoke("?")
    assert cut["raw"].response_metadata["finish_reason"] == "length"
    assert cut["parsed"] is None


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"schema": Scene, "method": "xml"}, "method"),
        ({"method": "json_schema"}, "schema"),
        ({"schema": Scene, "method": "json_mode", "strict": True}, "strict"),
    ],
)
def test_invalid_structured_output_method_is_rejected(demo, arguments, param):
    with pytest.raises(InvalidParameter) as caught:
        demo.with_structured_output(**arguments)
    assert caught.value.param == param


def test_unsupported_schema_keyword_is_rejected(demo):
    schema = {"title": "s", "type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    with pytest.raises((InvalidParameter, UnsupportedParameter), match=r"properties\.a\.not"):
        demo.with_structured_output(schema, strict=True).invoke("?")
    assert demo.with_structured_output(schema).invoke("?") is not None


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("any", {"weather", "clock"}),
        ("required", {"weather", "clock"}),
        (True, {"weather", "clock"}),
        ("clock", {"clock"}),
    ],
)
def test_required_tool_choice_forces_a_call(demo, choice, names):
    for response in call_all_ways(
        demo.bind_tools([weather, clock], tool_choice=choice, parallel_tool_calls=False), "?"
    ):
        assert {call["name"] for call in response.tool_calls} <= names
        assert response.tool_calls
        assert response.response_metadata["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["none", False])
def test_tool_choice_none_prevents_calls(scripted, choice, read_prompt):
    provider = scripted("Sunny.")
    assert provider.chat.bind_tools([weather], tool_choice=choice).invoke("?").content == "Sunny."
    assert "weather" not in read_prompt(provider.script.requests[-1])


def test_conversation_with_tool_result(scripted, read_prompt):
    provider = scripted(tool_call("weather", city="Rome", days=2), "It will be sunny.")
    chat = provider.chat.bind_tools([weather])
    messages = [HumanMessage("How is the weather?")]
    messages.append(chat.invoke(messages))
    assert names_and_args(messages[-1].tool_calls) == [("weather", {"city": "Rome", "days": 2})]
    messages += [weather.invoke(call) for call in messages[-1].tool_calls]
    assert chat.invoke(messages).content == "It will be sunny."
    assert "Sunny in Rome for 2 days." in read_prompt(provider.script.requests[-1])


def test_tool_message_with_image(demo):
    call = {"name": "camera", "args": {}, "id": "1"}
    image = {"type": "image", "base64": CIRCLE, "mime_type": "image/png"}
    messages = [
        HumanMessage("Look."),
        demo.invoke("Hello").model_copy(update={"content": "", "tool_calls": [call]}),
        ToolMessage([image], tool_call_id="1"),
        HumanMessage("Describe the picture."),
    ]
    assert demo.invoke(messages).usage_metadata["input_token_details"]["image"] > 0


def test_parallel_tool_calls_stream(scripted):
    both = tool_call("weather", city="Rome", days=2) + "\n" + tool_call("clock")
    chat = scripted(both).chat.bind_tools([weather, clock])
    expected = [("weather", {"city": "Rome", "days": 2}), ("clock", {})]
    for response in call_all_ways(chat, "?"):
        assert names_and_args(response.tool_calls) == expected
        assert len({call["id"] for call in response.tool_calls}) == 2


def test_parallel_tool_calls_false_returns_one_call(demo):
    chat = demo.bind_tools([weather, clock], tool_choice="any", parallel_tool_calls=False)
    assert len(chat.invoke("?").tool_calls) == 1


def test_truncated_tool_call_is_invalid(scripted):
    chat = scripted(tool_call("weather", city="Rome", days=2)).chat.bind_tools([weather], tool_choice="any")
    response = chat.invoke("?", max_tokens=60)
    assert response.response_metadata["finish_reason"] == "length"
    assert not response.tool_calls
    assert response.invalid_tool_calls[0]["name"] == "weather"


@pytest.mark.slow
def test_all_interfaces_return_same_calls(demo):
    """In process, through the server, through LiteLLM, and through LangChain with both."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from importing LiteLLM
        import litellm

        import dashinfer_vlm_litellm

    dashinfer_vlm_litellm.register()
    tools = [convert_to_openai_tool(item) for item in (weather, clock)]
    prompt = "How is the weather in Rome?"
    request = {"messages": [{"role": "user", "content": prompt}], "tools": tools, "tool_choice": "required", "seed": 5}
    request |= {"parallel_tool_calls": False}
    engine = SHARED.get(EngineConfig())

    def calls_of(response):
        calls = response.choices[0].message.tool_calls
        return [(call.function.name, json.loads(call.function.arguments)) for call in calls]

    with serving(engine) as server, server.openai() as client:
        found = [
            calls_of(engine.chat(request)),
            calls_of(client.chat.completions.create(model="demo", **request)),
            calls_of(litellm.completion("dashinfer_vlm/demo", **request)),
        ]
        for chat in (ChatDashInferVLM(seed=5), ChatDashInferVLM(seed=5, base_url=f"{server.url}/v1")):
            bound = chat.bind_tools([weather, clock], tool_choice="required", parallel_tool_calls=False)
            found += [names_and_args(response.tool_calls) for response in call_all_ways(bound, prompt)]
    assert found[0]
    assert all(calls == found[0] for calls in found)
