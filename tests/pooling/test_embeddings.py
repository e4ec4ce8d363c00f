"""Embeddings equal those of transformers with the pooling of the published code."""

from __future__ import annotations

import asyncio
import json
import shutil

import numpy as np
import pytest
import torch

from dashinfer_vlm_core import VLM, LoRARequest
from dashinfer_vlm_core.errors import CheckpointError, RequestError
from dashinfer_vlm_core.protocol.client import Client, current_client
from tests.cases import cases
from tests.conversations import as_openai, blurred_image, user
from tests.lora_folders import ATTENTION, MLP, merge_lora, write_lora
from tests.pdfs import document
from tests.samples import data_url
from tests.waiting import auntil

from .checkpoints import DOCUMENTS, Reference, cosine, ranks

FLOAT32, BFLOAT16 = 0.9999, 0.999
CONVERSATIONS = {
    "text": [user("A woman plays with her dog on the beach.")],
    "one letter": [user("a")],
    "long text": [user("the other thing in the rain " * 60)],
    "image": [user(blurred_image(1, 190, 130))],
    "video": [user([blurred_image(seed, 96, 96) for seed in range(2, 7)])],
    "mixed": [user([blurred_image(8), blurred_image(9)], blurred_image(10), "Is it the same?")],
}


def test_embeddings_equal_transformers_in_batches_of_unequal_lengths(embedder, reference):
    outputs = embedder.embed([as_openai(messages) for messages in CONVERSATIONS.values()], use_tqdm=False)
    for (name, messages), output in zip(CONVERSATIONS.items(), outputs, strict=True):
        expected = reference.embed(messages)
        assert cosine(output.outputs.embedding, expected) >= FLOAT32, name
        assert np.linalg.norm(output.outputs.embedding) == pytest.approx(1)
        assert output.num_prompt_tokens == reference.length(messages)


@pytest.mark.slow
def test_ranks_of_100_documents_equal_transformers(embedder, reference):
    query, *documents = [[user(text)] for text in ("Which picture has a dog?", *DOCUMENTS)]
    outputs = embedder.embed([query, *documents], use_tqdm=False)
    ours = np.array([output.outputs.embedding for output in outputs])
    expected = torch.stack([reference.embed(messages) for messages in (query, *documents)])
    assert ranks((ours[1:] @ ours[0]).tolist()) == ranks((expected[1:] @ expected[0]).tolist())


def test_system_message_is_the_instruction(embedder, reference):
    messages = [user("A star.")]
    given = {"role": "system", "content": "Find pictures"}
    with_system, with_option = (
        embedder.embed(conversation, instruction=instruction, use_tqdm=False)[0].outputs.embedding
        for conversation, instruction in (([given, *messages], None), (messages, "Find pictures"))
    )
    assert cosine(with_system, reference.embed(messages, instruction="Find pictures")) >= FLOAT32
    assert cosine(with_option, reference.embed(messages, instruction="Find pictures.")) >= FLOAT32


def test_rendered_prompt_gets_no_template(embedder, reference):
    text = "<|im_start|>system\nFind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    expected = reference.embed([user("Hello")], instruction="Find.")
    for prompts in (text, {"prompt": text}, [{"prompt": text}]):
        (output,) = embedder.embed(prompts, use_tqdm=False)
        assert cosine(output.outputs.embedding, expected) >= FLOAT32


def test_bfloat16_embeddings_equal_transformers(embedding, base):
    reference = Reference(base, torch.bfloat16)
    with VLM(embedding, device="cpu", dtype="bfloat16", kv_cache_mib=64) as vlm:
        outputs = vlm.embed([as_openai(messages) for messages in CONVERSATIONS.values()], use_tqdm=False)
    for (name, messages), output in zip(CONVERSATIONS.items(), outputs, strict=True):
        assert cosine(output.outputs.embedding, reference.embed(messages)) >= BFLOAT16, name


def test_embeddings_with_lora_equal_merged_weights(embedder, base, tmp_path):
    lora = write_lora(tmp_path / "lora", base, (*ATTENTION, *MLP))
    merged = Reference(merge_lora(tmp_path / "merged", base, lora))
    conversations = [CONVERSATIONS["text"], CONVERSATIONS["mixed"]]
    request = LoRARequest("changed", 1, str(lora))
    outputs = embedder.embed([as_openai(each) for each in conversations], lora_request=request, use_tqdm=False)
    for messages, output in zip(conversations, outputs, strict=True):
        assert cosine(output.outputs.embedding, merged.embed(messages)) >= FLOAT32


def test_lora_of_the_output_layer_is_rejected(embedder, base, tmp_path):
    lora = write_lora(tmp_path / "lora", base, ATTENTION, saved=("lm_head",))
    with pytest.raises(CheckpointError, match="output layer"):
        embedder.embed([user("a")], lora_request=LoRARequest("head", 2, str(lora)), use_tqdm=False)


def test_int8_embeddings_are_close_to_bfloat16(embedding):
    texts = [as_openai(messages) for messages in CONVERSATIONS.values()]
    found = []
    for quantization in ("int8", "none"):
        options = {"device": "cpu", "dtype": "bfloat16", "quantization": quantization, "kv_cache_mib": 64}
        with VLM(embedding, **options) as vlm:
            found.append([output.outputs.embedding for output in vlm.embed(texts, use_tqdm=False)])
    assert found[0] != found[1]
    for name, ours, expected in zip(CONVERSATIONS, *found, strict=True):
        assert cosine(ours, torch.tensor(expected)) >= BFLOAT16, name


