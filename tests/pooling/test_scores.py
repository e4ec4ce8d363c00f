"""Scores equal those of transformers with the published code's difference of two logits."""

from __future__ import annotations

import base64
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from dashinfer_vlm_core import VLM, Engine, EngineConfig
from dashinfer_vlm_core.errors import InvalidParameter, RequestError, SetupError
from dashinfer_vlm_core.models.task import read_pooling
from dashinfer_vlm_core.preprocessing.pooling import score_items
from dashinfer_vlm_core.protocol import RerankRequest
from dashinfer_vlm_qwen3_vl import Qwen3VL
from tests import samples
from tests.cases import cases
from tests.conversations import blurred_image, data_url
from tests.pdfs import document

from .checkpoints import DOCUMENTS, Reference, ranks, write_classifier

QUERY = "Which picture has a dog?"


def text(value):
    return {"type": "text", "text": value}


@pytest.mark.slow
def test_ranks_of_100_documents_equal_transformers(scorer, reference):
    outputs = scorer.score(QUERY, DOCUMENTS, use_tqdm=False)
    expected = [reference.score([text(QUERY)], [text(document)]) for document in DOCUMENTS]
    scores = [output.outputs.score for output in outputs]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert ranks(scores) == ranks(expected)


@pytest.mark.parametrize("has_layer", [True, False], ids=["score.weight", "classifier_from_token"])
def test_classifiers_score_like_transformers(base, reference, tmp_path, has_layer):
    size = reference.model.config.text_config.hidden_size
    weight = torch.randn(1, size, generator=torch.Generator().manual_seed(1)) / size**0.5 if has_layer else None
    documents = [*DOCUMENTS[:3], {"image": data_url(blurred_image(1, 130, 100))}]
    contents = [
        *([text(document)] for document in DOCUMENTS[:3]),
        [{"type": "image", "image": blurred_image(1, 130, 100)}],
    ]
    expected = [reference.score([text(QUERY)], content, weight=weight) for content in contents]
    with VLM(write_classifier(base, tmp_path / "model", weight), device="cpu", dtype="float32", kv_cache_mib=64) as vlm:
        outputs = vlm.score(QUERY, documents, use_tqdm=False)
    assert [output.outputs.score for output in outputs] == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in expected}) > 1


def test_classifier_with_two_labels_is_rejected(base, tmp_path):
    folder = write_classifier(base, tmp_path / "model", torch.zeros(2, 64))
    with pytest.raises(SetupError, match=r"score\.weight"):
        Engine(EngineConfig(model=str(folder), device="cpu", kv_cache_mib=64)).start()


def test_document_of_a_query_is_read_once(scorer, monkeypatch):
    executor = scorer.engine._ready().pipeline.inputs.media_executor
    read, files = executor.read_document, []
    monkeypatch.setattr(executor, "read_document", lambda part, data: files.append(part.url) or read(part, data))
    urls = [samples.data_url(document(name, size=(84, 84)), "application/pdf") for name in "abcd"]
    query, *documents = ({"content": [{"type": "file", "file": {"file_data": url}}]} for url in urls)
    outputs = scorer.score(query, [*documents, "The end."], use_tqdm=False)
    assert sorted(files) == sorted(urls)
    alone = [scorer.score(query, each, use_tqdm=False)[0].outputs.score for each in documents]
    assert [output.outputs.score for output in outputs[:3]] == pytest.approx(alone, abs=1e-5)


