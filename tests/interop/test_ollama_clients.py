"""Clients of Ollama's API: its own, LangChain's `ChatOllama`, LlamaIndex, and LiteLLM's provider `ollama_chat/`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.protocol import body
from dashinfer_vlm_core.protocol.name_log import NameLog
from dashinfer_vlm_core.protocol.ollama import (
    REJECTED_IN_GENERATE,
    REJECTED_IN_OLLAMA,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from dashinfer_vlm_core.protocol.ollama_options import REJECTED_OPTIONS, OllamaOptions
from tests.clients.drivers import TOOL, Color, Part, Result, Served, openai_messages, weather
from tests.clients.features import CALL, CHECKS, IMAGE, RESPONSE, TEXT, cells, serve_script
from tests.interop.litellm_provider import LiteLLMProviderClient
from tests.pages import check_programs
from tests.server.conftest import serving
from tests.waiting import HANG

pytestmark = pytest.mark.interop
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise, importing it downloads prices


JSON_HEADER = {"Content-Type": "application/json"}
"""LiteLLM's provider sends none, and a server without API keys requires it."""


def host(served: Served) -> str:
    return served.url.removesuffix("/v1")


def ollama_messages(parts: Sequence[Part]) -> list[dict[str, Any]]:
    texts = [value for kind, value in parts if kind == "text"]
    images = [value.partition(";base64,")[2] for kind, value in parts if kind == "image"]
    return [{"role": "user", "content": "".join(texts), "images": images}]


class OllamaClient:
    """The official client."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        return (self._module.ResponseError,)

    def __init__(self, served: Served) -> None:
        self._module = pytest.importorskip("ollama", reason="ollama is not installed")
        self._client = self._module.AsyncClient(host(served), timeout=HANG)

    async def ask(self, *parts: Part, **options: Any) -> Result:
        response = await self._client.chat("tiny", ollama_messages(parts), **options)
        calls = [(call.function.name, call.function.arguments) for call in response.message.tool_calls or ()]
        return Result(response.message.content, response.prompt_eval_count, response.eval_count, calls)

    async def call_tool(self, *parts: Part) -> list[tuple[str, dict[str, Any]]]:
        return (await self.ask(*parts, tools=[weather])).calls

    async def parse(self, *parts: Part) -> object:
        return Color.model_validate_json((await self.ask(*parts, format=Color.model_json_schema())).text)

    async def stream(self, *parts: Part) -> AsyncGenerator[str, None]:
        async with contextlib.aclosing(await self._client.chat("tiny", ollama_messages(parts), stream=True)) as chunks:
            async for chunk in chunks:
                yield chunk.message.content

    async def aclose(self) -> None:
        await self._client.close()


class ChatOllamaClient:
    """LangChain's `ChatOllama`."""

    errors: ClassVar = (Exception,)

    def __init__(self, served: Served) -> None:
        module = pytest.importorskip("langchain_ollama", reason="langchain-ollama is not installed")
        self._chat = module.ChatOllama(
            model="tiny", base_url=host(served), validate_model_on_init=True, client_kwargs={"timeout": HANG}
        )

    @staticmethod
    def _messages(parts: Sequence[Part]) -> list[Any]:
        from langchain_core.messages import HumanMessage

        return [HumanMessage(openai_messages(parts)[0]["content"])]

    async def ask(self, *parts: Part) -> Result:
        message = await self._chat.ainvoke(self._messages(parts))
        usage = message.usage_metadata
        return Result(message.text, usage["input_tokens"], usage["output_tokens"])

    async def call_tool(self, *parts: Part) -> list[tuple[str, dict[str, Any]]]:
        message = await self._chat.bind_tools([weather]).ainvoke(self._messages(parts))
        return [(call["name"], call["args"]) for call in message.tool_calls]

    async def parse(self, *parts: Part) -> object:
        return await self._chat.with_structured_output(Color).ainvoke(self._messages(parts))

    async def stream(self, *parts: Part) -> AsyncGenerator[str, None]:
        async with contextlib.aclosing(self._chat.astream(self._messages(parts))) as chunks:
            async for chunk in chunks:
                yield chunk.text

    async def aclose(self) -> None:
        await self._chat._async_client.close()
        self._chat._client.close()


