"""LiteLLM's functions with its own provider for another API, as a client in tests."""

from __future__ import annotations

from typing import Any, ClassVar

from tests.clients.drivers import JSON_SCHEMA, LiteLLMFunctions, Served


class LiteLLMProviderClient(LiteLLMFunctions):
    """Base class of drivers.

    Attributes:
        model: the model with the prefix of the provider.
        options: what each call adds to the URL of the server.
    """

    response_format: ClassVar = JSON_SCHEMA
    model: ClassVar[str]
    options: ClassVar[dict[str, Any]]

    def __init__(self, served: Served) -> None:
        import litellm

        litellm.disable_aiohttp_transport = True  # LiteLLM does not close its sessions
        self._url = served.url.removesuffix("/v1")

    async def complete(self, messages: list[Any], **options: Any) -> Any:
        import litellm

        return await litellm.acompletion(self.model, messages, api_base=self._url, **self.options, **options)

    async def aclose(self) -> None:
        """Close the HTTP clients, which LiteLLM shares."""
        import litellm

        await litellm.close_litellm_async_clients()
        litellm.in_memory_llm_clients_cache.flush_cache()
