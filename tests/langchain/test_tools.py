"""Tools and structured output: on the bundled model where it is held to a form, on a script where it has to want to."""

from __future__ import annotations

import asyncio
import json
import os
import warnings
from typing import Annotated, Literal

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.engine.shared import SHARED
from dashinfer_vlm_core.errors import InvalidParameter, UnsupportedParameter
from dashinfer_vlm_langchain import ChatDashInferVLM
from tests.langchain.test_chat import four_ways
from tests.langchain.test_content import CIRCLE, text
from tests.server.conftest import serving

PICTURE = [HumanMessage([{"type": "image", "base64": CIRCLE, "mime_type": "image/png"}, text("Describe the picture.")])]


class Scene(BaseModel):
    """What a picture shows."""

    shape: str = Field(pattern="^(circle|square|star)$")
    count: int = Field(ge=1, le=9)


class SceneDict(TypedDict):
    """What a picture shows."""

    shape: str
    count: int


@tool
def weather(city: Literal["Rome", "Oslo"], days: Annotated[int, Field(ge=1, le=9)]) -> str:
    """Tells the weather of a city."""
    return f"Sunny in {city} for {days} days."


@tool
def clock() -> str:
    """Tells the time."""
    return "Noon."


def called(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def bare(calls):
    return [(call["name"], call["args"]) for call in calls]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_picture_becomes_an_object(demo, method):
    chat = demo.with_structured_output(Scene, method=method)
    for scene in (chat.invoke(PICTURE), asyncio.run(chat.ainvoke(PICTURE)), list(chat.stream(PICTURE))[-1]):
        assert isinstance(scene, Scene)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", [Scene.model_json_schema(), SceneDict], ids=["JSON schema", "TypedDict"])
def test_other_schemas_give_dictionaries(scripted, schema, method):
    answer = {"shape": "star", "count": 3}
    provider = scripted(json.dumps(answer) if method == "json_schema" else called(_name(schema), **answer))
    chat = provider.chat.with_structured_output(schema, method=method)
    assert chat.invoke("?") == answer
    pieces = list(chat.stream("?"))
    assert pieces[-1] == answer
    assert len(pieces) > 1


def _name(schema):
    return convert_to_openai_tool(schema)["function"]["name"]


def test_json_mode_gives_any_object(scripted):
    chat = scripted('{"a": [1, 2]}').chat
    assert chat.with_structured_output(method="json_mode").invoke("?") == {"a": [1, 2]}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_the_answer_itself_can_come_along(scripted, method):
    answer = {"shape": "star", "count": 3}
    whole = json.dumps(answer) if method == "json_schema" else called("Scene", **answer)
    provider = scripted(whole, whole)
    got = provider.chat.with_structured_output(Scene, method=method, include_raw=True).invoke("?")
    assert got["parsed"] == Scene(**answer)
    assert got["parsing_error"] is None
    assert got["raw"].usage_metadata["output_tokens"] > 0
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
def test_a_method_that_there_is_not_is_refused(demo, arguments, param):
    with pytest.raises(InvalidParameter) as caught:
        demo.with_structured_output(**arguments)
    assert caught.value.param == param


def test_a_schema_that_cannot_be_guaranteed_is_refused_by_name(demo):
    schema = {"title": "s", "type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    with pytest.raises((InvalidParameter, UnsupportedParameter), match="not"):
        demo.with_structured_output(schema).invoke("?")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("any", {"weather", "clock"}),
        ("required", {"weather", "clock"}),
        (True, {"weather", "clock"}),
        ("clock", {"clock"}),
    ],
)
def test_a_model_calls_when_it_has_to(demo, choice, names):
    for answer in four_ways(demo.bind_tools([weather, clock], tool_choice=choice, parallel_tool_calls=False), "?"):
        assert {call["name"] for call in answer.tool_calls} <= names
        assert answer.tool_calls
        assert answer.response_metadata["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["none", False])
def test_a_model_does_not_call_when_it_must_not(scripted, choice, read_prompt):
    provider = scripted("Sunny.")
    assert provider.chat.bind_tools([weather], tool_choice=choice).invoke("?").content == "Sunny."
    assert "weather" not in read_prompt(provider.script.requests[-1])


def test_a_conversation_with_a_tool_goes_there_and_back(scripted, read_prompt):
    provider = scripted(called("weather", city="Rome", days=2), "It will be sunny.")
    chat = provider.chat.bind_tools([weather])
    turns = [HumanMessage("How is the weather?")]
    turns.append(chat.invoke(turns))
    assert bare(turns[-1].tool_calls) == [("weather", {"city": "Rome", "days": 2})]
    turns += [weather.invoke(call) for call in turns[-1].tool_calls]
    assert chat.invoke(turns).content == "It will be sunny."
    assert "Sunny in Rome for 2 days." in read_prompt(provider.script.requests[-1])


def test_a_tool_may_show_a_picture(demo):
    call = {"name": "camera", "args": {}, "id": "1"}
    picture = {"type": "image", "base64": CIRCLE, "mime_type": "image/png"}
    turns = [
        HumanMessage("Look."),
        demo.invoke("Hello").model_copy(update={"content": "", "tool_calls": [call]}),
        ToolMessage([picture], tool_call_id="1"),
        HumanMessage("Describe the picture."),
    ]
    assert demo.invoke(turns).usage_metadata["input_token_details"]["image"] > 0


def test_several_calls_stream_side_by_side(scripted):
    both = called("weather", city="Rome", days=2) + "\n" + called("clock")
    chat = scripted(both).chat.bind_tools([weather, clock])
    expected = [("weather", {"city": "Rome", "days": 2}), ("clock", {})]
    for answer in four_ways(chat, "?"):
        assert bare(answer.tool_calls) == expected
        assert len({call["id"] for call in answer.tool_calls}) == 2


def test_one_call_is_enough_where_it_has_to_be(demo):
    chat = demo.bind_tools([weather, clock], tool_choice="any", parallel_tool_calls=False)
    assert len(chat.invoke("?").tool_calls) == 1


def test_a_call_that_was_cut_short_is_an_invalid_one(scripted):
    chat = scripted(called("weather", city="Rome", days=2)).chat.bind_tools([weather], tool_choice="any")
    answer = chat.invoke("?", max_tokens=60)
    assert answer.response_metadata["finish_reason"] == "length"
    assert not answer.tool_calls
    assert answer.invalid_tool_calls[0]["name"] == "weather"


def test_every_door_gives_the_same_calls(demo):
    """In process, through the server, through LiteLLM, and through LangChain by both."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of LiteLLM's import are not ours to mend
        import litellm

        import dashinfer_vlm_litellm

    dashinfer_vlm_litellm.register()
    tools = [convert_to_openai_tool(item) for item in (weather, clock)]
    words = "How is the weather in Rome?"
    ask = {"messages": [{"role": "user", "content": words}], "tools": tools, "tool_choice": "required", "seed": 5}
    ask |= {"parallel_tool_calls": False}
    engine = SHARED.get(EngineConfig())

    def of(answer):
        calls = answer.choices[0].message.tool_calls
        return [(call.function.name, json.loads(call.function.arguments)) for call in calls]

    with serving(engine) as server, server.openai() as client:
        found = [
            of(engine.chat(ask)),
            of(client.chat.completions.create(model="demo", **ask)),
            of(litellm.completion("dashinfer_vlm/demo", **ask)),
        ]
        for chat in (ChatDashInferVLM(seed=5), ChatDashInferVLM(seed=5, base_url=f"{server.url}/v1")):
            bound = chat.bind_tools([weather, clock], tool_choice="required", parallel_tool_calls=False)
            found += [bare(answer.tool_calls) for answer in four_ways(bound, words)]
    assert found[0]
    assert all(calls == found[0] for calls in found)
