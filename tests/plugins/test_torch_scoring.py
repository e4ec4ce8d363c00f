"""The logits of given completions equal transformers'."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from dashinfer_vlm_core.errors import ContextLengthExceeded, EngineClosed
from dashinfer_vlm_core.protocol.sampling import Sampling

from .oracle import collect, decoding, ids, prompt, visual

COMPLETION = (5, 17, 80, 3, 3, 41)


def score(decoder, *requests, completion=COMPLETION):
    async def run():
        async with decoding(decoder):
            sampling = Sampling(max_tokens=len(completion))
            scored = [replace(request, sampling=sampling) for request in requests]
            return await asyncio.gather(*(decoder.logits(request, completion) for request in scored))

    return [torch.from_numpy(logits) for logits in asyncio.run(run())]


@pytest.mark.parametrize("prefill_chunk", [1, 7, 512])
def test_logits_equal_transformers(oracle, prefill_chunk):
    """However the prompt is cut; its image has placeholders in several chunks."""
    request = visual(5, (1, 4, 6), 7, width=oracle.width)
    (logits,) = score(oracle.decoder(prefill_chunk=prefill_chunk), request)
    torch.testing.assert_close(logits, oracle.logits(request, list(COMPLETION)), atol=2e-4, rtol=1e-4)


def test_single_token_has_logits_of_prompt(oracle):
    request = prompt(1, 20)
    (logits,) = score(oracle.decoder(), request, completion=(9,))
    torch.testing.assert_close(logits, oracle.logits(request, [9]), atol=2e-4, rtol=1e-4)


def test_completions_are_scored_while_others_are_decoded(oracle):
    request = prompt(2, 30, max_tokens=24)

    async def run():
        async with decoding(oracle.decoder()) as decoder:
            scored = replace(request, sampling=Sampling(max_tokens=len(COMPLETION)))
            decoded, *logits = await asyncio.gather(
                collect(decoder, request), *(decoder.logits(scored, COMPLETION) for _ in range(4))
            )
            return ids(decoded), logits, decoder.stats

    decoded, logits, stats = asyncio.run(run())
    assert decoded == oracle.greedy(request)
    assert stats.kv_used == 0
    for one in logits:
        torch.testing.assert_close(
            torch.from_numpy(one), oracle.logits(request, list(COMPLETION)), atol=2e-4, rtol=1e-4
        )


def test_completion_beyond_context_is_rejected(oracle):
    with pytest.raises(ContextLengthExceeded):
        score(oracle.decoder(max_model_len=24), prompt(1, 20))


def test_closed_decoder_does_not_score(oracle):
    with pytest.raises(EngineClosed):
        asyncio.run(oracle.decoder().logits(prompt(1, 4), COMPLETION))
