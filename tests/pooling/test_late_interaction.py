"""Embeddings of all tokens, and scores that are computed from them, equal those of transformers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import ColQwen2ForRetrieval

from dashinfer_vlm_core import VLM
from dashinfer_vlm_core.engine.late_interaction import MAX_VECTORS, TokenVectors, maxsim
from dashinfer_vlm_core.errors import InvalidParameter, RequestError
from dashinfer_vlm_core.preprocessing.pooling import PlacedItem
from dashinfer_vlm_core.protocol import PoolingItem
from tests.cases import cases
from tests.conversations import blurred_image, data_url
from tests.lora_folders import ATTENTION, MLP, merge_lora, write_lora

from .checkpoints import DOCUMENTS, ranks
from .late_checkpoints import BASES, IMAGE, PAD, QUERIES, SIZES, WRITERS, LateReference

FLOAT32, BFLOAT16 = 0.9999, 0.999
TEXTS = ["dog", "Where is the dog in the rain?", "a cat and the dog " * 12]
PAGES = [blurred_image(1, 130, 100), blurred_image(2, 84, 168)]


class Late(NamedTuple):
    """A model that computes 16 tokens of a prompt in a step, and its reference."""

    vlm: VLM
    reference: LateReference


@pytest.fixture(scope="module", params=WRITERS)
def late(request, tmp_path_factory):
    folder = WRITERS[request.param](tmp_path_factory.mktemp("late") / request.param)
    base = BASES[request.param](tmp_path_factory.mktemp("late") / "base")
    with VLM(folder, device="cpu", dtype="float32", kv_cache_mib=64, prefill_chunk=16) as vlm:
        yield Late(vlm, LateReference(request.param, base, folder))


def image(picture):
    return {"type": "image_url", "image_url": {"url": data_url(picture)}}


def message(*parts):
    return [{"role": "user", "content": list(parts)}]


def check(ours, reference):
    assert ours.shape == reference.shape
    assert np.linalg.norm(ours, axis=1) == pytest.approx(1, abs=1e-5)
    assert (torch.from_numpy(ours) * reference).sum(dim=1).min() >= FLOAT32


@cases("input_type", ["query", "document"])
def test_texts_of_unequal_lengths_equal_the_reference(late, input_type):
    found = late.vlm.engine.embed_tokens({"input": TEXTS, "task": "token_embed", "input_type": input_type})
    expected = [getattr(late.reference, input_type)(text) for text in TEXTS]
    for ours, rows in zip(found.vectors, expected, strict=True):
        check(ours, rows)
    assert found.vectors[0].shape[1] == SIZES[late.reference.name]
    assert found.prompt_tokens == tuple(map(len, expected))


@cases("picture", PAGES)
def test_image_equals_the_reference(late, picture):
    for texts, added in (((), ""), (("Describe the image.",), ""), (("Hi",), "Hi")):
        parts = [image(picture), *({"type": "text", "text": text} for text in texts)]
        (ours,) = late.vlm.engine.embed_tokens({"messages": message(*parts)}).vectors
        check(ours, late.reference.document(picture, added))


def test_token_ids_are_used_as_they_are(late):
    ids = late.reference.inputs("a dog")["input_ids"][0].tolist()
    (ours,) = late.vlm.engine.embed_tokens({"input": ids}).vectors
    check(ours, late.reference.embed("a dog"))


@pytest.mark.slow
def test_ranks_of_100_texts_and_two_images_equal_the_reference(late):
    query = late.reference.query("two dogs")
    expected = [late.reference.score(query, late.reference.document(each)) for each in (*DOCUMENTS, *PAGES)]
    given = [*DOCUMENTS, *({"image": data_url(page)} for page in PAGES)]
    outputs = late.vlm.score("two dogs", given, use_tqdm=False)
    scores = [output.outputs.score for output in outputs]
    assert scores == pytest.approx(expected, abs=1e-3)
    assert ranks(scores) == ranks(expected)
    assert outputs[0].num_prompt_tokens == len(query) + len(late.reference.document(DOCUMENTS[0]))


def test_pairs_are_compared_one_by_one(late):
    outputs = late.vlm.score(["a dog", {"image": data_url(PAGES[0])}], ["b", "c"], use_tqdm=False)
    reference = late.reference
    expected = [
        reference.score(reference.query("a dog"), reference.document("b")),
        reference.score(reference.document(PAGES[0]), reference.document("c")),
    ]
    assert [output.outputs.score for output in outputs] == pytest.approx(expected, abs=1e-3)


def test_special_tokens_of_users_are_plain_text(late):
    (plain,) = late.vlm.engine.embed_tokens({"input": f"{PAD}<|image_pad|>"}).vectors
    assert len(plain) > len(late.reference.query("")) + 10


def test_text_is_cut_before_the_tokens_that_augment_a_query(late):
    ids = late.reference.inputs(QUERIES[late.reference.name].format("dog " * 100))["input_ids"][0]
    end = 10 + QUERIES[late.reference.name].count("\n")
    (ours,) = late.vlm.engine.embed_tokens({"input": "dog " * 100, "truncate_prompt_tokens": 40}).vectors
    check(ours, late.reference.embed_ids(torch.cat((ids[: 40 - end], ids[-end:]))))


def test_images_and_token_ids_are_encoded_offline(late):
    """Media as Python objects; several messages are an error that names the prompt."""
    ids = late.reference.inputs("a dog")["input_ids"][0].tolist()
    page = message({"type": "image_pil", "image_pil": PAGES[0]})
    found = late.vlm.encode([ids, page], use_tqdm=False)
    check(found[0].outputs.data, late.reference.embed("a dog"))
    check(found[1].outputs.data, late.reference.document(PAGES[0]))
    (query,) = late.vlm.encode(message({"type": "text", "text": "a dog"}), input_type="query", use_tqdm=False)
    check(query.outputs.data, late.reference.query("a dog"))
    assert query.num_prompt_tokens == len(query.outputs.data)


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"prompts": [message() * 2]}, "prompts[0]", ""),
        ({"prompts": [[{"role": "user", "content": "a"}] * 2]}, "prompts[0]", "one message"),
        ({"prompts": "a", "pooling_task": "embed"}, "pooling_task", "'token_embed'"),
        ({"prompts": "a", "input_type": "page"}, "input_type", "'query' or 'document'"),
    ],
)
def test_bad_prompt_is_named(retriever, options, param, words):
    with pytest.raises(RequestError) as error:
        retriever.encode(**options, use_tqdm=False)
    assert error.value.param.startswith(param)
    assert words in error.value.message


def test_number_of_embeddings_of_a_request_is_bounded():
    collected = TokenVectors()
    item = PlacedItem(item=PoolingItem.model_construct(), path="input[1]")
    collected.add(0, item, np.zeros((MAX_VECTORS, 1), np.float32))
    with pytest.raises(InvalidParameter, match="more than 65536 tokens") as error:
        collected.add(1, item, np.zeros((1, 1), np.float32))
    assert error.value.param == "input[1]"


def test_prefix_is_computed_for_each_item(late):
    before = late.vlm.engine.stats().decoder
    late.vlm.engine.embed_tokens({"input": ["the same words " * 10] * 3})
    after = late.vlm.engine.stats().decoder
    assert (after.cached_tokens, after.kv_cached, after.kv_used) == (before.cached_tokens, 0, 0)


BAD = [
    ({"input": "a", "task": "embed"}, "task", "/v1/embeddings"),
    ({"input": "a", "input_type": "page"}, "input_type", "'query' or 'document'"),
    ({"input": "a", "dimensions": 64}, "dimensions", "dimensions"),
    ({"input": "a", "instruction": "Find it."}, "instruction", "Remove it"),
    ({"input": ["a", "b " * 5000]}, "input[1]", "context length"),
    ({"input": ["a", ""]}, "input[1]", "must not be empty"),
    ({"input": ["a"] * 2049}, "input", "2048"),
    ({"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}, "messages", "one message"),
    ({"messages": message({"type": "image_url", "image_url": {"url": "data:,"}})}, "messages[0].content[0]", ""),
    ({}, "input", "is required"),
]


@cases(("body", "param", "words"), BAD)
def test_bad_request_names_the_field(retriever, body, param, words):
    with pytest.raises(RequestError) as error:
        retriever.engine.embed_tokens(body)
    assert error.value.param.startswith(param)
    assert words in error.value.message


@torch.no_grad()
def test_equals_the_retrieval_model_of_transformers(colqwen2, retriever, tmp_path):
    """transformers 5.23 computes positions of images only if they are passed."""
    model = ColQwen2ForRetrieval.from_pretrained(colqwen2, dtype=torch.float32).eval()
    inputs = LateReference("colqwen2", BASES["colqwen2"](tmp_path / "base"), colqwen2)
    texts = [inputs.inputs(QUERIES["colqwen2"].format(text))["input_ids"][0] for text in TEXTS]
    padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in texts], batch_first=True)
    queries = model(input_ids=padded, attention_mask=mask).embeddings
    page = inputs.inputs(IMAGE, PAGES[0])
    page["position_ids"], _ = model.vlm.get_rope_index(
        page["input_ids"], page.pop("mm_token_type_ids"), image_grid_thw=page["image_grid_thw"]
    )
    page["pixel_values"] = page["pixel_values"][None]
    document = model(**page).embeddings[0]
    ours = retriever.engine.embed_tokens({"input": TEXTS}).vectors
    (image_rows,) = retriever.engine.embed_tokens({"messages": message(image(PAGES[0]))}).vectors
    for rows, expected, ids in zip(ours, queries, texts, strict=True):
        check(rows, expected[: len(ids)])
    check(image_rows, document)


@pytest.mark.parametrize("name", WRITERS)
def test_embeddings_in_bfloat16_equal_the_reference(name, tmp_path):
    """Of the tokens, transformers' own rounding changes some by more than 0.001."""
    base, folder = BASES[name](tmp_path / "base"), WRITERS[name](tmp_path / name)
    reference = LateReference(name, base, folder, torch.bfloat16)
    texts = [*TEXTS, "a long document about dogs " * 20]
    with VLM(folder, device="cpu", dtype="bfloat16", kv_cache_mib=64) as vlm:
        found = vlm.engine.embed_tokens({"input": texts, "input_type": "document"}).vectors
        (page,) = vlm.engine.embed_tokens({"messages": message(image(PAGES[0]))}).vectors
    for ours, content in zip((*found, page), (*texts, PAGES[0]), strict=True):
        cosines = (torch.from_numpy(ours) * reference.document(content)).sum(dim=1)
        assert cosines.mean() >= BFLOAT16
        assert cosines.min() >= 0.996


