"""One class per client library. All have the same methods, which call the library as its documentation shows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import openai
from pydantic import BaseModel

from dashinfer_vlm_core import VLM, Engine, SamplingParams, StructuredOutputsParams
from dashinfer_vlm_core.engine.shared import SharedEngines
from dashinfer_vlm_core.errors import DashInferVLMError
from dashinfer_vlm_core.testing import Script
from tests.waiting import HANG
from tests.web import CERTIFICATES


class Part(NamedTuple):
    """A part of a prompt; media are data: URLs."""

    kind: Literal["text", "image", "video"]
    value: str


class Color(BaseModel):
    """The color of an object."""

    color: Literal["red", "green"]


def weather(city: str) -> str:
    """Return the weather in a city."""
    return f"Sunny in {city}."


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "Color", "schema": Color.model_json_schema()}}


@dataclass(frozen=True)
class Served:
    """An engine with a scripted decoder, in this process and behind a server.

    Attributes:
        engine: the engine.
        script: the responses, and the requests that the decoder received.
        url: the base URL of the server, with `/v1`.
    """

    engine: Engine
    script: Script
    url: str


@dataclass(frozen=True)
class Result:
    """What a client library returned."""

    text: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


class OneEngine(SharedEngines):
    """A registry that has one engine for every configuration, and remote engines of its own."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    async def aget(self, config: object) -> Engine:
        return self._engine


def openai_parts(parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": value}
        if kind == "text"
        else {"type": f"{kind}_url", f"{kind}_url": {"url": value}}
        for kind, value in parts
    ]  # fmt: skip


def responses_input(parts: Sequence[Part]) -> Any:
    fields = {"text": "text", "image": "image_url", "video": "video_url"}
    return [{"role": "user", "content": [{"type": f"input_{kind}", fields[kind]: value} for kind, value in parts]}]


def openai_messages(parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": openai_parts(parts)}]


def to_result(completion: Any) -> Result:
    """Convert a completion in OpenAI's types, which LiteLLM's resemble."""
    message, usage = completion.choices[0].message, completion.usage
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    return Result(message.content or "", usage.prompt_tokens, usage.completion_tokens, calls)


class OpenAIClient:
    """The official client."""

    errors: ClassVar = (openai.APIError,)

    def __init__(self, served: Served) -> None:
        self._client = openai.AsyncOpenAI(
            base_url=served.url,
            api_key="none",
            max_retries=0,
            timeout=HANG,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False, verify=CERTIFICATES),
        )

    async def ask(self, *parts: Part, **options: Any) -> Result:
        create = self._client.chat.completions.create
        return to_result(await create(model="tiny", messages=openai_messages(parts), **options))

    async def call_tool(self, *parts: Part) -> list[tuple[str, dict[str, Any]]]:
        return (await self.ask(*parts, tools=[TOOL])).calls

    async def parse(self, *parts: Part) -> object:
        parse = self._client.chat.completions.parse
        messages: Any = openai_messages(parts)
        done = await parse(model="tiny", messages=messages, response_format=Color)
        return done.choices[0].message.parsed

    async def stream(self, *parts: Part) -> AsyncGenerator[str, None]:
        create = self._client.chat.completions.create
        async with await create(model="tiny", messages=openai_messages(parts), stream=True) as chunks:
            async for chunk in chunks:
                yield chunk.choices[0].delta.content or ""

    async def aclose(self) -> None:
        await self._client.close()


