"""LangChain's embeddings and reranker, in this process and through a server: the same vectors and scores."""

from __future__ import annotations

import asyncio
import pickle

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests

from dashinfer_vlm_core.engine.remote import RemoteEngine
from dashinfer_vlm_core.engine.shared import SharedEngines
from dashinfer_vlm_core.errors import (
    ConfigError,
    EngineClosed,
    EngineError,
    InvalidParameter,
    MediaUnreachable,
    UnsupportedParameter,
)
from dashinfer_vlm_core.protocol import RerankRequest
from dashinfer_vlm_langchain import DashInferVLMEmbeddings, DashInferVLMReranker
from tests.conversations import as_openai, blurred_image, data_url, user
from tests.server.conftest import serving
from tests.web import body, serve

TEXTS = ["A dog.", "A cat."]
DOCUMENTS = [
    Document("A dog.", metadata={"page": 1}),
    Document("Rain.", metadata={"image": data_url(blurred_image(1))}),
    Document("A cat."),
]


@pytest.fixture(scope="module")
def server(embedder):
    with serving(embedder.engine) as running:
        yield running


@pytest.fixture(scope="module", params=["engine", "server"])
def embeddings(request, embedder, server):
    if request.param == "engine":
        return DashInferVLMEmbeddings(engine=embedder.engine)
    return DashInferVLMEmbeddings(base_url=f"{server.url}/v1", model="embedding")


@pytest.fixture(scope="module", params=["engine", "server"])
def reranker_of(request, scorer):
    with serving(scorer.engine) as running:
        yield (
            lambda **options: (
                DashInferVLMReranker(engine=scorer.engine, **options)
                if request.param == "engine"
                else DashInferVLMReranker(base_url=f"{running.url}/v1", model="reranker", **options)
            )
        )


class SuiteParams:
    """Arguments of LangChain's suites, which create models by themselves."""

    embeddings_class = DashInferVLMEmbeddings

    @pytest.fixture(autouse=True)
    def _connect(self, server) -> None:
        self.url = f"{server.url}/v1"

    @property
    def embedding_model_params(self) -> dict[str, str]:
        return {"base_url": self.url, "model": "embedding"}


class TestStandardUnit(SuiteParams, EmbeddingsUnitTests):
    pass


class TestStandardIntegration(SuiteParams, EmbeddingsIntegrationTests):
    pass


@pytest.mark.client("langchain-embeddings", "embed-text")
@pytest.mark.client("langchain-embeddings", "embed-image")
def test_texts_and_images_equal_those_of_the_engine(embeddings, embedder, tmp_path):
    image = blurred_image(1)
    image.save(tmp_path / "a.png")
    expected = embedder.engine.embed({"input": TEXTS}).values
    image_expected = embedder.engine.embed({"messages": as_openai([user(image)])}).values[0]
    found = embeddings.embed_documents(TEXTS)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(embeddings.embed_query(TEXTS[1]), expected[1], atol=1e-5)
    images = embeddings.embed_image([str(tmp_path / "a.png"), data_url(image)])
    np.testing.assert_allclose(images, [image_expected] * 2, atol=1e-5)
    assert embeddings.embed_documents([]) == []


def test_instructions_and_batches(embedder):
    model = DashInferVLMEmbeddings(
        engine=embedder.engine, query_instruction="Find it.", document_instruction="Describe it.", chunk_size=2
    )
    texts = [*TEXTS, "Rain."]
    expected = embedder.engine.embed({"input": texts, "instruction": "Describe it."}).values
    np.testing.assert_allclose(model.embed_documents(texts), expected, atol=1e-5)
    expected = embedder.engine.embed({"input": "Rain.", "instruction": "Find it."}).values[0]
    np.testing.assert_allclose(model.embed_query("Rain."), expected, atol=1e-5)


@pytest.mark.client("langchain-embeddings", "rank")
def test_reranker_returns_the_most_relevant_documents(reranker_of, scorer):
    given = [{"text": each.page_content, **each.metadata} for each in DOCUMENTS]
    request = {"query": "dogs", "documents": [{k: v for k, v in each.items() if k != "page"} for each in given]}
    scores = scorer.engine.score(RerankRequest.parse(request)).values
    best = reranker_of(top_n=2).compress_documents(DOCUMENTS, "dogs")
    order = np.argsort(-scores)[:2]
    assert [each.page_content for each in best] == [DOCUMENTS[index].page_content for index in order]
    assert [each.metadata["relevance_score"] for each in best] == pytest.approx(scores[order].tolist(), abs=1e-6)
    assert all("relevance_score" not in each.metadata for each in DOCUMENTS)
    everything = reranker_of(top_n=None, instruction="Find cats").compress_documents(DOCUMENTS, "dogs")
    assert len(everything) == 3
    assert {each.metadata["relevance_score"] for each in everything} != set(scores.tolist())
    assert reranker_of().compress_documents([], "dogs") == []