def test_adapter_equals_the_checkpoint_that_it_is_merged_into(tmp_path):
    base = WRITERS["colqwen2_5"](tmp_path / "base")
    lora = write_lora(tmp_path / "lora", base, (*ATTENTION, *MLP, "custom_text_proj"), seed=3)
    requests = {"input": TEXTS}, {"messages": message(image(PAGES[0]))}
    options = {"device": "cpu", "dtype": "float32", "kv_cache_mib": 64, "prefill_chunk": 16}
    with VLM(base, lora={"pages": str(lora)}, **options) as vlm:
        found = [vlm.engine.embed_tokens(request | {"model": "pages"}) for request in requests]
        unchanged = vlm.engine.embed_tokens(requests[0])
    with VLM(merge_lora(tmp_path / "merged", base, lora), **options) as merged:
        expected = [merged.engine.embed_tokens(request) for request in requests]
    assert [result.model for result in (*found, unchanged)] == ["pages", "pages", "base"]
    for ours, reference in zip(found, expected, strict=True):
        for rows, others in zip(ours.vectors, reference.vectors, strict=True):
            check(rows, torch.from_numpy(others))
    assert (unchanged.vectors[0] * expected[0].vectors[0]).sum(axis=1).min() < 0.99


def test_long_queries_are_compared_in_blocks():
    rng = np.random.default_rng(0)
    query, document = rng.standard_normal((600, 8), np.float32), rng.standard_normal((40, 8), np.float32)
    assert maxsim(query, document) == pytest.approx(float((query @ document.T).max(axis=1).sum()), rel=1e-5)
