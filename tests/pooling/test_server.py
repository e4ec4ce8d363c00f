"""The routes for embeddings, ranks and scores."""

from __future__ import annotations

import base64
import re

import numpy as np
import pytest
import torch

from tests.cases import cases
from tests.conversations import as_openai, blurred_image, data_url, user
from tests.server.conftest import serving

from .checkpoints import EOS, cosine

FLOAT32 = 0.9999
LIMIT = 2048


@pytest.fixture(scope="module")
def embeddings(embedder):
    with serving(embedder.engine) as server:
        yield server


@pytest.fixture(scope="module")
def ranks(scorer):
    with serving(scorer.engine) as server:
        yield server


@pytest.fixture(scope="module")
def tokens(retriever):
    with serving(retriever.engine) as server:
        yield server


@pytest.fixture(scope="module")
def texts(tiny_checkpoint):
    from dashinfer_vlm_core.testing import scripted_engine

    with scripted_engine("Fine.", model=str(tiny_checkpoint)) as engine, serving(engine) as server:
        yield server


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_openai_client_gets_embeddings(embeddings, reference, encoding):
    with embeddings.openai() as client:
        created = client.embeddings.create(model="embedding", input=["A dog.", "A cat."], encoding_format=encoding)
    rows = [row.embedding for row in created.data]
    if encoding == "base64":
        rows = [np.frombuffer(base64.b64decode(row), "<f4") for row in rows]
    expected = torch.stack([reference.embed([user(text)]) for text in ("A dog.", "A cat.")])
    assert cosine(np.stack(rows), expected) >= FLOAT32
    assert [row.index for row in created.data] == [0, 1]
    assert created.usage.prompt_tokens == created.usage.total_tokens > 100


def test_messages_of_vllm_clients_and_token_ids_are_embedded(embeddings, reference):
    messages = [user(blurred_image(1, 130, 100), "What is it?")]
    instruction = [{"role": "system", "content": [{"type": "text", "text": "Find it."}]}]
    ending = [{"role": "assistant", "content": [{"type": "text", "text": ""}]}]
    body = {
        "messages": [*instruction, *as_openai(messages), *ending],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "add_special_tokens": True,
    }
    ids = reference.inputs([{"role": "system", "content": "Find it."}, user("Hello")])["input_ids"][0].tolist()
    with embeddings.http() as client:
        image, text, from_ids = (
            client.post("/v1/embeddings", json=each).json()["data"][0]["embedding"]
            for each in (body, {"input": "Hello", "instruction": "Find it."}, {"input": [*ids, EOS]})
        )
    assert cosine(image, reference.embed(messages, instruction="Find it.")) >= FLOAT32
    assert cosine(text, reference.embed([user("Hello")], instruction="Find it.")) >= FLOAT32
    assert text == pytest.approx(from_ids, abs=1e-5)


NESTED_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 600 + "]" * 600}}
BAD = [
    ({}, "input", "is required"),
    ({"input": []}, "input", "must not be empty"),
    ({"input": ""}, "input", "must not be empty"),
    ({"input": ["a", ""]}, "input[1]", "must not be empty"),
    ({"input": [[1], []]}, "input[1]", "must not be empty"),
    ({"input": [[1], [5000]]}, "input[1]", "Token ids"),
    ({"input": ["a", "b " * 5000]}, "input[1]", "context length"),
    ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages", "cannot be combined"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [NESTED_CALL]}, {"role": "user", "content": "a"}]},
        "messages[0].tool_calls[0].function.arguments",
        "nested too deeply",
    ),
    ({"input": "a", "dimensions": 32}, "dimensions", "64 dimensions"),
    ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
    ({"input": "a", "embed_dtype": "float16"}, "embed_dtype", "are float32"),
    ({"input": "a", "endianness": "big"}, "endianness", "little-endian"),
    ({"input": ["a", "b " * 3000]}, "input[1]", "set `truncate_prompt_tokens`"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
    ({"input": ["a"] * (LIMIT + 1)}, "input", f"{LIMIT}"),
    ({"input": "a", "model": "other"}, "model", "not served"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "messages[0].content[0]",
        "",
    ),
]


