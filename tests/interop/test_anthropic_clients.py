"""Clients of Anthropic's Messages API: its own, LangChain's `ChatAnthropic`, and LiteLLM's provider `anthropic/`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.protocol import body
from dashinfer_vlm_core.protocol.anthropic import IGNORED_IN_ANTHROPIC, REJECTED_IN_ANTHROPIC, MessagesRequest
from dashinfer_vlm_core.protocol.fields import IGNORED_FIELDS
from dashinfer_vlm_core.protocol.name_log import NameLog
from tests.clients.drivers import TOOL, Color, Part, Result, Served, weather
from tests.clients.features import CALL, CHECKS, IMAGE, RESPONSE, TEXT, cells, serve_script
from tests.interop.litellm_provider import LiteLLMProviderClient
from tests.pages import check_programs
from tests.server.conftest import serving
from tests.waiting import HANG

pytestmark = pytest.mark.interop
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise, importing it downloads prices

FUNCTION = TOOL["function"]
ANTHROPIC_TOOL = {
    "name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]
}  # fmt: skip
LIMITS = {"model": "tiny", "max_tokens": 500}


def base64_source(url: str) -> dict[str, str]:
    media_type, data = url.removeprefix("data:").split(";base64,")
    return {"type": "base64", "media_type": media_type, "data": data}


def anthropic_messages(parts: Sequence[Part]) -> Any:
    content = [
        {"type": "text", "text": value} if kind == "text" else {"type": kind, "source": base64_source(value)}
        for kind, value in parts
    ]
    return [{"role": "user", "content": content}]


class AnthropicClient:
    """The official client."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        return (self._module.APIError,)

    def __init__(self, served: Served) -> None:
        self._module = pytest.importorskip("anthropic", reason="anthropic is not installed")
        self._client = self._module.AsyncAnthropic(
            base_url=served.url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=HANG
        )

    async def ask(self, *parts: Part, **options: Any) -> Result:
        message = await self._client.messages.create(**LIMITS, messages=anthropic_messages(parts), **options)
        calls = [(block.name, block.input) for block in message.content if block.type == "tool_use"]
        text = "".join(block.text for block in message.content if block.type == "text")
        usage = message.usage
        return Result(text, usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens, calls)

    async def call_tool(self, *parts: Part) -> list[tuple[str, dict[str, Any]]]:
        return (await self.ask(*parts, tools=[ANTHROPIC_TOOL])).calls

    async def parse(self, *parts: Part) -> object:
        parse = self._client.messages.parse
        return (await parse(**LIMITS, messages=anthropic_messages(parts), output_format=Color)).parsed_output

    async def stream(self, *parts: Part) -> AsyncGenerator[str, None]:
        async with self._client.messages.stream(**LIMITS, messages=anthropic_messages(parts)) as stream:
            async for text in stream.text_stream:
                yield text

    async def aclose(self) -> None:
        await self._client.close()


class ChatAnthropicClient:
    """LangChain's `ChatAnthropic`."""

    errors: ClassVar = (Exception,)

    def __init__(self, served: Served) -> None:
        module = pytest.importorskip("langchain_anthropic", reason="langchain-anthropic is not installed")
        self._chat = module.ChatAnthropic(
            **LIMITS, base_url=served.url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=HANG
        )

    @staticmethod
    def _messages(parts: Sequence[Part]) -> list[Any]:
        from langchain_core.messages import HumanMessage

        content = [
            {"type": "text", "text": value}
            if kind == "text"
            else {"type": "image", "base64": base64_source(value)["data"], "mime_type": "image/png"}
            for kind, value in parts
        ]
        return [HumanMessage(content)]

    async def ask(self, *parts: Part) -> Result:
        message = await self._chat.ainvoke(self._messages(parts))
        usage = message.usage_metadata
        return Result(message.text, usage["input_tokens"], usage["output_tokens"])

    async def call_tool(self, *parts: Part) -> list[tuple[str, dict[str, Any]]]:
        message = await self._chat.bind_tools([weather]).ainvoke(self._messages(parts))
        return [(call["name"], call["args"]) for call in message.tool_calls]

    async def parse(self, *parts: Part) -> object:
        chat = self._chat.with_structured_output(Color, method="json_schema")
        return await chat.ainvoke(self._messages(parts))

    async def stream(self, *parts: Part) -> AsyncGenerator[str, None]:
        async with contextlib.aclosing(self._chat.astream(self._messages(parts))) as chunks:
            async for chunk in chunks:
                yield chunk.text

    async def aclose(self) -> None:
        """Close the HTTP client, which LangChain would use again in another event loop."""
        from langchain_anthropic._client_utils import _get_default_async_httpx_client

        await self._chat._async_client.close()
        _get_default_async_httpx_client.cache_clear()