def test_shorter_embeddings_are_normalized_again(embedding, embedder, tmp_path):
    folder = shutil.copytree(embedding, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [16]}))
    (whole,) = embedder.embed([user("a")], use_tqdm=False)
    with VLM(folder, device="cpu", dtype="float32", kv_cache_mib=64) as vlm:
        (short,) = vlm.embed([user("a")], dimensions=16, use_tqdm=False)
    expected = np.array(whole.outputs.embedding[:16])
    assert (whole.outputs.hidden_size, short.outputs.hidden_size) == (64, 16)
    assert short.outputs.embedding == pytest.approx(expected / np.linalg.norm(expected), abs=1e-5)


def test_text_that_is_cut_can_have_any_length(embedder):
    limit = embedder.engine.status().max_model_len
    texts = ["a b " * (limit * length) for length in (1, 200)]
    cut, longer = embedder.embed([[user(text)] for text in texts], truncate_prompt_tokens=-1, use_tqdm=False)
    assert cut.outputs.embedding == pytest.approx(longer.outputs.embedding, abs=1e-5)


def test_rows_of_a_request_are_freed_and_its_common_prefix_is_computed_once(embedder):
    before = embedder.engine.stats().decoder
    outputs = embedder.embed([[user(f"{number} is a number")] for number in range(40)], use_tqdm=False)
    after = embedder.engine.stats().decoder
    assert (after.kv_used, after.kv_cached) == (0, 0)
    common = len("<|im_start|>system\nRepresent the user's input.<|im_end|>\n") // 2
    assert after.cached_tokens - before.cached_tokens > 39 * common
    again = embedder.embed([user("7 is a number")], use_tqdm=False)
    assert embedder.engine.stats().decoder.cached_tokens == after.cached_tokens
    assert again[0].outputs.embedding == pytest.approx(outputs[7].outputs.embedding, abs=1e-5)


def test_large_request_delays_others_little_and_frees_its_rows_when_canceled(embedder):
    engine = embedder.engine

    async def compute():
        current_client.set(Client(id="large"))
        large = asyncio.create_task(engine.aembed({"input": [f"{number} dogs " * 30 for number in range(2000)]}))
        await auntil(lambda: engine.stats().decoder.running > 1)
        current_client.set(Client(id="small"))
        await engine.aembed({"input": "a"})
        assert not large.done()
        large.cancel()
        with pytest.raises(asyncio.CancelledError):
            await large
        await auntil(lambda: engine.stats().decoder.kv_used + engine.stats().decoder.kv_cached == 0)

    asyncio.run(compute())
    assert engine.stats().decoder.running == 0


def test_text_is_cut_before_the_end_of_the_template(embedder, reference):
    messages = [user("qwvxzkjbpgf" * 30)]
    whole = reference.length(messages)
    (output,) = embedder.embed(messages, truncate_prompt_tokens=whole - 11, use_tqdm=False)
    assert output.num_prompt_tokens == whole - 11
    assert cosine(output.outputs.embedding, reference.embed([user("qwvxzkjbpgf" * 29)])) >= FLOAT32


def test_document_may_fill_the_context_and_its_text_is_cut(embedding, embedder):
    (whole,) = embedder.embed([_document(10)], use_tqdm=False)
    length = whole.num_prompt_tokens
    with VLM(embedding, device="cpu", dtype="float32", kv_cache_mib=64, max_model_len=length) as vlm:
        assert vlm.embed([_document(10)], use_tqdm=False)[0].num_prompt_tokens == length
        (cut,) = vlm.embed([_document(20)], truncate_prompt_tokens=-1, use_tqdm=False)
    assert cut.num_prompt_tokens == length


def _document(lines):
    data = document("\n".join(["The dogs play in the rain."] * lines))
    file = {"file_data": data_url(data, "application/pdf"), "render": "text"}
    return {"role": "user", "content": [{"type": "file", "file": file}]}


BAD = [
    (lambda vlm: vlm.embed([], use_tqdm=False), "prompts", "at least one"),
    (lambda vlm: vlm.embed([[user("a")], [user("a " * 4000)]], use_tqdm=False), "prompts[1]", "context length"),
    (lambda vlm: vlm.embed(["a", {"text": "b"}], use_tqdm=False), "prompts[1]", "no key"),
    (lambda vlm: vlm.embed([user("a")], dimensions=7, use_tqdm=False), "dimensions", "64 dimensions"),
    (
        lambda vlm: vlm.embed([user("a", blurred_image(1))], truncate_prompt_tokens=40, use_tqdm=False),
        "prompts[0]",
        "only text is cut",
    ),
    (lambda vlm: vlm.score("a", "b", use_tqdm=False), "model", "/v1/embeddings"),
    (lambda vlm: vlm.engine.chat({"messages": [user("a")]}), "model", "task embed"),
]


@cases(("call", "param", "words"), BAD)
def test_bad_input_is_named(embedder, call, param, words):
    with pytest.raises(RequestError) as error:
        call(embedder)
    assert error.value.param == param
    assert words in error.value.message
