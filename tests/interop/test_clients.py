"""Client libraries that are too heavy for the project's environment: OpenAI's Agents SDK and LlamaIndex."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, ClassVar

import openai
import pytest

from tests.clients.drivers import Color, OpenAIClient, Part, Result, Served, responses_input, weather
from tests.clients.features import CHECKS, cells, serve_script
from tests.waiting import HANG

pytestmark = pytest.mark.interop


class AgentsClient(OpenAIClient):
    """The OpenAI Agents SDK."""

    def __init__(self, served: Served) -> None:
        super().__init__(served)
        agents = pytest.importorskip("agents", reason="openai-agents is not installed")
        agents.set_tracing_disabled(True)  # it would send traces to OpenAI
        self._agents = agents
        self._model = agents.OpenAIChatCompletionsModel(model="tiny", openai_client=self._client)

    def _input(self, parts: tuple[Part, ...]) -> list[dict[str, Any]]:
        fields = {"text": "text", "image": "image_url", "video": "video_url"}
        types = {"text": "input_text", "image": "input_image", "video": "video_url"}
        content = [
            {"type": types[kind], fields[kind]: {"url": value} if kind == "video" else value} for kind, value in parts
        ]
        return [{"role": "user", "content": content}]

    def _agent(self, **options: Any) -> Any:
        return self._agents.Agent(name="eyes", model=self._model, **options)

    async def ask(self, *parts: Part, **options: Any) -> Result:
        result = await self._agents.Runner.run(self._agent(), self._input(parts))
        usage = result.context_wrapper.usage
        return Result(result.final_output, usage.input_tokens, usage.output_tokens)

    async def call_tool(self, *parts: Part) -> list[tuple[str, dict[str, Any]]]:
        agent = self._agent(tools=[self._agents.function_tool(weather)])
        result = await self._agents.Runner.run(agent, self._input(parts))
        items = [item.raw_item for item in result.new_items]
        assert {"Sunny in Rome."} == {item["output"] for item in items if isinstance(item, dict)}
        calls = [item for item in items if getattr(item, "type", "") == "function_call"]
        return [(call.name, json.loads(call.arguments)) for call in calls]

    async def parse(self, *parts: Part) -> object:
        return (await self._agents.Runner.run(self._agent(output_type=Color), self._input(parts))).final_output

    async def stream(self, *parts: Part) -> AsyncGenerator[str, None]:
        result = self._agents.Runner.run_streamed(self._agent(), self._input(parts))
        try:
            async for event in result.stream_events():
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                    yield event.data.delta
        finally:
            result.cancel()


class AgentsResponsesClient(AgentsClient):
    """The OpenAI Agents SDK with the Responses API, its default."""

    def __init__(self, served: Served) -> None:
        super().__init__(served)
        self._model = self._agents.OpenAIResponsesModel(model="tiny", openai_client=self._client)

    def _input(self, parts: tuple[Part, ...]) -> Any:
        return responses_input(parts)


class LlamaIndexClient:
    """LlamaIndex's `OpenAILike`."""

    errors: ClassVar = (openai.APIError,)
    structured_response = '<tool_call>\n{"name": "Color", "arguments": {"color": "green"}}\n</tool_call>'
    """It requests objects by a required tool call."""

    def __init__(self, served: Served) -> None:
        module = pytest.importorskip(
            "llama_index.llms.openai_like", reason="llama-index-llms-openai-like is not installed"
        )
        self._http = openai.DefaultAsyncHttpxClient(trust_env=False)
        self._llm = module.OpenAILike(
            model="tiny",
            api_base=served.url,
            api_key="none",
            is_chat_model=True,
            is_function_calling_model=True,
            max_retries=0,
            timeout=HANG,
            async_http_client=self._http,
        )

    async def ask(self, *parts: Part) -> Result:
        response = await self._llm.achat(_llama_messages(parts))
        usage = response.raw.usage
        return Result(response.message.content, usage.prompt_tokens, usage.completion_tokens)

    async def call_tool(self, *parts: Part) -> list[tuple[str, dict[str, Any]]]:
        from llama_index.core.tools import FunctionTool

        tool = FunctionTool.from_defaults(weather)
        response = await self._llm.achat_with_tools([tool], chat_history=_llama_messages(parts))
        calls = self._llm.get_tool_calls_from_response(response)
        return [(call.tool_name, call.tool_kwargs) for call in calls]

    async def parse(self, *parts: Part) -> object:
        return (await self._llm.as_structured_llm(Color).achat(_llama_messages(parts))).raw

    async def stream(self, *parts: Part) -> AsyncGenerator[str, None]:
        """Read the stream in a task, and cancel it: closing the stream would not close the connection."""
        texts: asyncio.Queue[str | None] = asyncio.Queue()

        async def read() -> None:
            async for chunk in await self._llm.astream_chat(_llama_messages(parts)):
                texts.put_nowait(chunk.delta or "")

        task = asyncio.create_task(read())
        task.add_done_callback(lambda _: texts.put_nowait(None))
        try:
            while (text := await texts.get()) is not None:
                yield text
            task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def aclose(self) -> None:
        await self._http.aclose()


def _llama_messages(parts: tuple[Part, ...]) -> list[Any]:
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock

    blocks = [TextBlock(text=value) if kind == "text" else ImageBlock(url=value) for kind, value in parts]
    return [ChatMessage(role="user", blocks=blocks)]


DRIVERS = {
    "openai-agents": AgentsClient,
    "openai-agents-responses": AgentsResponsesClient,
    "llama-index": LlamaIndexClient,
}


@pytest.fixture(scope="module")
def served(tiny_checkpoint):
    with serve_script(str(tiny_checkpoint)) as served:
        yield served


@pytest.mark.parametrize(("client", "feature"), cells(list(DRIVERS)))
def test_client_supports_feature(served, client, feature):
    CHECKS[feature](DRIVERS[client], served)