def test_late_interaction_through_a_server(retriever):
    request = {"input": TEXTS, "input_type": "document"}
    expected = retriever.engine.embed_tokens(request)
    texts = [Document(text) for text in TEXTS]
    ranked = DashInferVLMReranker(engine=retriever.engine).compress_documents(texts, "cats")
    with serving(retriever.engine) as running, RemoteEngine(f"{running.url}/v1") as engine:
        found = asyncio.run(engine.aembed_tokens(request))
        again = DashInferVLMReranker(engine=engine).compress_documents(texts, "cats")
    assert found.prompt_tokens == (sum(expected.prompt_tokens),)
    for rows, others in zip(found.vectors, expected.vectors, strict=True):
        np.testing.assert_allclose(rows, others, atol=1e-6)
    scores = [each.metadata["relevance_score"] for each in ranked]
    assert [each.metadata["relevance_score"] for each in again] == pytest.approx(scores, abs=1e-3)


def test_model_that_generates_text_is_used_for_embeddings(base):
    """The task is part of the options; others of the same checkpoint are another engine."""
    engines = SharedEngines()
    try:
        options = {"dtype": "float32", "kv_cache_mib": 64}
        model = DashInferVLMEmbeddings(model=str(base), engine_options=options, engines=engines)
        assert len(model.embed_query("A dog.")) == 64
    finally:
        engines.close()


@pytest.mark.client("langchain-embeddings", "pooling-errors")
def test_bad_arguments_are_named(embeddings, embedder, tmp_path):
    with pytest.raises(InvalidParameter) as caught:
        embeddings.embed_documents(["a", ""])
    assert caught.value.param == "input[1]"
    with pytest.raises(InvalidParameter, match="64 dimensions"):
        embeddings.model_copy(update={"dimensions": 32}).embed_query("a")
    with pytest.raises(InvalidParameter, match=r"uris\[0\]"):
        embeddings.embed_image([b"..."])
    image = Document("a", metadata={"image": b"..."})
    with pytest.raises(InvalidParameter, match=r"documents\[1\].metadata.image"):
        DashInferVLMReranker(engine=embedder.engine).compress_documents([Document("b"), image], "a")
    with pytest.raises(MediaUnreachable, match="No such file"):
        embeddings.embed_image([str(tmp_path / "none.png")])
    with pytest.raises(ConfigError, match="bad_option"):
        DashInferVLMEmbeddings(engine_options={"bad_option": 1})
    with pytest.raises(InvalidParameter, match="cannot be combined"):
        DashInferVLMEmbeddings(engine=embedder.engine, base_url="http://127.0.0.1/v1")
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(DashInferVLMEmbeddings(engine=embedder.engine))
    copy = pickle.loads(pickle.dumps(DashInferVLMEmbeddings(base_url="http://127.0.0.1:9/v1", max_retries=1)))
    with pytest.raises(EngineClosed, match="cannot be reached"):
        copy.embed_query("a")


JSON = "Content-Type: application/json"
FLOATS = (
    b'{"data": [{"index": 1, "embedding": [2.0]}, {"index": 0, "embedding": [1.0]}], "usage": {"prompt_tokens": 3}}'
)


REPEATED = b'{"data": [{"index": 0, "embedding": [2.0]}, {"index": 0, "embedding": [1.0]}]}'


def test_responses_of_other_servers():
    """Numbers in place of base64, in any order; no route; rows that are missing or repeated; and something else."""
    routes = {
        "/floats/v1/embeddings": body(FLOATS, JSON),
        "/repeated/v1/embeddings": body(REPEATED, JSON),
        "/odd/v1/embeddings": body(b'{"data": []}', JSON),
        "/odd/pooling": body(b'{"data": [{"index": 0, "data": [[1.0], [1.0, 2.0]]}]}', JSON),
        "/odd/v1/rerank": body(b'{"results": [{"index": 5, "relevance_score": 1}]}', JSON),
    }
    with serve(routes) as web:
        model = DashInferVLMEmbeddings(base_url=web.url("/floats/v1"))
        assert model.embed_documents(["a", "b"]) == [[1.0], [2.0]]
        for path, texts in {"/floats/v1": ["a", "b", "c"], "/repeated/v1": ["a", "b"]}.items():
            with pytest.raises(EngineError):
                DashInferVLMEmbeddings(base_url=web.url(path)).embed_documents(texts)
        for path, error in {"/odd/v1": EngineError, "/none/v1": UnsupportedParameter}.items():
            with pytest.raises(error):
                DashInferVLMEmbeddings(base_url=web.url(path)).embed_query("a")
            with RemoteEngine(web.url(path)) as engine, pytest.raises(error):
                asyncio.run(engine.aembed_tokens({"input": "a"}))
            with RemoteEngine(web.url(path)) as engine, pytest.raises(error):
                DashInferVLMReranker(engine=engine).compress_documents([Document("b")], "a")
