"""LiteLLM's embeddings and reranking, in this process and through a server: the same vectors and scores."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import pytest

from dashinfer_vlm_core.engine.shared import SharedEngines
from dashinfer_vlm_core.protocol import RerankRequest
from dashinfer_vlm_litellm import DashInferVLM
from tests.conversations import as_openai, blurred_image, data_url, user
from tests.litellm.conftest import close_clients, closing_clients, litellm
from tests.server.conftest import serving

TEXTS = ["A dog.", "A cat."]
OPTIONS = {"device": "cpu", "dtype": "float32", "kv_cache_mib": 64}
PROVIDER = "pooling"


@pytest.fixture(scope="module", autouse=True)
def engines():
    """Register the provider with engines of its own."""
    engines = SharedEngines()
    before = litellm.custom_provider_map
    item = {"provider": PROVIDER, "custom_handler": DashInferVLM(engines, name=PROVIDER)}
    litellm.custom_provider_map = [*before, item]
    litellm.utils.custom_llm_setup()
    yield engines
    litellm.custom_provider_map = before
    engines.close()


@pytest.fixture(scope="module")
def server(embedder):
    with serving(embedder.engine) as running:
        yield running


@pytest.fixture(scope="module", params=["in process", "server"])
def call(request, embedding, server):
    """Return LiteLLM's arguments for the model."""
    if request.param == "server":
        return {"model": f"{PROVIDER}/embedding", "api_base": f"{server.url}/v1"}
    return {"model": f"{PROVIDER}/{embedding}", "engine_options": OPTIONS}


@pytest.fixture(scope="module")
def expected(embedder):
    conversations = [[{"role": "user", "content": text}] for text in TEXTS]
    outputs = embedder.embed(conversations, use_tqdm=False)
    return np.array([output.outputs.embedding for output in outputs]), sum(each.num_prompt_tokens for each in outputs)


def vectors(response):
    return np.array([row["embedding"] for row in response.data])


@pytest.mark.client("litellm-embeddings", "embed-text")
def test_embeddings_and_usage_equal_those_of_vlm(call, expected):
    router = litellm.Router([{"model_name": "search", "litellm_params": call}])
    responses = [
        litellm.embedding(input=TEXTS, **call),
        asyncio.run(litellm.aembedding(input=TEXTS, **call)),
        asyncio.run(router.aembedding("search", TEXTS)),
    ]
    router.discard()
    for response in responses:
        np.testing.assert_allclose(vectors(response), expected[0], atol=1e-5)
        assert [row["index"] for row in response.data] == [0, 1]
        assert (response.usage.prompt_tokens, response.usage.total_tokens) == (expected[1], expected[1])
        assert response.model == "embedding"


@pytest.mark.client("litellm-embeddings", "embed-image")
def test_instructions_messages_and_base64(call, embedder):
    image = user(blurred_image(1))
    given = embedder.engine.embed({"input": "A dog.", "instruction": "Find it."}).values
    found = litellm.embedding(input="A dog.", instruction="Find it.", **call)
    np.testing.assert_allclose(vectors(found), given, atol=1e-5)
    given = embedder.engine.embed({"messages": as_openai([image])}).values
    found = litellm.embedding(messages=as_openai([image]), **call)
    np.testing.assert_allclose(vectors(found), given, atol=1e-5)
    found = litellm.embedding(input="A dog.", extra_body={"encoding_format": "base64", "dimensions": 64}, **call)
    decoded = np.frombuffer(base64.b64decode(found.data[0]["embedding"]), "<f4")
    np.testing.assert_allclose([decoded], embedder.engine.embed({"input": "A dog."}).values, atol=1e-5)


BAD = [
    ({"input": []}, "input", "must not be empty"),
    ({"input": ""}, "input", "must not be empty"),
    ({"input": ["a", ""]}, "input[1]", "must not be empty"),
    ({"input": "a", "extra_body": {"dimensions": 32}}, "dimensions", "64 dimensions"),
    ({"input": "a", "instructions": "b"}, "instructions", "instruction"),
    ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages", "cannot be combined"),
    ({"input": "a", "timeout": -1}, "timeout", "positive"),
]


