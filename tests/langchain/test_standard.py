"""LangChain's standard test suites with the real engine and a decoder that simulates a model with tool calls.

docs/langchain.md lists what they skip, and why.
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
from tests.pdfs import document
from tests.samples import encode, noise
from tests.web import body, serve

pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")

HOST = "https://raw.githubusercontent.com"
PDF_HOST = "https://www.w3.org"
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


class SimulatedModel:
    """A simulated model: it calls the first tool, responds with a joke, or greets."""

    def __init__(self, read_prompt) -> None:
        self._read = read_prompt

    def __call__(self, request) -> str:
        prompt = self._read(request)
        prompt_text = prompt.split("<|im_start|>")[-2]
        if "<tool_response>" in prompt_text:
            return "It is done."
        if tools := re.findall(r'^{"type": "function".*}$', prompt, re.MULTILINE):
            return self._call(json.loads(tools[0])["function"], prompt_text)
        if request.grammar is not None:
            return json.dumps({name: VALUES[name] for name in ("setup", "punchline")})
        return "Hello, how are you?"

    def _call(self, function, prompt_text) -> str:
        known = VALUES | {"customer_name": "".join(re.findall(r"named '(.*?)'", prompt_text))}
        arguments = {name: known[name] for name in function["parameters"].get("properties", {})}
        call = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"


class LocalChat(ChatDashInferVLM):
    """Replaces the suites' URLs with those of a local server."""

    web: str

    async def _agenerate(self, messages, stop=None, run_manager=None, **kwargs):
        messages = [type(m).model_validate_json(m.model_dump_json().replace(HOST, self.web)) for m in messages]
        return await super()._agenerate(messages, stop, run_manager, **kwargs)


class AliasPlugin:
    """A plugin that registers a second name for a model."""

    def __init__(self, folder) -> None:
        self._folder = folder

    @hookimpl
    def register_models(self, register) -> None:
        register("one-more", self._folder)


@pytest.fixture(scope="session")
def model_params(tiny_checkpoint, read_prompt):
    registry = scripted_registry(Script(SimulatedModel(read_prompt)))
    registry.add_plugin(AliasPlugin(tiny_checkpoint), name="one more")
    engines = SharedEngines(registry)
    options = {"decoder": "scripted", "allow_private_addresses": True}
    yield {"model": str(tiny_checkpoint), "engines": engines, "engine_options": options}
    engines.close()


@pytest.fixture(scope="session")
def web():
    """A server of the image and the PDF that the suites download, and a client."""
    path = "/langchain-ai/docs/4d11d08b6b0e210bd456943f7a22febbd168b543/src/images/agentic-rag-output.png"
    image = body(encode(noise(60, 80)), "Content-Type: image/png")
    dummy = body(document("Dummy PDF file"), "Content-Type: application/pdf")
    pdf_path = "/WAI/ER/tests/xhtml/testfiles/resources/pdf/dummy.pdf"
    with serve({path: image, pdf_path: dummy}) as web, httpx.Client(trust_env=False) as client:
        yield web.url(""), client


@pytest.fixture(autouse=True)
def network(request, model_params, web, monkeypatch):
    """The suites download files with `httpx.get`: redirect it to a local server."""
    url, client = web

    def get(target, **options):
        return client.get(target.replace(HOST, url).replace(PDF_HOST, url), **options)

    monkeypatch.setattr(httpx, "get", get)
    request.instance.model_params = model_params | {"web": url}


class Capabilities:
    """The enabled features."""

    chat_model_class = LocalChat
    supports_image_inputs = True
    supports_image_urls = True
    supports_video_inputs = True
    supports_image_tool_message = True
    supports_pdf_inputs = True
    supports_pdf_tool_message = True
    supports_json_mode = True
    returns_usage_metadata = True
    supports_model_override = True
    model_override_value = "one-more"
    supported_usage_metadata_details = {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}  # noqa: RUF012  as in the suites

    @property
    def chat_model_params(self):
        return self.model_params

    def invoke_with_cache_read_input(self, *, stream=False):
        chat = self.chat_model_class(**self.model_params)
        if not stream:
            return chat.invoke("Hello")
        first, *rest = chat.stream("Hello")
        return sum(rest, first)


class TestUnit(Capabilities, ChatModelUnitTests):
    pass


class TestIntegration(Capabilities, ChatModelIntegrationTests):
    """With the default method of structured output, json_schema."""


class TestStructuredByCall(Capabilities, ChatModelIntegrationTests):
    structured_output_kwargs = {"method": "function_calling"}  # noqa: RUF012  as in the suites