@cases(("body", "param", "words"), BAD)
def test_bad_request_names_the_field(embeddings, body, param, words):
    with embeddings.http() as client:
        response = client.post("/v1/embeddings", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (404 if param == "model" else 400, param)
    assert words in error["message"]


def test_number_of_media_of_a_request_is_bounded(embeddings, ranks):
    image = data_url(blurred_image(1, 32, 32))
    parts = [{"type": "image_url", "image_url": {"url": image}}] * 33
    cases = [
        (embeddings, "/v1/embeddings", {"messages": [user_message(*parts)]}, "messages[0].content[32]", "up to 32"),
        (ranks, "/v1/rerank", {"query": "a", "documents": [{"image": image}] * 257}, "documents[256].image", "256"),
        (
            ranks,
            "/score",
            {"text_1": {"image": image}, "text_2": [{"image": image}] * 256},
            "documents[255].image",
            "256",
        ),
        (ranks, "/score", {"text_1": "a", "text_2": [{"content": parts}]}, "documents[0].content[32]", "up to 32"),
    ]
    for server, path, body, param, words in cases:
        with server.http() as client:
            response = client.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, "media_too_large")
        assert words in error["message"]


def test_bad_item_fails_only_its_request(embeddings):
    with embeddings.http() as client:
        failed = client.post("/v1/embeddings", json={"input": ["a"] * 5 + ["b " * 5000] + ["c"] * 5})
        assert failed.json()["error"]["param"] == "input[5]"
        assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked(ranks, path):
    documents = ["A dog.", {"text": "A cat."}, {"image": data_url(blurred_image(1))}, {"type": "text", "text": "Rain."}]
    with ranks.http() as client:
        ranked = client.post(path, json={"query": "dogs", "documents": documents}).json()
        scores = client.post("/score", json={"text_1": "dogs", "text_2": documents}).json()
        best = client.post(path, json={"query": "dogs", "documents": documents, "top_n": 2, "return_documents": False})
    by_index = {result["index"]: result for result in ranked["results"]}
    assert [row["score"] for row in scores["data"]] == pytest.approx(
        [by_index[index]["relevance_score"] for index in range(4)], abs=1e-6
    )
    relevance = [result["relevance_score"] for result in ranked["results"]]
    assert relevance == sorted(relevance, reverse=True)
    assert by_index[1]["document"] == {"text": "A cat."}
    assert "document" not in by_index[2]
    assert ranked["usage"] == scores["usage"]
    assert [set(result) for result in best.json()["results"]] == [{"index", "relevance_score"}] * 2


def test_image_in_base64_without_a_prefix_is_accepted(ranks):
    plain = data_url(blurred_image(1)).partition(",")[2]
    with ranks.http() as client:
        bodies = [{"query": "a", "documents": [{"image": value}]} for value in (plain, data_url(blurred_image(1)))]
        first, second = (client.post("/v1/rerank", json=body).json()["results"] for body in bodies)
    assert first[0]["relevance_score"] == pytest.approx(second[0]["relevance_score"], abs=1e-6)


MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES = {
    "generate": {
        "/v1/chat/completions": {"messages": MESSAGES},
        "/v1/completions": {"prompt": "Hello"},
        "/v1/responses": {"input": "Hello"},
        "/v1/ocr": {"document": {"image_url": data_url(blurred_image(1))}},
    },
    "embed": {"/v1/embeddings": {"input": "Hello"}},
    "score": {
        "/v1/rerank": {"query": "a", "documents": ["b"]},
        "/score": {"text_1": "a", "text_2": "b"},
    },
    "token_embed": {"/pooling": {"input": "Hello", "task": "token_embed"}},
}
SERVERS = {"generate": "texts", "embed": "embeddings", "score": "ranks", "token_embed": "tokens"}
ALSO = {**dict.fromkeys(BODIES, ()), "token_embed": ("/v1/rerank", "/score")}
"""Routes of other tasks that the models of a task serve, too."""


@pytest.mark.parametrize("task", SERVERS)
def test_request_for_another_task_names_the_right_route(request, task):
    right = next(iter(BODIES[task]))
    others = [item for other in BODIES if other != task for item in BODIES[other].items() if item[0] not in ALSO[task]]
    with request.getfixturevalue(SERVERS[task]).http() as client:
        assert client.get("/health").json()["task"] == task
        for path, body in others:
            variants = ({}, {"stream": True}) if path in BODIES["generate"] else ({},)
            for stream in (*variants, {"background": True}) if path == "/v1/responses" else variants:
                response = client.post(path, json=body | stream)
                assert response.status_code == 400, path
                error = response.json()["error"]
                assert (error["param"], error["code"]) == ("model", "wrong_task"), path
                assert right in error["message"], path
                assert re.search(r"--task (generate|embed|score)|a ColQwen checkpoint", error["message"]), path


