"""The provider with `api_base`, which sends requests to a server."""

from __future__ import annotations

import asyncio
import contextlib

import litellm
import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.testing import Script, scripted_registry
from tests.litellm.conftest import HELLO, complete, counts, stream, text_of
from tests.pdfs import document
from tests.samples import data_url
from tests.server.conftest import serving
from tests.waiting import until


@pytest.fixture
def served(tiny_checkpoint, scripted):
    """Start a server with scripted responses and return arguments for LiteLLM, its engine and its script."""
    provider = scripted("Not this one.")
    name = provider.model.partition("/")[0]
    with contextlib.ExitStack() as stack:

        def start(*responses, delay=0.0):
            script = Script(*responses, delay=delay)
            config = EngineConfig(model=str(tiny_checkpoint), served_model_name="tiny", decoder="scripted")
            engine = stack.enter_context(Engine(config, registry=scripted_registry(script)))
            server = stack.enter_context(serving(engine))
            return {"model": f"{name}/tiny", "api_base": f"{server.url}/v1", "messages": HELLO}, engine, script

        yield start
    assert not provider.script.requests


def test_completion_and_stream_return_the_servers_response(served):
    call, engine, _ = served("Yes, and no.")
    expected = engine.chat({"messages": HELLO})
    for response in (litellm.completion(**call), asyncio.run(complete(**call))):
        assert response.choices[0].message.content == "Yes, and no."
        assert counts(response.usage) == counts(expected.usage)
    call |= {"stream_options": {"include_usage": True}}
    for chunks in (list(litellm.completion(stream=True, **call)), asyncio.run(stream(**call))):
        assert text_of(chunks) == "Yes, and no."
        assert [counts(chunk.usage) for chunk in chunks if getattr(chunk, "usage", None)] == [counts(expected.usage)]


def test_documents_are_sent_to_the_server(served):
    call, _, script = served("Yes.")
    file = {"file_data": data_url(document("One", "Two", size=(84, 84)), "application/pdf"), "pages": "2"}
    call["messages"] = [{"role": "user", "content": [{"type": "file", "file": file}]}]
    usage = litellm.completion(**call).usage
    (span,) = script.requests[-1].spans
    assert usage.prompt_tokens_details.image_tokens == span.length > 0


def test_invalid_request_is_rejected_by_server(served):
    call, _, _ = served("Yes.")
    with pytest.raises(litellm.BadRequestError) as caught:
        litellm.completion(top_k=-2, **call)
    assert caught.value.param == "top_k"
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**call | {"model": call["model"].replace("tiny", "huge")})


def test_engine_options_with_server_are_rejected(served):
    call, _, _ = served("Yes.")
    with pytest.raises(litellm.BadRequestError) as caught:
        litellm.completion(engine_options={"max_model_len": 64}, **call)
    assert caught.value.param == "engine_options"


def test_unreachable_server_is_unavailable(served):
    call, _, _ = served("Yes.")
    with pytest.raises(litellm.ServiceUnavailableError):
        litellm.completion(**call | {"api_base": "http://127.0.0.1:9/v1"})


@pytest.mark.slow
def test_timeout_cancels_request_on_server(served):
    call, _, script = served("A long response. " * 50, delay=0.5)
    with pytest.raises(litellm.Timeout):
        litellm.completion(timeout=1.0, **call)
    until(lambda: script.running == 0)
