from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else importing it fetches prices from the network
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of LiteLLM's import are not ours to mend
    import litellm

import dashinfer_vlm_litellm
from dashinfer_vlm_core.engine.shared import SharedEngines
from dashinfer_vlm_core.protocol.sampling import SAMPLING_PARAMETERS
from dashinfer_vlm_core.testing import Script, scripted_registry
from dashinfer_vlm_litellm import DashInferVLM

HELLO = [{"role": "user", "content": "Hello"}]


def text_of(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def counts(usage):
    """What LiteLLM and OpenAI's types both hold."""
    details = usage.prompt_tokens_details
    return (
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
        details.image_tokens,
        details.video_tokens,
    )


async def ask(model, **options):
    return await litellm.acompletion(model, **options)


async def stream(model, **options):
    return [chunk async for chunk in await litellm.acompletion(model, stream=True, **options)]


class Scripted(NamedTuple):
    """A provider of its own name, whose engines are whole but for the decoder, which plays a script."""

    model: str
    script: Script
    engines: SharedEngines


@pytest.fixture
def scripted(tiny_checkpoint) -> Iterator[Callable[..., Scripted]]:
    """Register providers whose engines play a script: `litellm.completion(scripted("Yes.").model, ...)`."""
    made = []

    def start(*answers, delay=0.0, supported_params=SAMPLING_PARAMETERS) -> Scripted:
        script = Script(*answers, delay=delay, supported_params=supported_params)
        engines = SharedEngines(scripted_registry(script))
        provider = f"scripted_{len(made)}"
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
    """The bundled model, as LiteLLM names it."""
    dashinfer_vlm_litellm.register()
    return "dashinfer_vlm/demo"