class LlamaIndexClient:
    """LlamaIndex's `Ollama`."""

    def __init__(self, served: Served) -> None:
        module = pytest.importorskip("llama_index.llms.ollama", reason="llama-index-llms-ollama is not installed")
        import ollama

        self.errors = (ollama.ResponseError,)
        self._llm = module.Ollama(model="tiny", base_url=host(served), request_timeout=HANG)

    @staticmethod
    def _messages(parts: Sequence[Part]) -> list[Any]:
        from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock

        blocks = [TextBlock(text=value) if kind == "text" else ImageBlock(url=value) for kind, value in parts]
        return [ChatMessage(role="user", blocks=blocks)]

    async def ask(self, *parts: Part) -> Result:
        response = await self._llm.achat(self._messages(parts))
        usage = response.raw["usage"]
        return Result(response.message.content, usage["prompt_tokens"], usage["completion_tokens"])

    async def call_tool(self, *parts: Part) -> list[tuple[str, dict[str, Any]]]:
        from llama_index.core.tools import FunctionTool

        tool = FunctionTool.from_defaults(weather)
        response = await self._llm.achat_with_tools([tool], chat_history=self._messages(parts))
        calls = self._llm.get_tool_calls_from_response(response)
        return [(call.tool_name, call.tool_kwargs) for call in calls]

    async def parse(self, *parts: Part) -> object:
        return (await self._llm.as_structured_llm(Color).achat(self._messages(parts))).raw

    async def stream(self, *parts: Part) -> AsyncGenerator[str, None]:
        """Read the stream in a task, and cancel it: closing the stream would not close the connection."""
        texts: asyncio.Queue[str | None] = asyncio.Queue()

        async def read() -> None:
            async for chunk in await self._llm.astream_chat(self._messages(parts)):
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
        await self._llm.async_client.close()
        self._llm.client.close()


class LiteLLMOllamaClient(LiteLLMProviderClient):
    """LiteLLM's functions, with its own provider for Ollama's API."""

    model: ClassVar = "ollama_chat/tiny"
    options: ClassVar = {"extra_headers": JSON_HEADER}


DRIVERS = {
    "ollama": OllamaClient,
    "chat-ollama": ChatOllamaClient,
    "llama-index-ollama": LlamaIndexClient,
    "litellm-ollama": LiteLLMOllamaClient,
}


@pytest.fixture(scope="module")
def served(tiny_checkpoint):
    with serve_script(str(tiny_checkpoint)) as served:
        yield served


@pytest.mark.parametrize(("client", "feature"), cells(list(DRIVERS)))
def test_client_supports_feature(served, client, feature):
    CHECKS[feature](DRIVERS[client], served)


def converse_with_ollama(served: Served) -> str:
    ollama = pytest.importorskip("ollama", reason="ollama is not installed")
    client = ollama.Client(host(served), timeout=HANG)
    messages = ollama_messages([IMAGE, TEXT])
    with contextlib.closing(client):
        messages.append(client.chat("tiny", messages, tools=[weather]).message)
        messages.append({"role": "tool", "tool_name": "weather", "content": "Sunny."})
        text = "".join(part.message.content for part in client.chat("tiny", messages, stream=True))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
        return client.chat("tiny", messages, options={"temperature": 0.5}).message.content


def converse_with_langchain(served: Served) -> str:
    from langchain_core.messages import HumanMessage, ToolMessage

    chat: Any = ChatOllamaClient(served)._chat
    messages: list[Any] = ChatOllamaClient._messages([IMAGE, TEXT])
    with contextlib.closing(chat._client):
        messages.append(chat.bind_tools([weather]).invoke(messages))
        messages.append(ToolMessage("Sunny.", tool_call_id=messages[-1].tool_calls[0]["id"]))
        messages += [chat.bind_tools([weather]).invoke(messages), HumanMessage("And?")]
        return chat.invoke(messages).text