class LiteLLMAnthropicClient(LiteLLMProviderClient):
    """LiteLLM's functions, with its own provider for Anthropic's API."""

    structured_response = '<tool_call>\n{"name": "json_tool_call", "arguments": {"color": "green"}}\n</tool_call>'
    """It requests objects of unknown models by a required tool call."""
    model: ClassVar = "anthropic/tiny"
    options: ClassVar = {"api_key": "none", "max_tokens": 500}


DRIVERS = {
    "anthropic": AnthropicClient,
    "chat-anthropic": ChatAnthropicClient,
    "litellm-anthropic": LiteLLMAnthropicClient,
}


@pytest.fixture(scope="module")
def served(tiny_checkpoint):
    with serve_script(str(tiny_checkpoint)) as served:
        yield served


@pytest.mark.parametrize(("client", "feature"), cells(list(DRIVERS)))
def test_client_supports_feature(served, client, feature):
    CHECKS[feature](DRIVERS[client], served)


def converse_with_anthropic(served: Served) -> str:
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    url = served.url.removesuffix("/v1")
    messages = anthropic_messages([IMAGE, TEXT])
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=HANG) as client:
        call = client.messages.create(**LIMITS, messages=messages, tools=[ANTHROPIC_TOOL])
        result = {"type": "tool_result", "tool_use_id": call.content[-1].id}
        image = {"type": "image", "source": base64_source(IMAGE.value)}
        messages += [call.to_param(), {"role": "user", "content": [{**result, "content": [image]}]}]
        with client.messages.stream(**LIMITS, messages=messages, tools=[ANTHROPIC_TOOL]) as stream:
            answer = stream.get_final_message()
        assert stream.response.headers["request-id"]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "And?"}]
        beta = client.beta.messages.create(**LIMITS, messages=messages, betas=["unknown-2030-01-01"])
        return beta.content[0].text


def converse_with_langchain(served: Served) -> str:
    from langchain_core.messages import HumanMessage, ToolMessage

    chat: Any = ChatAnthropicClient(served)._chat
    messages: list[Any] = ChatAnthropicClient._messages([IMAGE, TEXT])
    messages.append(chat.bind_tools([weather]).invoke(messages))
    messages.append(ToolMessage("Sunny.", tool_call_id=messages[-1].tool_calls[0]["id"]))
    messages += [chat.bind_tools([weather]).invoke(messages), HumanMessage("And?")]
    return chat.invoke(messages).text


@pytest.mark.parametrize("converse", [converse_with_anthropic, converse_with_langchain])
def test_fields_of_responses_can_be_sent_back(served, converse, monkeypatch, caplog):
    monkeypatch.setattr(body, "_LOG", NameLog(body.logger, "%s", "No more."))
    served.script.play(CALL, "It is a circle.", RESPONSE)
    assert converse(served) == RESPONSE
    spans = [len(request.spans) for request in served.script.requests]
    assert spans == ([1, 2, 2] if converse is converse_with_anthropic else [1, 1, 1])
    assert [record.getMessage() for record in caplog.records if record.name == body.__name__] == []


def test_every_field_of_anthropic_is_in_exactly_one_group():
    params = pytest.importorskip("anthropic.types.message_create_params", reason="anthropic is not installed")
    theirs = {*params.MessageCreateParamsBase.__annotations__, "stream"}
    groups = [MessagesRequest.model_fields.keys(), REJECTED_IN_ANTHROPIC.keys(), IGNORED_IN_ANTHROPIC | IGNORED_FIELDS]
    assert {name: sum(name in group for group in groups) for name in theirs} == dict.fromkeys(theirs, 1)


def test_programs_of_the_page_print_what_it_states():
    pytest.importorskip("anthropic", reason="anthropic is not installed")
    with Engine(EngineConfig()) as engine, serving(engine) as server:
        check_programs("anthropic.md", server.url)
