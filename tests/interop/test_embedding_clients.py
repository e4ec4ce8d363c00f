"""LlamaIndex's `OpenAILikeEmbedding`, unchanged, against the server: the vectors of `VLM.embed`."""

from __future__ import annotations

import asyncio

import numpy as np
import openai
import pytest

from dashinfer_vlm_core import VLM
from tests.conversations import as_openai, user
from tests.pooling.checkpoints import write_embedding
from tests.qwen3_vl.tiny_qwen3 import write_checkpoint
from tests.server.conftest import serving

pytestmark = pytest.mark.interop

CLIENT = "llama-index-embeddings"
TEXTS = ["A dog.", "A cat."]


@pytest.fixture(scope="module")
def vlm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = write_embedding(write_checkpoint(folder / "tiny"), folder / "embedding")
    with VLM(model, device="cpu", dtype="float32", kv_cache_mib=64) as vlm:
        yield vlm


@pytest.fixture(scope="module")
def model(vlm):
    """Return the class with arguments for the server."""
    module = pytest.importorskip("llama_index.embeddings.openai_like", reason="LlamaIndex is not installed")
    with (
        serving(vlm.engine) as server,
        openai.DefaultHttpxClient(trust_env=False) as http,
    ):
        arguments = {"model_name": "embedding", "api_base": f"{server.url}/v1", "max_retries": 0, "http_client": http}
        yield lambda **options: module.OpenAILikeEmbedding(**arguments, **options)


async def embed(model):
    async with openai.DefaultAsyncHttpxClient(trust_env=False) as http:
        return await model(async_http_client=http).aget_text_embedding_batch(TEXTS)


@pytest.mark.client(CLIENT, "embed-text")
def test_llama_index_returns_the_vectors_of_vlm(model, vlm):
    outputs = vlm.embed([as_openai([user(text)]) for text in TEXTS], use_tqdm=False)
    expected = [output.outputs.embedding for output in outputs]
    np.testing.assert_allclose(model().get_text_embedding_batch(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(model().get_query_embedding(TEXTS[0]), expected[0], atol=1e-5)
    np.testing.assert_allclose(asyncio.run(embed(model)), expected, atol=1e-5)
    assert model(dimensions=64).get_text_embedding("A dog.") == pytest.approx(expected[0], abs=1e-5)


@pytest.mark.client(CLIENT, "pooling-errors")
@pytest.mark.parametrize(
    ("texts", "options", "param"),
    [([""], {}, "input[0]"), (["a", "b " * 5000], {}, "input[1]"), (["a"], {"dimensions": 7}, "dimensions")],
)
def test_llama_index_raises_an_error_that_names_the_field(model, texts, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        model(**options).get_text_embedding_batch(texts)
    assert caught.value.param == param