class OpenAIResponsesClient(OpenAIClient):
    """The official client with the Responses API."""

    async def ask(self, *parts: Part, **options: Any) -> Result:
        done = await self._client.responses.create(model="tiny", input=responses_input(parts), **options)
        calls = [(item.name, json.loads(item.arguments)) for item in done.output if item.type == "function_call"]
        return Result(done.output_text, done.usage.input_tokens, done.usage.output_tokens, calls)

    async def call_tool(self, *parts: Part) -> list[tuple[str, dict[str, Any]]]:
        return (await self.ask(*parts, tools=[{"type": "function", **TOOL["function"]}])).calls

    async def parse(self, *parts: Part) -> object:
        done = await self._client.responses.parse(model="tiny", input=responses_input(parts), text_format=Color)
        return done.output_parsed

    async def stream(self, *parts: Part) -> AsyncGenerator[str, None]:
        create = self._client.responses.create
        async with await create(model="tiny", input=responses_input(parts), stream=True) as events:
            async for event in events:
                if event.type == "response.output_text.delta":
                    yield event.delta


class LiteLLMFunctions:
    """Base class of the drivers that call LiteLLM's functions."""

    errors: ClassVar = (openai.APIError,)  # the base class of LiteLLM's exceptions
    response_format: ClassVar[Any] = Color

    async def complete(self, messages: list[Any], **options: Any) -> Any:
        raise NotImplementedError

    async def ask(self, *parts: Part, **options: Any) -> Result:
        return to_result(await self.complete(openai_messages(parts), **options))

    async def call_tool(self, *parts: Part) -> list[tuple[str, dict[str, Any]]]:
        return (await self.ask(*parts, tools=[TOOL])).calls

    async def parse(self, *parts: Part) -> object:
        return Color.model_validate_json((await self.ask(*parts, response_format=self.response_format)).text)

    async def stream(self, *parts: Part) -> AsyncGenerator[str, None]:
        chunks = await self.complete(openai_messages(parts), stream=True)
        try:
            async for chunk in chunks:
                yield chunk.choices[0].delta.content or ""
        finally:
            await chunks.aclose()


class LiteLLMClient(LiteLLMFunctions):
    """LiteLLM's functions, with the provider in this process."""

    def __init__(self, served: Served) -> None:
        import litellm

        from dashinfer_vlm_litellm import DashInferVLM

        self._map = litellm.custom_provider_map
        self._engines = OneEngine(served.engine)
        item: Any = {"provider": "client_test", "custom_handler": DashInferVLM(self._engines, name="client_test")}
        litellm.custom_provider_map = [*self._map, item]
        litellm.utils.custom_llm_setup()
        self._options: dict[str, Any] = {}

    async def complete(self, messages: list[Any], **options: Any) -> Any:
        import litellm

        return await litellm.acompletion("client_test/tiny", messages, **self._options, **options)

    async def aclose(self) -> None:
        import litellm

        litellm.custom_provider_map = self._map
        self._engines.close()


class LiteLLMServerClient(LiteLLMClient):
    """LiteLLM's functions, with the provider and a server."""

    def __init__(self, served: Served) -> None:
        super().__init__(served)
        self._options = {"api_base": served.url}


class RouterClient(LiteLLMClient):
    """LiteLLM's Router with one deployment."""

    def __init__(self, served: Served) -> None:
        super().__init__(served)
        import litellm

        deployment: Any = {"model_name": "eyes", "litellm_params": {"model": "client_test/tiny"}}
        self._router = litellm.Router(model_list=[deployment], num_retries=0)

    async def complete(self, messages: list[Any], **options: Any) -> Any:
        return await self._router.acompletion("eyes", messages=messages, **options)

    async def aclose(self) -> None:
        self._router.discard()
        await super().aclose()


def langchain_blocks(parts: Sequence[Part]) -> list[Any]:
    return [{"type": kind, "text" if kind == "text" else "url": value} for kind, value in parts]