def test_ollamas_routes_return_the_embeddings_of_openais(embeddings):
    given = ["A dog.", "A cat. " * 1000]
    with embeddings.http() as client:
        expected = client.post("/v1/embeddings", json={"input": given, "truncate_prompt_tokens": -1}).json()
        found = client.post("/api/embed", json={"model": "embedding:latest", "input": given}).json()
        assert found["embeddings"] == [row["embedding"] for row in expected["data"]]
        assert (found["model"], found["prompt_eval_count"]) == ("embedding:latest", expected["usage"]["prompt_tokens"])
        assert found["total_duration"] >= found["load_duration"] >= 0
        body = {"model": "embedding", "prompt": "A dog."}
        assert client.post("/api/embeddings", json=body).json() == {"embedding": found["embeddings"][0]}
        strict = client.post("/api/embed", json={"model": "embedding", "input": given, "truncate": False})
        assert (strict.status_code, strict.json()["param"]) == (400, "input[1]")
        assert client.post("/api/embed", json={"model": "embedding"}).json() == {"model": "embedding", "embeddings": []}
        assert client.post("/api/embeddings", json={"model": "no"}).status_code == 404
        for path, wrong in (("/api/embed", "prompt"), ("/api/embeddings", "input")):
            rejected = client.post(path, json={"model": "embedding", wrong: "A dog."})
            assert (rejected.status_code, rejected.json()["param"]) == (400, wrong)
        shown = client.post("/api/show", json={"model": "embedding"}).json()
        assert shown["capabilities"] == ["embedding", "vision"]
        chat = client.post("/api/chat", json={"model": "embedding", "messages": [{"role": "user", "content": "Hi"}]})
        assert (chat.status_code, chat.json()["code"]) == (400, "wrong_task")
        assert "/api/embed" in chat.json()["error"]


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_tokens_are_embedded_in_the_format_of_vllm(tokens, retriever, encoding):
    expected = retriever.engine.embed_tokens({"input": ["A dog.", "Rain in the night."]})
    body = {"model": "colqwen2", "task": "token_embed", "input": ["A dog.", "Rain in the night."]}
    with tokens.http() as client:
        found = client.post("/pooling", json=body | {"encoding_format": encoding}).json()
    assert (found["object"], found["id"][:5], found["model"]) == ("list", "pool-", "colqwen2")
    assert [(item["index"], item["object"]) for item in found["data"]] == [(0, "pooling"), (1, "pooling")]
    assert found["usage"] == dict.fromkeys(("prompt_tokens", "total_tokens"), sum(expected.prompt_tokens))
    for item, rows in zip(found["data"], expected.vectors, strict=True):
        data = item["data"]
        if encoding == "base64":
            data = np.frombuffer(base64.b64decode(data), "<f4").reshape(-1, 128)
        assert np.asarray(data) == pytest.approx(rows, abs=1e-5)


def test_late_interaction_ranks_documents(tokens):
    documents = ["A dog.", {"image": data_url(blurred_image(1))}, "Rain."]
    with tokens.http() as client:
        query, *pages = (
            np.array(client.post("/pooling", json=body).json()["data"][0]["data"])
            for body in (
                {"input": "dogs"},
                {"input": "A dog.", "input_type": "document"},
                {"messages": [user_message({"type": "image_url", "image_url": {"url": documents[1]["image"]}})]},
                {"input": "Rain.", "input_type": "document"},
            )
        )
        ranked = client.post("/rerank", json={"query": "dogs", "documents": documents}).json()
        scores = client.post("/score", json={"text_1": "dogs", "text_2": documents}).json()
        bad = client.post("/rerank", json={"query": "dogs", "documents": ["a", "b " * 5000]}).json()["error"]
    expected = [(query @ page.T).max(axis=1).sum() for page in pages]
    assert [row["score"] for row in scores["data"]] == pytest.approx(expected, abs=1e-3)
    assert [row["index"] for row in ranked["results"]] == np.argsort(expected)[::-1].tolist()
    assert ranked["usage"] == scores["usage"]
    assert (bad["param"], "messages[" in bad["message"]) == ("documents[1]", False)


def user_message(*parts):
    return {"role": "user", "content": list(parts)}
