"""Drafts of the head for multi-token prediction: it equals transformers' layers, and no token changes."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import CheckpointError, DecoderFailed
from dashinfer_vlm_core.models.lora import read_lora
from dashinfer_vlm_core.models.memory import kv_bytes_per_token
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_torch.decoder import TorchDecoder
from tests.kernels import needs_native, selector
from tests.lora_folders import ATTENTION, write_lora
from tests.plugins.oracle import (
    at_once,
    collect,
    decoding,
    ids,
    next_turn,
    one_by_one,
    prompt,
    visual,
    with_embedding,
)  # fmt: skip
from tests.quantized_checkpoints import LAYOUTS, TEXT_LAYERS, write_quantized
from tests.waiting import HANG, until

from .test_sequence_states import FORCED
from .tiny_mtp import Reference, write_mtp_checkpoint

WIDTH = 64
SEEDED = {"temperature": 0.8, "seed": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_mtp_checkpoint(tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(folder)


def spec_of(folder):
    return load_plugins().load_spec(folder)


def create(folder, **options):
    config = EngineConfig(**{"device": "cpu", "dtype": "float32", "kv_cache_mib": 64} | options)
    return TorchDecoder(spec_of(folder), config, selector(config))


@asynccontextmanager
async def started(folder, **options):
    """Start a decoder that assumes the usual costs of drafts: measured ones depend on the machine."""
    async with decoding(create(folder, **options)) as running:
        if speculator := running._worker._scheduler.speculator:
            speculator.record_seconds = lambda *_: None
        yield running


def run(folder, requests, *, how=at_once, **options):
    """Return the completions and the decoder's final statistics."""

    async def main():
        async with started(folder, **options) as running:
            return await how(running, requests), running.snapshot()

    return asyncio.run(main())


def long_prompt(content, length=40, **sampling):
    return prompt(content, length, **{"max_tokens": 40, "ignore_eos": True} | sampling)


def image_prompt(content, **sampling):
    parts = (19, (1, 8, 9), 11, (4, 5, 5), 30)
    return visual(*parts, width=WIDTH, content=content, **{"max_tokens": 30, "ignore_eos": True} | sampling)


# The head


class Prediction(NamedTuple):
    """A prediction of the head: the tokens before it, those that it had drafted, and its logits."""

    request_id: int
    num_output_tokens: int
    drafted: tuple[int, ...]
    logits: torch.Tensor


def recorded(decoder):
    """Return a list to which the predictions of a running decoder are added."""
    predictions = []
    drafter = decoder._worker._runner._drafter
    sample = drafter._sample

    def record(x, rows):
        for row, logits in zip(rows, drafter._head.logits(x), strict=True):
            sequence = row.sequence
            predictions.append(Prediction(id(sequence.request), len(sequence.output_ids), row.draft, logits))
        return sample(x, rows)

    drafter._sample = record
    return predictions


def expected_logits(reference, request, tokens, prediction):
    """Return the logits of the reference for a prediction after a part of a completion."""
    table = reference.model.model.language_model.embed_tokens.weight.detach()
    output = tokens[: prediction.num_output_tokens]
    embeddings = table[torch.from_numpy(np.concatenate((request.token_ids, output)))]
    for span in request.spans:
        embeddings[span.start : span.stop] = span.tokens.embedding
    after = int(request.positions.max()) + 1
    count = len(output) + len(prediction.drafted)
    positions = np.concatenate((request.positions, np.tile(np.arange(after, after + count), (3, 1))), axis=1)
    return reference.logits(embeddings, torch.from_numpy(positions), torch.tensor(prediction.drafted, dtype=torch.long))


