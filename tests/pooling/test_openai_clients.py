"""OpenAI's client and LangChain's `OpenAIEmbeddings`, unchanged, against the server: the vectors of `VLM.embed`."""

from __future__ import annotations

import numpy as np
import openai
import pytest
from langchain_openai import OpenAIEmbeddings
from openai.types import CreateEmbeddingResponse

from tests.conversations import as_openai, blurred_image, user
from tests.server.conftest import serving

TEXTS = ["A dog.", "A cat."]


@pytest.fixture(scope="module")
def server(embedder):
    with serving(embedder.engine) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with server.openai() as client:
        yield client


@pytest.fixture(scope="module")
def langchain(server):
    """It would otherwise send token IDs of OpenAI's vocabulary."""
    with openai.DefaultHttpxClient(trust_env=False) as http:
        options = {"model": "embedding", "base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
        yield OpenAIEmbeddings(check_embedding_ctx_length=False, http_client=http, **options)


@pytest.fixture(scope="module")
def expected(embedder):
    outputs = embedder.embed([as_openai([user(text)]) for text in TEXTS], use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


@pytest.mark.client("openai-embeddings", "embed-text")
def test_openai_returns_the_vectors_of_vlm(client, expected):
    created = client.embeddings.create(model="embedding", input=TEXTS)  # it requests base64
    np.testing.assert_allclose([row.embedding for row in created.data], expected, atol=1e-5)


@pytest.mark.client("openai-embeddings", "embed-image")
def test_openai_sends_images_as_messages(client, embedder):
    messages = as_openai([user(blurred_image(1))])
    body = {"model": "embedding", "messages": messages}
    created = client.post("/embeddings", body=body, cast_to=CreateEmbeddingResponse)
    (output,) = embedder.embed([messages], use_tqdm=False)
    np.testing.assert_allclose(created.data[0].embedding, output.outputs.embedding, atol=1e-5)


@pytest.mark.client("openai-embeddings-langchain", "embed-text")
def test_langchain_returns_the_vectors_of_vlm(langchain, expected):
    np.testing.assert_allclose(langchain.embed_documents(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(langchain.embed_query(TEXTS[1]), expected[1], atol=1e-5)


BAD = [
    ([], {}, "input"),
    ([""], {}, "input[0]"),
    (["a", "b " * 5000], {}, "input[1]"),
    (["a"], {"dimensions": 7}, "dimensions"),
]


@pytest.mark.client("openai-embeddings", "pooling-errors")
@pytest.mark.parametrize(("texts", "options", "param"), BAD)
def test_openai_raises_an_error_that_names_the_field(client, texts, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="embedding", input=texts, **options)
    assert caught.value.param == param


@pytest.mark.client("openai-embeddings-langchain", "pooling-errors")
@pytest.mark.parametrize(("texts", "options", "param"), BAD[1:])
def test_langchain_raises_an_error_that_names_the_field(langchain, texts, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        langchain.embed_documents(texts, **options)
    assert caught.value.param == param