class LangChainClient:
    """`ChatDashInferVLM` with an engine in this process."""

    errors: ClassVar = (DashInferVLMError,)

    def __init__(self, served: Served) -> None:
        from dashinfer_vlm_langchain import ChatDashInferVLM

        self._chat: Any = ChatDashInferVLM(engine=served.engine)

    async def ask(self, *parts: Part) -> Result:
        return _from_message(await self._chat.ainvoke(_langchain_messages(parts)))

    async def call_tool(self, *parts: Part) -> list[tuple[str, dict[str, Any]]]:
        message = await self._chat.bind_tools([weather]).ainvoke(_langchain_messages(parts))
        return [(call["name"], call["args"]) for call in message.tool_calls]

    async def parse(self, *parts: Part) -> object:
        return await self._chat.with_structured_output(Color).ainvoke(_langchain_messages(parts))

    async def stream(self, *parts: Part) -> AsyncGenerator[str, None]:
        async with contextlib.aclosing(_generator(self._chat.astream(_langchain_messages(parts)))) as chunks:
            async for chunk in chunks:
                yield chunk.text

    async def aclose(self) -> None:
        """Do nothing: the engine belongs to the caller."""


def _langchain_messages(parts: Sequence[Part]) -> list[Any]:
    from langchain_core.messages import HumanMessage

    return [HumanMessage(langchain_blocks(parts))]


def _from_message(message: Any) -> Result:
    usage = message.usage_metadata
    return Result(message.text, usage["input_tokens"], usage["output_tokens"])