def test_long_query_with_many_documents_takes_little_memory(reranker):
    spec = Qwen3VL().load_spec(reranker)
    part = {"type": "text", "text": "a"}
    request = RerankRequest.parse({"query": {"content": [part] * 1024}, "documents": ["b"] * 500})
    tracemalloc.start()
    items = score_items(request, read_pooling(spec, "auto"), None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 500 * 1024 * 16
    path = "messages[1].content[5].text"
    error = items[7].name_field(InvalidParameter(f"`{path}` is bad.", param=path))
    assert (error.param, error.message) == ("query.content[3].text", "`query.content[3].text` is bad.")
    assert items[7].name_field(InvalidParameter("Bad.", param="messages[1].content[1027]")).param == "documents[7]"


def test_query_is_computed_once(scorer):
    before = scorer.engine.stats().decoder
    outputs = scorer.score("a long query about dogs " * 20, DOCUMENTS[:40], use_tqdm=False)
    after = scorer.engine.stats().decoder
    computed = sum(output.num_prompt_tokens for output in outputs) - (after.cached_tokens - before.cached_tokens)
    assert computed < outputs[0].num_prompt_tokens + 39 * 60
    assert after.kv_cached == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_images_and_videos_are_scored_like_transformers(request, reranker, base, dtype):
    image, frames = blurred_image(1, 130, 100), [blurred_image(seed, 96, 96) for seed in (2, 3, 4)]
    documents = [
        {"text": "A dog.", "image": data_url(image)},
        {"content": [{"type": "video_url", "video_url": {"url": [data_url(frame) for frame in frames]}}, text("rain")]},
    ]
    query = {"image": data_url(blurred_image(5))}
    reference = Reference(base, getattr(torch, dtype))
    expected = [
        reference.score([{"type": "image", "image": blurred_image(5)}], document, instruction="Find a dog")
        for document in (
            [{"type": "image", "image": image}, text("A dog.")],
            [{"type": "video", "video": frames}, text("rain")],
        )
    ]
    with VLM(reranker, device="cpu", dtype=dtype, kv_cache_mib=64) as vlm:
        outputs = vlm.score(query, documents, instruction="Find a dog", use_tqdm=False)
    tolerance = {"float32": 1e-5, "bfloat16": 0.05}[dtype]
    assert [output.outputs.score for output in outputs] == pytest.approx(expected, abs=tolerance)


def test_image_of_the_query_is_encoded_once(scorer):
    before = scorer.engine.stats().vision
    scorer.score({"image": data_url(blurred_image(77))}, DOCUMENTS[:5], use_tqdm=False)
    assert scorer.engine.stats().vision.encoded - before.encoded == 1


def test_documents_as_embeddings_are_scored_like_alone(reranker):
    with VLM(reranker, device="cpu", dtype="float32", kv_cache_mib=64, enable_mm_embeds=True) as vlm:
        width = vlm.engine.model_spec().visual_width
        documents = [_embeddings(np.random.default_rng(seed).normal(size=(4, width))) for seed in (1, 2)]
        together = [output.outputs.score for output in vlm.score(QUERY, documents, use_tqdm=False)]
        alone = [vlm.score(QUERY, document, use_tqdm=False)[0].outputs.score for document in documents]
    assert together == pytest.approx(alone, abs=1e-6)
    assert together[0] != pytest.approx(together[1], rel=0.01)


def _embeddings(rows):
    data = base64.b64encode(save({"image_embeds": rows.astype(np.float32)})).decode()
    return {"type": "image_embeds", "image_embeds": {"image_embeds": data, "image_grid_thw": [1, 4, 4]}}


def test_pairs_are_scored_one_by_one(scorer):
    pairs = scorer.score(["a", "b"], ["c", "d"], use_tqdm=False)
    alone = [scorer.score("a", "c", use_tqdm=False)[0], scorer.score("b", "d", use_tqdm=False)[0]]
    assert [pair.outputs.score for pair in pairs] == pytest.approx([each.outputs.score for each in alone], abs=1e-6)


BAD = [
    (["a", "b"], ["c", "d", "e"], "queries", "2 entries"),
    ("", "b", "queries", "must not be empty"),
    ("a", ["b", ""], "documents[1]", "must not be empty"),
    ("a", [], "documents", "must not be empty"),
    ("a", ["b", {"image": "data:image/png;base64,AAAA"}], "documents[1].image", ""),
    ("a", ["b", "c " * 5000], "documents[1]", "context length"),
]


@cases(("queries", "documents", "param", "words"), BAD)
def test_bad_input_is_named(scorer, queries, documents, param, words):
    with pytest.raises(RequestError) as error:
        scorer.score(queries, documents, use_tqdm=False)
    assert error.value.param == param
    assert words in error.value.message
    assert "messages[" not in error.value.message


def test_task_is_named(scorer):
    with pytest.raises(RequestError, match="/v1/rerank"):
        scorer.embed("a", use_tqdm=False)
    with pytest.raises(RequestError, match="/v1/rerank"):
        scorer.generate("a", use_tqdm=False)