def check_predictions(reference, requests, completions, predictions):
    by_id = {id(request): (request, ids(tokens)) for request, tokens in zip(requests, completions, strict=True)}
    for prediction in predictions[:: max(len(predictions) // 6, 1)]:
        expected = expected_logits(reference, *by_id[prediction.request_id], prediction)
        assert (prediction.logits - expected).abs().max() < 2e-3 * expected.std()


@pytest.mark.parametrize("options", [{"prefill_chunk": 70}, {"kv_cache_mib": 1, "max_batch_size": 3}])
def test_predictions_equal_transformers_layers(folder, reference, options):
    """Also after visual tokens, in chunks, and from the prefix cache."""

    async def main():
        async with started(folder, **options) as decoder:
            predictions = recorded(decoder)
            requests = [image_prompt(1), long_prompt(5, 150, **SEEDED), long_prompt(6, 90, max_tokens=60)]
            found = await at_once(decoder, requests)
            requests.append(next_turn(requests[0], ids(found[0]), prompt(77, 20)))
            found.append(await collect(decoder, requests[-1]))
            return requests, found, predictions, decoder.snapshot()

    requests, found, predictions, stats = asyncio.run(main())
    check_predictions(reference, requests, found, predictions)
    assert {len(prediction.drafted) for prediction in predictions} >= {0, 1}
    assert stats.hits == 1
    assert stats.accepted_tokens > 10


# Tokens

SAMPLING = {
    "greedy": {},
    "seeded": SEEDED,
    "top_p and top_k": {"temperature": 1.0, "top_p": 0.8, "top_k": 5, "seed": 3},
    "penalties": {"temperature": 0.7, "seed": 4, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs": {"logprobs": 2, **SEEDED},
    "minimum": {"min_tokens": 20, "logit_bias": {301: 4.0}, "ignore_eos": False},
}


def check_equal(folder, requests, *, how=at_once, **options):
    """Check that drafts change no token; return the statistics with them and without them."""
    expected, plain = run(folder, requests, how=how, **options, speculative_method="none")
    found, stats = run(folder, requests, how=how, **options)
    assert [ids(tokens) for tokens in found] == [ids(tokens) for tokens in expected]
    assert [tokens[-1].finish_reason for tokens in found] == [tokens[-1].finish_reason for tokens in expected]
    return stats, plain


def test_tokens_of_all_kinds_of_sampling_are_equal(folder):
    requests = [long_prompt(number, **sampling) for number, sampling in enumerate(SAMPLING.values())]
    stats, plain = check_equal(folder, [*requests, image_prompt(3, **SEEDED)], prefill_chunk=64)
    assert 0 < stats.accepted_tokens < stats.draft_tokens
    assert plain.draft_tokens == 0


def test_drafts_save_steps_where_text_does_not_repeat(folder):
    request = long_prompt(5, max_tokens=80, no_repeat_ngram_size=2, no_repeat_ngram_window=200, **SEEDED)
    stats, plain = check_equal(folder, [request])
    repeated, ngram = run(folder, [request], speculative_method="ngram")
    assert len(repeated[0]) == plain.steps == 80
    assert stats.steps <= 0.8 * plain.steps
    assert ngram.accepted_tokens < 5


def test_tokens_are_equal_after_preemption(folder):
    requests = [long_prompt(number, 60, max_tokens=110, **SEEDED) for number in range(4)]
    stats, _ = check_equal(folder, requests, kv_cache_mib=1)
    assert stats.preemptions > 0
    assert stats.accepted_tokens > 20


def test_tokens_of_grammar_and_lora_are_equal(folder, dense, tmp_path):
    """An adapter may change the model, but not the head."""
    lora = read_lora("adapter", str(write_lora(tmp_path / "adapter", dense, ATTENTION)), spec_of(folder))
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.0.* belongs to no module"):
        read_lora("adapter", str(write_lora(tmp_path / "head", folder, ATTENTION)), spec_of(folder))
    requests = [
        replace(long_prompt(1, max_tokens=60, **SEEDED), grammar=FORCED),
        replace(long_prompt(2), lora=lora),
        replace(image_prompt(2, **SEEDED), lora=lora),
        long_prompt(3),
    ]
    stats, _ = check_equal(folder, requests)
    assert stats.forced_tokens > 0
    assert stats.accepted_tokens > 10


def test_canceled_and_failed_requests_change_no_token_of_others(folder):
    """Neither during their own drafts, nor during those of others."""
    image = image_prompt(4)
    broken = with_embedding(image, image.spans[0].tokens.embedding * float("nan"), digest=b"broken".ljust(32))

    async def next_to_others(decoder, requests):
        tasks = [asyncio.create_task(collect(decoder, request)) for request in requests]
        for number in range(4):
            async with aclosing(decoder.decode(long_prompt(10 + number, max_tokens=500, **SEEDED))) as tokens:
                for _ in range(5 * number + 2):
                    await anext(tokens)
            with pytest.raises(DecoderFailed):
                await collect(decoder, broken)
        return await asyncio.gather(*tasks)

    requests = [long_prompt(1, max_tokens=90), long_prompt(2, max_tokens=90, **SEEDED), image_prompt(3)]
    stats, _ = check_equal(folder, requests, how=next_to_others)
    assert stats.accepted_tokens > 10
    assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0)


@needs_native
@pytest.mark.parametrize(
    "options", [{}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"quantization": "int4"}]
)
def test_c_kernels_compute_the_same_tokens(folder, options):
    requests = [long_prompt(1), long_prompt(2, **SEEDED), image_prompt(3)]
    stats, _ = check_equal(folder, requests, dtype="bfloat16", **options)
    assert stats.accepted_tokens > 10


def test_weights_of_the_head_may_be_quantized(tmp_path):
    """Those of its projection included."""
    source = write_mtp_checkpoint(tmp_path / "source", copies=False)
    quantized = write_quantized(source, tmp_path, LAYOUTS["gptq"], modules=rf"{TEXT_LAYERS}|^mtp\.fc$").quantized
    assert spec_of(quantized).text.mtp_layer
    check_equal(quantized, [long_prompt(1), long_prompt(2, **SEEDED)])


@needs_native
def test_skipped_steps_of_head_are_not_the_models(folder):
    model = create(folder, dtype="bfloat16")._load()._model
    model.mtp.lm_head._steps_to_skip = 63
    assert model._head._steps_to_skip == 0


@pytest.mark.slow
def test_mixture_of_experts(tmp_path):
    stats, _ = check_equal(write_mtp_checkpoint(tmp_path, moe=True), [long_prompt(1), long_prompt(2, **SEEDED)])
    assert stats.accepted_tokens > 10


# Where it does not pay


def test_random_head_is_rarely_asked(tmp_path, caplog):
    """Its predictions are wrong: soon, it computes and predicts one token in many steps only."""
    folder = write_mtp_checkpoint(tmp_path, copies=False)

    async def main():
        async with started(folder) as decoder:
            predictions = recorded(decoder)
            drafter = decoder._worker._runner._drafter
            forward, passes = drafter._forward, []

            def count(*arguments):
                passes.append(arguments)
                return forward(*arguments)

            drafter._forward = count
            await collect(decoder, long_prompt(1, max_tokens=120, no_repeat_ngram_size=2, **SEEDED))
            return predictions, len(passes), decoder.snapshot()

    with caplog.at_level(logging.INFO, logger="dashinfer_vlm_torch"):
        predictions, num_passes, stats = asyncio.run(main())
    assert "head for multi-token prediction" in caplog.text
    assert 2 <= len(predictions) < 30
    assert num_passes <= len(predictions) + 2  # and for the prompt, and at the end
    assert stats.draft_tokens < 20


def test_failing_head_is_given_up(folder, caplog):
    requests = [long_prompt(1), long_prompt(2, **SEEDED)]

    async def break_head(decoder, requests):
        def fail(*_):
            raise RuntimeError("broken")

        decoder._worker._runner._drafter._sample = fail
        return await at_once(decoder, requests)

    expected, _ = run(folder, requests, speculative_method="none")
    found, _ = run(folder, requests, how=break_head)
    assert [ids(tokens) for tokens in found] == [ids(tokens) for tokens in expected]
    assert caplog.text.count("Tokens could not be drafted") == 1


def test_hanging_head_is_a_fatal_error(folder):
    async def main():
        async with started(folder) as decoder:
            worker, ended = decoder._worker, threading.Event()

            def hang(*_):
                worker._step_timeout = 0.1  # only now, so that no earlier step can exceed it
                ended.wait(HANG)
                raise RuntimeError("ended")

            worker._runner._drafter._sample = hang
            request = asyncio.ensure_future(collect(decoder, long_prompt(1)))
            try:
                await asyncio.to_thread(until, lambda: decoder.fatal_error)
                error = decoder.fatal_error
            finally:
                worker._step_timeout = HANG
                ended.set()
            await request
            return error, decoder.fatal_error

    assert asyncio.run(main()) == ("A step of the decoder has taken more than 0.1 seconds.", "")


@pytest.mark.parametrize("lacking", ["mtp.layers.0.", "mtp.norm.", "mtp.layers.0.mlp.up_proj."])
def test_incomplete_head_is_not_used(folder, tmp_path, caplog, lacking):
    copied = shutil.copytree(folder, tmp_path / "incomplete")
    tensors = load_file(copied / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(lacking)}
    save_file(kept, copied / "model.safetensors", {"format": "pt"})
    assert spec_of(copied).text.mtp_layer is None
    assert f"{copied} lacks {lacking.removesuffix('.')}" in caplog.text


def test_memory_and_predictions_only_if_used(folder, dense):
    text = spec_of(folder).text
    assert text.mtp_layer
    assert spec_of(dense).text.mtp_layer is None
    assert kv_bytes_per_token(text, 4) == kv_bytes_per_token(spec_of(dense).text, 4) * 2
    sizes = [
        create(folder, speculative_method=method, kv_cache_mib=2).snapshot().kv_size for method in ("auto", "ngram")
    ]
    assert sizes[0] == pytest.approx(sizes[1] / 2, abs=1)
    _, stats = run(folder, [long_prompt(1, **SEEDED)], how=one_by_one, speculative_method="ngram")
    assert stats.draft_tokens < 10