def _generator(iterator: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    assert isinstance(iterator, AsyncGenerator)
    return iterator


class LangChainServerClient(LangChainClient):
    """`ChatDashInferVLM` with a server."""

    def __init__(self, served: Served) -> None:
        from dashinfer_vlm_langchain import ChatDashInferVLM

        self._engines = SharedEngines()
        self._chat = ChatDashInferVLM(model="tiny", base_url=served.url, engines=self._engines)

    async def aclose(self) -> None:
        self._engines.close()


class ChatOpenAIClient(LangChainClient):
    """LangChain's own `ChatOpenAI`."""

    errors: ClassVar = (openai.APIError,)
    uses_responses_api: ClassVar = False

    def __init__(self, served: Served) -> None:
        from langchain_openai import ChatOpenAI

        self._http = openai.DefaultAsyncHttpxClient(trust_env=False)
        self._chat = ChatOpenAI(
            model="tiny",
            base_url=served.url,
            api_key="none",
            max_retries=0,
            timeout=HANG,
            use_responses_api=self.uses_responses_api,
            http_async_client=self._http,
        )

    async def aclose(self) -> None:
        await self._http.aclose()


class ChatOpenAIResponsesClient(ChatOpenAIClient):
    """LangChain's own `ChatOpenAI` with the Responses API."""

    uses_responses_api = True


class LangGraphClient(LangChainClient):
    """An agent of `langchain.agents`, which is a LangGraph graph."""

    def _agent(self, **options: Any) -> Any:
        from langchain.agents import create_agent

        return create_agent(self._chat, **{"tools": [], **options})

    async def ask(self, *parts: Part) -> Result:
        state = await self._agent().ainvoke({"messages": _langchain_messages(parts)})
        return _from_message(state["messages"][-1])

    async def call_tool(self, *parts: Part) -> list[tuple[str, dict[str, Any]]]:
        """Return the calls of tools that were answered."""
        state = await self._agent(tools=[weather]).ainvoke({"messages": _langchain_messages(parts)})
        _, message, result, _ = state["messages"]
        assert result.text == "Sunny in Rome."
        return [(call["name"], call["args"]) for call in message.tool_calls]

    async def parse(self, *parts: Part) -> object:
        from langchain.agents.structured_output import ProviderStrategy

        agent = self._agent(response_format=ProviderStrategy(Color))
        return (await agent.ainvoke({"messages": _langchain_messages(parts)}))["structured_response"]

    async def stream(self, *parts: Part) -> AsyncGenerator[str, None]:
        stream = self._agent().astream({"messages": _langchain_messages(parts)}, stream_mode="messages")
        async with contextlib.aclosing(_generator(stream)) as chunks:
            async for chunk, _ in chunks:
                yield chunk.text


class VllmStyleClient:
    """`VLM`, which scripts use like vLLM's `LLM`."""

    errors: ClassVar = (DashInferVLMError,)

    def __init__(self, served: Served) -> None:
        self._llm = VLM(engine=served.engine)

    async def ask(self, *parts: Part, params: SamplingParams | None = None, **options: Any) -> Result:
        outputs = await asyncio.to_thread(self._llm.chat, openai_messages(parts), params, use_tqdm=False, **options)
        (output,) = outputs[0].outputs
        return Result(output.text, len(outputs[0].prompt_token_ids), len(output.token_ids))

    async def call_tool(self, *parts: Part) -> list[tuple[str, dict[str, Any]]]:
        """Parse the call in the text, as scripts for vLLM do."""
        text = (await self.ask(*parts, tools=[TOOL])).text
        call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        return [(call["name"], call["arguments"])]

    async def parse(self, *parts: Part) -> object:
        schema = StructuredOutputsParams(json=Color.model_json_schema())
        result = await self.ask(*parts, params=SamplingParams(structured_outputs=schema))
        return Color.model_validate_json(result.text)

    async def aclose(self) -> None:
        """Do nothing: the engine belongs to the caller."""


class CurlError(Exception):
    """curl failed, or the response contains an error."""


class CurlClient:
    """The command `curl` with a JSON body."""

    errors: ClassVar = (CurlError,)

    def __init__(self, served: Served) -> None:
        self._url = f"{served.url}/chat/completions"

    @contextlib.asynccontextmanager
    async def _post(self, parts: Sequence[Part], **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
        body = json.dumps({"messages": openai_messages(parts), **options})
        process = await asyncio.create_subprocess_exec(
            "curl", "-sSN", "--fail-with-body", self._url, "-H", "Content-Type: application/json", "-d", "@-",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(body.encode())
        process.stdin.close()
        try:
            yield process
        finally:
            if process.returncode is None:
                process.terminate()
            await process.communicate()

    async def _json(self, parts: Sequence[Part], **options: Any) -> Any:
        async with self._post(parts, **options) as process:
            output, _ = await process.communicate()
            if process.returncode:
                raise CurlError(output.decode())
        return json.loads(output)

    async def ask(self, *parts: Part) -> Result:
        found = await self._json(parts)
        usage = found["usage"]
        return Result(found["choices"][0]["message"]["content"], usage["prompt_tokens"], usage["completion_tokens"])

    async def call_tool(self, *parts: Part) -> list[tuple[str, dict[str, Any]]]:
        message = (await self._json(parts, tools=[TOOL]))["choices"][0]["message"]
        functions = [call["function"] for call in message["tool_calls"]]
        return [(function["name"], json.loads(function["arguments"])) for function in functions]

    async def parse(self, *parts: Part) -> object:
        found = await self._json(parts, response_format=JSON_SCHEMA)
        return Color.model_validate_json(found["choices"][0]["message"]["content"])

    async def stream(self, *parts: Part) -> AsyncGenerator[str, None]:
        async with self._post(parts, stream=True) as process:
            assert process.stdout is not None
            async for line in process.stdout:
                event = line.decode().strip().removeprefix("data: ")
                if '"error"' in event:
                    raise CurlError(event)
                if event and event != "[DONE]":
                    yield json.loads(event)["choices"][0]["delta"].get("content") or ""

    async def aclose(self) -> None:
        """Do nothing: each call is a process."""


DRIVERS: dict[str, type[Any]] = {
    "openai": OpenAIClient,
    "openai-responses": OpenAIResponsesClient,
    "litellm": LiteLLMClient,
    "litellm-router": RouterClient,
    "litellm-server": LiteLLMServerClient,
    "langchain": LangChainClient,
    "langchain-server": LangChainServerClient,
    "chat-openai": ChatOpenAIClient,
    "chat-openai-responses": ChatOpenAIResponsesClient,
    "langgraph": LangGraphClient,
    "vllm-style": VllmStyleClient,
    "curl": CurlClient,
}
"""The clients that are installed for the tests, by their name in docs/clients.md."""
