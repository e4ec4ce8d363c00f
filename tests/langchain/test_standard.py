"""LangChain's standard suites, over the real engine with a decoder that plays a model which calls tools when it should.

What they skip, and why, stands in docs/langchain.md.
"""

from __future__ import annotations

import json
import re

import httpx
import pytest
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from dashinfer_vlm_core import hookimpl
from dashinfer_vlm_core.engine.shared import SharedEngines
from dashinfer_vlm_core.testing import Script, scripted_registry
from dashinfer_vlm_langchain import ChatDashInferVLM
from tests.samples import encode, noise
from tests.web import body, serve

pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")

HOST = "https://raw.githubusercontent.com"
VALUES = {
    "input": 3,
    "answer_style": "pirate",
    "location": "San Francisco, CA",
    "description": "A company",
    "a": 3,
    "b": 4,
    "setup": "Why do cats purr?",
    "punchline": "Because they can.",
}


class Player:
    """A model that does what its prompt asks for: it calls the first tool, answers with a joke, or greets."""

    def __init__(self, read_prompt) -> None:
        self._read = read_prompt

    def __call__(self, request) -> str:
        prompt = self._read(request)
        question = prompt.split("<|im_start|>")[-2]
        if "<tool_response>" in question:
            return "It is done."
        if tools := re.findall(r'^{"type": "function".*}$', prompt, re.MULTILINE):
            return self._call(json.loads(tools[0])["function"], question)
        if request.grammar is not None:
            return json.dumps({name: VALUES[name] for name in ("setup", "punchline")})
        return "Hello, how are you?"

    def _call(self, function, question) -> str:
        known = VALUES | {"customer_name": "".join(re.findall(r"named '(.*?)'", question))}
        arguments = {name: known[name] for name in function["parameters"].get("properties", {})}
        call = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"


class Nearby(ChatDashInferVLM):
    """Finds on this machine what the suites have on the network."""

    web: str

    async def _agenerate(self, messages, stop=None, run_manager=None, **kwargs):
        near = [type(m).model_validate_json(m.model_dump_json().replace(HOST, self.web)) for m in messages]
        return await super()._agenerate(near, stop, run_manager, **kwargs)


class OneMore:
    """A plugin that gives a model a second name."""

    def __init__(self, folder) -> None:
        self._folder = folder

    @hookimpl
    def register_models(self, register) -> None:
        register("one-more", self._folder)


@pytest.fixture(scope="session")
def played(tiny_checkpoint, read_prompt):
    registry = scripted_registry(Script(Player(read_prompt)))
    registry.add_plugin(OneMore(tiny_checkpoint), name="one more")
    engines = SharedEngines(registry)
    options = {"decoder": "scripted", "allow_private_addresses": True}
    yield {"model": str(tiny_checkpoint), "engines": engines, "engine_options": options}
    engines.close()


@pytest.fixture(autouse=True)
def network(request, played, monkeypatch):
    """The suites download a picture by `httpx.get`: they get one from a real server, on loopback."""
    path = "/langchain-ai/docs/4d11d08b6b0e210bd456943f7a22febbd168b543/src/images/agentic-rag-output.png"
    with serve({path: body(encode(noise(60, 80)), "Content-Type: image/png")}) as web:
        near = httpx.Client(trust_env=False)
        monkeypatch.setattr(httpx, "get", lambda url, **options: near.get(url.replace(HOST, web.url("")), **options))
        request.instance.played = played | {"web": web.url("")}
        yield
        near.close()


class Abilities:
    """What is switched on."""

    chat_model_class = Nearby
    supports_image_inputs = True
    supports_image_urls = True
    supports_video_inputs = True
    supports_image_tool_message = True
    supports_json_mode = True
    returns_usage_metadata = True
    supports_model_override = True
    model_override_value = "one-more"
    supported_usage_metadata_details = {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}  # noqa: RUF012  the suites' own form

    @property
    def chat_model_params(self):
        return self.played

    def invoke_with_cache_read_input(self, *, stream=False):
        chat = self.chat_model_class(**self.played)
        if not stream:
            return chat.invoke("Hello")
        first, *rest = chat.stream("Hello")
        return sum(rest, first)


class TestUnit(Abilities, ChatModelUnitTests):
    pass


class TestIntegration(Abilities, ChatModelIntegrationTests):
    """With structured output by its default method, the schema."""


class TestStructuredByCall(Abilities, ChatModelIntegrationTests):
    structured_output_kwargs = {"method": "function_calling"}  # noqa: RUF012  the suites' own form
