"""LiteLLM's functions with its own provider for another API, as a client in tests."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, ClassVar

import openai

from tests.clients.drivers import JSON_SCHEMA, TOOL, Color, Part, Result, Served, openai_messages


class LiteLLMProviderClient:
    """Base class of drivers.

    Attributes:
        model: the model with the prefix of the provider.
        options: what each call adds to the URL of the server.
    """

    errors: ClassVar = (openai.APIError,)  # the base class of LiteLLM's exceptions
    model: ClassVar[str]
    options: ClassVar[dict[str, Any]]

    def __init__(self, served: Served) -> None:
        import litellm

        litellm.disable_aiohttp_transport = True  # LiteLLM does not close its sessions
        self._url = served.url.removesuffix("/v1")

    async def complete(self, messages: list[Any], **options: Any) -> Any:
        import litellm

        return await litellm.acompletion(self.model, messages, api_base=self._url, **self.options, **options)

    async def ask(self, *parts: Part, **options: Any) -> Result:
        completion = await self.complete(openai_messages(parts), **options)
        message = completion.choices[0].message
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
        usage = completion.usage
        return Result(message.content or "", usage.prompt_tokens, usage.completion_tokens, calls)

    async def call_tool(self, *parts: Part) -> list[tuple[str, dict[str, Any]]]:
        return (await self.ask(*parts, tools=[TOOL])).calls

    async def parse(self, *parts: Part) -> object:
        return Color.model_validate_json((await self.ask(*parts, response_format=JSON_SCHEMA)).text)

    async def stream(self, *parts: Part) -> AsyncGenerator[str, None]:
        chunks = await self.complete(openai_messages(parts), stream=True)
        try:
            async for chunk in chunks:
                yield chunk.choices[0].delta.content or ""
        finally:
            await chunks.aclose()

    async def aclose(self) -> None:
        """Close the HTTP clients, which LiteLLM shares."""
        import litellm

        await litellm.close_litellm_async_clients()
        litellm.in_memory_llm_clients_cache.flush_cache()
