"""`litellm.responses` with the provider, in process and with a server, and with LiteLLM's own OpenAI provider."""

from __future__ import annotations

import asyncio
import json

import litellm
import openai
import pytest
from litellm.exceptions import MidStreamFallbackError

from dashinfer_vlm_core.testing import EVERYTHING, scripted_engine
from tests.litellm.conftest import close_clients, closing_clients
from tests.samples import image_url
from tests.server.conftest import serving

pytestmark = pytest.mark.slow

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(params=["in process", "server", "openai"])
def start(request, tiny_checkpoint, scripted):
    """Return arguments for LiteLLM: our provider in process, our provider with a server, or LiteLLM's for OpenAI.

    `start.engines` can be closed.
    """
    stack = []

    def start(*responses, delay=0.0):
        if request.param == "in process":
            provider = scripted(*responses, delay=delay, supported_params=EVERYTHING)
            start.engines.append(provider.engines)
            return {"model": provider.model}
        options = {"model": str(tiny_checkpoint), "served_model_name": "tiny"}
        engine = scripted_engine(*responses, delay=delay, **options).start()
        start.engines.append(engine)
        context = serving(engine)
        stack.append((engine, context))
        base = f"{context.__enter__().url}/v1"
        if request.param == "openai":
            return {"model": "openai/tiny", "api_base": base, "api_key": "none"}
        return {"model": f"{scripted('Not this one.').model.partition('/')[0]}/tiny", "api_base": base}

    start.engines = []
    yield start
    close_clients()
    for engine, context in reversed(stack):
        context.__exit__(None, None, None)
        engine.close()


def text(response):
    return "".join(part.text for item in response.output if item.type == "message" for part in item.content)


def test_response_has_text_and_usage(start):
    call = start("A red circle.")
    response = litellm.responses(input="What is this?", **call)
    assert text(response) == "A red circle."
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    response = asyncio.run(closing_clients(litellm.aresponses(input="What is this?", **call)))
    assert text(response) == "A red circle."


def test_images_are_sent(start):
    call = start("A red circle.")
    parts = [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": image_url(), "detail": "auto"}]
    with_image = litellm.responses(input=[{"role": "user", "content": parts}], **call)
    without = litellm.responses(input=[{"role": "user", "content": parts[:1]}], **call)
    assert with_image.usage.input_tokens > without.usage.input_tokens


def test_events_contain_the_text(start):
    events = list(litellm.responses(input="What is this?", stream=True, **start("A red circle.")))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "A red circle."
    assert events[-1].type == "response.completed"


def test_async_events_contain_the_text(start):
    call = start("A red circle.")

    async def main():
        stream = await litellm.aresponses(input="What is this?", stream=True, **call)
        return [event.delta async for event in stream if event.type == "response.output_text.delta"]

    assert "".join(asyncio.run(closing_clients(main()))) == "A red circle."


def test_error_within_a_stream_is_raised(start):
    call = start("A long response. " * 50, delay=0.01)
    if call["model"].startswith("openai"):  # LiteLLM reads the whole stream before it returns an event
        return
    events = iter(litellm.responses(input="What is this?", stream=True, **call))
    assert any(event.type == "response.output_text.delta" for event in events)
    start.engines[-1].close()
    with pytest.raises((openai.APIError, MidStreamFallbackError)):
        list(events)


def test_tool_calls_make_a_round_trip(start):
    call = start(CALL, "Sunny.")
    response = litellm.responses(input="How is the weather?", tools=[TOOL], **call)
    (item,) = (item for item in response.output if item.type == "function_call")
    assert (item.name, json.loads(item.arguments)) == ("weather", {"city": "Rome"})
    given = [
        {"role": "user", "content": "How is the weather?"},
        {"type": "function_call", "call_id": item.call_id, "name": item.name, "arguments": item.arguments},
        {"type": "function_call_output", "call_id": item.call_id, "output": "Sunny."},
    ]
    assert text(litellm.responses(input=given, tools=[TOOL], **call)) == "Sunny."


def test_schema_is_enforced(start):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text_format = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    assert json.loads(text(litellm.responses(input="?", text=text_format, **start('{"a": 12}')))) == {"a": 12}


def test_errors_are_litellms(start):
    with pytest.raises(litellm.BadRequestError):
        litellm.responses(input="?", temperature=3.5, **start("A red circle."))