def converse_with_llama_index(served: Served) -> str:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool

    llm = LlamaIndexClient(served)._llm
    tools = [FunctionTool.from_defaults(weather)]
    messages = LlamaIndexClient._messages([IMAGE, TEXT])
    with contextlib.closing(llm.client):
        messages.append(llm.chat_with_tools(tools, chat_history=messages).message)
        messages.append(ChatMessage(role="tool", content="Sunny."))
        messages.append(llm.chat_with_tools(tools, chat_history=messages).message)
        return llm.chat([*messages, ChatMessage(role="user", content="And?")]).message.content


def converse_with_litellm(served: Served) -> str:
    async def converse() -> str:
        async with contextlib.aclosing(LiteLLMOllamaClient(served)) as client:

            async def say(**options: Any) -> Any:
                return (await client.complete(messages, **options)).choices[0].message

            messages: list[Any] = openai_messages([IMAGE, TEXT])
            messages.append(await say(tools=[TOOL]))
            messages.append({"role": "tool", "tool_call_id": messages[-1].tool_calls[0].id, "content": "Sunny."})
            messages.append(await say(tools=[TOOL], max_tokens=99))
            messages.append({"role": "user", "content": "And?"})
            return (await say(temperature=0.5)).content

    return asyncio.run(converse())


CONVERSATIONS = [converse_with_ollama, converse_with_langchain, converse_with_llama_index, converse_with_litellm]


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # LiteLLM's messages have tool calls as dicts
@pytest.mark.parametrize("converse", CONVERSATIONS)
def test_fields_of_responses_can_be_sent_back(served, converse, monkeypatch, caplog):
    monkeypatch.setattr(body, "_LOG", NameLog(body.logger, "%s", "No more."))
    served.script.play(CALL, "It is a circle.", RESPONSE)
    assert converse(served) == RESPONSE
    assert [len(request.spans) for request in served.script.requests] == [1, 1, 1]
    assert [record.getMessage() for record in caplog.records if record.name == body.__name__] == []


def test_other_methods_of_the_client_work(served, monkeypatch):
    ollama = pytest.importorskip("ollama", reason="ollama is not installed")
    served.script.play(RESPONSE)
    with contextlib.closing(ollama.Client(host(served), timeout=HANG)) as client:
        for found in (client.list().models, client.ps().models):
            assert [model.model for model in found] == ["tiny:latest"]
            assert found[0].size > 0
            assert (found[0].details.family, found[0].details.quantization_level) == ("qwen2_vl", "F32")
            assert found[0].details.parameter_size.endswith("M")
        assert "vision" in client.show("tiny").capabilities
        image = IMAGE.value.partition(";base64,")[2]
        assert client.generate("tiny", "What is this?", images=[image]).response == RESPONSE
        assert "".join(part.response for part in client.generate("tiny", "Hello", stream=True)) == RESPONSE
        assert client.generate("tiny").done_reason == "load"
        assert client.pull("tiny").status == "success"
        assert [part.status for part in client.pull("tiny", stream=True)] == ["success"]
        assert client.chat("tiny", ollama_messages([TEXT]), logprobs=True, top_logprobs=1).logprobs
        for call in (lambda: client.delete("tiny"), lambda: client.copy("tiny", "other"), lambda: client.push("tiny")):
            with pytest.raises(ollama.ResponseError, match="fixed when it starts"):
                call()
        with pytest.raises(ollama.ResponseError, match="generates text"):
            client.embed("tiny", "Hello")


def test_every_field_of_ollama_is_in_exactly_one_group():
    types = pytest.importorskip("ollama._types", reason="ollama is not installed")
    for theirs, groups in (
        (types.ChatRequest, [OllamaChatRequest.model_fields, REJECTED_IN_OLLAMA]),
        (types.GenerateRequest, [OllamaGenerateRequest.model_fields, REJECTED_IN_GENERATE]),
        (types.Options, [OllamaOptions.model_fields, REJECTED_OPTIONS]),
    ):
        found = {name: sum(name in group for group in groups) for name in theirs.model_fields}
        assert found == dict.fromkeys(found, 1)


def test_programs_of_the_page_print_what_it_states():
    pytest.importorskip("ollama", reason="ollama is not installed")
    with Engine(EngineConfig()) as engine, serving(engine) as server:
        check_programs("ollama.md", server.url)
