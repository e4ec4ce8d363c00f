from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple, TypeVar

import openai
import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise, importing it downloads prices
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from importing LiteLLM
    import litellm

from litellm.llms.custom_httpx.http_handler import HTTPHandler

import dashinfer_vlm_litellm
from dashinfer_vlm_core.engine.shared import SharedEngines
from dashinfer_vlm_core.protocol.sampling import SAMPLING_PARAMETERS
from dashinfer_vlm_core.testing import Script, scripted_registry
from dashinfer_vlm_litellm import DashInferVLM

T = TypeVar("T")
NUMBERS = itertools.count()
"""Numbers of the scripted providers: what LiteLLM knows of a provider outlives the test."""
HELLO = [{"role": "user", "content": "Hello"}]


def text_of(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def counts(usage):
    """Return the token counts that are in LiteLLM's and in OpenAI's types."""
    details = usage.prompt_tokens_details
    return (
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
        details.image_tokens,
        details.video_tokens,
    )


async def complete(model, **options):
    return await litellm.acompletion(model, **options)


async def stream(model, **options):
    return [chunk async for chunk in await litellm.acompletion(model, stream=True, **options)]


def close_clients() -> None:
    """Close the HTTP clients that LiteLLM keeps. Their sockets would be closed when garbage is collected, which is
    reported as an error of the test that runs by then."""
    clients = litellm.in_memory_llm_clients_cache
    for client in clients.cache_dict.values():
        if isinstance(client, HTTPHandler | openai.OpenAI):
            client.close()
    clients.flush_cache()


async def closing_clients(call: Awaitable[T]) -> T:
    """Await a call, and close the clients that LiteLLM keeps for the event loop as well."""
    try:
        return await call
    finally:
        await litellm.close_litellm_async_clients()
        close_clients()


class Scripted(NamedTuple):
    """A provider with a unique name and real engines with a scripted decoder."""

    model: str
    script: Script
    engines: SharedEngines


@pytest.fixture
def scripted(tiny_checkpoint) -> Iterator[Callable[..., Scripted]]:
    """Register providers with scripted responses: `litellm.completion(scripted("Yes.").model, ...)`."""
    made = []

    def start(*responses, delay=0.0, supported_params=SAMPLING_PARAMETERS) -> Scripted:
        script = Script(*responses, delay=delay, supported_params=supported_params)
        engines = SharedEngines(scripted_registry(script))
        provider = f"scripted_{next(NUMBERS)}"
        made.append((provider, engines))
        item = {"provider": provider, "custom_handler": DashInferVLM(engines, name=provider)}
        litellm.custom_provider_map = [*litellm.custom_provider_map, item]
        litellm.utils.custom_llm_setup()
        return Scripted(f"{provider}/{tiny_checkpoint}", script, engines)

    os.environ["DASHINFER_VLM_DECODER"] = "scripted"
    yield start
    for _, engines in made:
        engines.close()
    names = {provider for provider, _ in made}
    litellm.custom_provider_map = [item for item in litellm.custom_provider_map if item["provider"] not in names]


@pytest.fixture
def demo() -> Iterator[str]:
    """Return LiteLLM's name of the bundled model."""
    dashinfer_vlm_litellm.register()
    return "dashinfer_vlm/demo"
