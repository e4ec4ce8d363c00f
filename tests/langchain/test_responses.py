"""LangChain's `ChatOpenAI(use_responses_api=True)` with this server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import openai
import pydantic
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from dashinfer_vlm_core.testing import scripted_engine
from tests.core.test_reasoning import TEMPLATE
from tests.samples import image_url
from tests.server.conftest import RunningServer, serving
from tests.web import CERTIFICATES

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class Answer(pydantic.BaseModel):
    """An answer."""

    a: int


def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"Sunny in {city}."


@pytest.fixture
def start(tiny_checkpoint) -> Iterator[Callable[..., ChatOpenAI]]:
    """Start servers with scripted responses, and return chat models that use them."""
    stack = []

    def start(*responses, chat_template=None, **arguments) -> ChatOpenAI:
        options = {"model": str(tiny_checkpoint), "served_model_name": "tiny"}
        engine = scripted_engine(*responses, **options, **({"chat_template": chat_template} if chat_template else {}))
        context = serving(engine.start())
        server: RunningServer = context.__enter__()
        client = openai.DefaultHttpxClient(trust_env=False, verify=CERTIFICATES)
        stack.append((engine, context, client))
        return ChatOpenAI(
            model="tiny",
            base_url=f"{server.url}/v1",
            api_key="none",
            max_retries=0,
            use_responses_api=True,
            http_client=client,
            **arguments,
        )

    yield start
    for engine, context, client in reversed(stack):
        client.close()
        context.__exit__(None, None, None)
        engine.close()


def test_message_has_text_usage_and_finish(start):
    chat = start("A red circle.")
    message = chat.invoke("What is this?")
    assert message.text == "A red circle."
    assert message.response_metadata["status"] == "completed"
    assert message.usage_metadata["total_tokens"] == sum(
        message.usage_metadata[name] for name in ("input_tokens", "output_tokens")
    )
    chunks = list(chat.stream("What is this?"))
    assert "".join(chunk.text for chunk in chunks) == "A red circle."
    assert sum(chunks[1:], chunks[0]).usage_metadata["output_tokens"] == message.usage_metadata["output_tokens"]


def test_images_are_sent(start):
    chat = start("A red circle.")
    image = {"type": "image", "url": image_url()}
    with_image = chat.invoke([HumanMessage([{"type": "text", "text": "What is this?"}, image])])
    without = chat.invoke("What is this?")
    assert with_image.usage_metadata["input_tokens"] > without.usage_metadata["input_tokens"]


def test_tool_calls_make_a_round_trip(start):
    chat = start(CALL, CALL, "Sunny.").bind_tools([weather])
    message = chat.invoke("How is the weather in Rome?")
    (call,) = message.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
    chunks = list(chat.stream("How is the weather in Rome?"))
    assert sum(chunks[1:], chunks[0]).tool_calls[0]["args"] == {"city": "Rome"}
    result = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    assert chat.invoke(["How is the weather in Rome?", message, result]).text == "Sunny."


def test_structured_output_is_parsed(start):
    for method in ("json_schema", "function_calling"):
        response = (
            '{"a": 12}'
            if method == "json_schema"
            else CALL.replace("weather", "Answer").replace('{"city": "Rome"}', '{"a": 12}')
        )
        assert start(response).with_structured_output(Answer, method=method).invoke("?") == Answer(a=12)


def test_conversation_continues_by_response_id(start):
    chat = start("A red circle.", "Left.", use_previous_response_id=True)
    first = chat.invoke("What is this?")
    assert first.response_metadata["id"].startswith("resp_")
    second = chat.invoke([HumanMessage("What is this?"), first, HumanMessage("Where?")])
    assert second.text == "Left."
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["total_tokens"]


def test_reasoning_is_returned_and_sent_back(start, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    chat = start("It has wheels.\n</think>\n\nA car.", chat_template=path, reasoning={"summary": "auto"})
    message = chat.invoke("What is this?")
    assert message.text == "A car."
    (reasoning,) = (block for block in message.content if block["type"] == "reasoning")
    assert reasoning["content"][0]["text"] == "It has wheels."
    assert message.usage_metadata["output_token_details"]["reasoning"] > 0
    again = chat.invoke([HumanMessage("What is this?"), message, HumanMessage("Sure?")])
    plain = chat.invoke([HumanMessage("What is this?"), AIMessage("A car."), HumanMessage("Sure?")])
    assert again.usage_metadata["input_tokens"] > plain.usage_metadata["input_tokens"]
    chunks = list(chat.stream("What is this?"))
    assert "".join(chunk.text for chunk in chunks) == "A car."


def test_errors_are_openais(start):
    chat = start("A red circle.")
    with pytest.raises(openai.BadRequestError) as caught:
        chat.invoke("?", temperature=3)
    assert caught.value.param == "temperature"