@pytest.mark.client("litellm-embeddings", "pooling-errors")
@pytest.mark.parametrize(("arguments", "param", "words"), BAD, ids=[f"{param}: {words}" for _, param, words in BAD])
def test_bad_request_names_the_field(call, arguments, param, words):
    for run in (litellm.embedding, lambda **given: asyncio.run(litellm.aembedding(**given))):
        with pytest.raises(litellm.BadRequestError, match=words) as caught:
            run(**call | arguments)
        assert caught.value.param == param


def test_litellm_names_the_parameters_that_it_does_not_pass_on(call):
    """It passes no parameter of OpenAI's to a custom provider, except in `extra_body`."""
    for name, value in {"dimensions": 64, "encoding_format": "base64", "user": "a"}.items():
        with pytest.raises(litellm.UnsupportedParamsError, match=name):
            litellm.embedding(input="a", **{name: value}, **call)
    for dropped in ({"drop_params": True, "user": "a"}, {"additional_drop_params": ["encoding_format"]}):
        found = litellm.embedding(input="a", encoding_format="base64", **dropped, **call)
        assert vectors(found).shape == (1, 64)


def test_context_and_server_errors_have_litellms_classes(call, server):
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.embedding(input="b " * 5000, **call)
    with pytest.raises(litellm.ServiceUnavailableError):
        litellm.embedding(f"{PROVIDER}/any", input="a", api_base="http://127.0.0.1:9/v1")
    with pytest.raises(litellm.NotFoundError):
        litellm.embedding(f"{PROVIDER}/other", input="a", api_base=f"{server.url}/v1")


def test_model_that_generates_text_is_used_for_embeddings(base):
    model = f"{PROVIDER}/{base}"
    response = litellm.embedding(model, input=TEXTS, engine_options=OPTIONS)
    assert vectors(response).shape == (2, 64)
    info = litellm.get_model_info(model)
    assert (info["mode"], info["input_cost_per_token"]) == ("embedding", 0)
    with pytest.raises(litellm.UnsupportedParamsError, match="generates text"):
        litellm.embedding(model, input="a", engine_options=OPTIONS | {"task": "generate"})


DOCUMENTS = ["A dog.", "Rain.", "A cat."]


@pytest.fixture(scope="module", params=["hosted_vllm", "jina_ai"])
def rerank(request, scorer):
    """LiteLLM's own providers for reranking, with our server: custom providers cannot rerank."""
    with serving(scorer.engine) as running:

        def rerank(function=litellm.rerank, **options):
            base = {"api_base": f"{running.url}/v1", "api_key": "none"}
            return function(model=f"{request.param}/reranker", **base, **options)

        yield rerank
        close_clients()


@pytest.mark.client("litellm-embeddings", "rank")
def test_litellm_ranks_with_a_server(rerank, scorer):
    scores = scorer.engine.score(RerankRequest.parse({"query": "dogs", "documents": DOCUMENTS})).values
    order = np.argsort(-scores)
    for found in (
        rerank(query="dogs", documents=DOCUMENTS),
        asyncio.run(closing_clients(rerank(litellm.arerank, query="dogs", documents=DOCUMENTS))),
    ):
        assert [row["index"] for row in found.results] == order.tolist()
        assert [row["relevance_score"] for row in found.results] == pytest.approx(scores[order].tolist(), abs=1e-6)
        assert [row["document"]["text"] for row in found.results] == [DOCUMENTS[index] for index in order]
    images = [{"image": data_url(blurred_image(1))}, {"text": "A cat."}]
    assert len(rerank(query="dogs", documents=images, top_n=1, return_documents=False).results) == 1


def test_invalid_ranking_names_the_field(rerank):
    with pytest.raises(Exception, match=r"documents\[1\]"):
        rerank(query="dogs", documents=["a", ""])
    with pytest.raises(Exception, match="documents"):
        rerank(query="dogs", documents=[])
