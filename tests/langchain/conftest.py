"""A chat model with the real engine and a scripted decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import tokenizers

from dashinfer_vlm_core.engine.shared import SharedEngines
from dashinfer_vlm_core.testing import EVERYTHING, Script, scripted_registry
from dashinfer_vlm_langchain import ChatDashInferVLM


class Scripted(NamedTuple):
    """A chat model, the script of its decoder, and its engine registry."""

    chat: ChatDashInferVLM
    script: Script
    engines: SharedEngines


@pytest.fixture
def scripted(tiny_checkpoint) -> Iterator[Callable[..., Scripted]]:
    """Return a chat model with scripted responses: `scripted("Yes.", max_tokens=9).chat.invoke("?")`."""
    made = []

    def start(*responses, delay=0.0, supported_params=EVERYTHING, engine_options=None, **arguments) -> Scripted:
        script = Script(*responses, delay=delay, supported_params=supported_params)
        engines = SharedEngines(scripted_registry(script))
        made.append(engines)
        options = {"decoder": "scripted", **(engine_options or {})}
        chat = ChatDashInferVLM(
            **{"model": str(tiny_checkpoint), "engines": engines, "engine_options": options, **arguments}
        )
        return Scripted(chat, script, engines)

    yield start
    for engines in made:
        engines.close()


@pytest.fixture(scope="session")
def read_prompt(tiny_checkpoint) -> Callable[[object], str]:
    """Decode the prompt of a decoder request, including special tokens."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    return lambda request: tokenizer.decode(list(request.token_ids), skip_special_tokens=False)


@pytest.fixture
def vcr() -> None:
    """What a test of LangChain's suites, which skips itself, requests from pytest-recording."""


@pytest.fixture
def demo() -> ChatDashInferVLM:
    """The bundled model."""
    return ChatDashInferVLM(temperature=0)
