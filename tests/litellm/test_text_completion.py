"""LiteLLM's text completions with the server."""

from __future__ import annotations

import litellm
import pytest

from dashinfer_vlm_core.testing import scripted_engine
from tests.server.conftest import serving

TEXT = " a red circle."


@pytest.fixture(scope="module")
def call(tiny_checkpoint):
    with (
        scripted_engine(TEXT, model=str(tiny_checkpoint), served_model_name="tiny") as engine,
        serving(engine) as server,
        server.openai() as client,  # LiteLLM does not close the one that it makes for each call
    ):
        yield {
            "model": "text-completion-openai/tiny",
            "api_base": f"{server.url}/v1",
            "api_key": "none",
            "client": client,
            "max_tokens": 99,
        }


def test_completion_has_text_and_usage(call):
    response = litellm.text_completion(prompt=["One", "Two"], n=2, **call)
    assert [choice.text for choice in response.choices] == [TEXT] * 4
    assert response.usage.total_tokens == response.usage.prompt_tokens + response.usage.completion_tokens


def test_stream_has_text(call):
    chunks = litellm.text_completion(prompt="The shapes are", stream=True, **call)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == TEXT


def test_rejected_field_raises_the_error_of_an_invalid_request(call):
    with pytest.raises(litellm.BadRequestError, match="suffix"):
        litellm.text_completion(prompt="The shapes are", suffix="!", **call)
