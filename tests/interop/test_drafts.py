"""The head for multi-token prediction of Qwen3.5 drafts the same tokens as in vLLM."""

from __future__ import annotations

import asyncio

import pytest

from dashinfer_vlm_torch.proposer import count_equal
from tests.plugins.oracle import ids, one_by_one, prompt
from tests.qwen3_5.test_mtp import recorded, started
from tests.qwen3_5.tiny_mtp import write_mtp_checkpoint
from tests.tiny import to_bfloat16

pytestmark = pytest.mark.interop

TOKENS = 40
NUM_DRAFTS = 3
MIN_MARGIN = 0.1
"""Between the two best logits, in standard deviations of the logits: otherwise, rounding to bfloat16 can decide."""
DIMENSIONS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "mtp_num_hidden_layers": 1}
"""As published; vLLM reads the last one."""


def test_vllm_drafts_the_same_tokens(vllm, tmp_path):
    folder = to_bfloat16(write_mtp_checkpoint(tmp_path / "model", **DIMENSIONS))
    requests = [prompt(number, 40, max_tokens=TOKENS, ignore_eos=True) for number in range(4)]
    prompts = [request.token_ids.tolist() for request in requests]
    options = {"model": str(folder), "prompts": prompts, "max_tokens": TOKENS, "num_drafts": NUM_DRAFTS}
    outputs = vllm.run("draft_vllm.py", options)
    found, predictions = asyncio.run(predict(folder, requests))
    compared = 0
    for request, tokens, output in zip(requests, found, outputs, strict=True):
        same = count_equal(ids(tokens), output["token_ids"])
        expected = dict(drafted(output))
        for prediction in predictions:
            if prediction.request_id != id(request) or prediction.num_output_tokens > same:
                continue
            number = len(prediction.drafted)
            theirs = expected.get(prediction.num_output_tokens, ())
            best = prediction.logits.float().topk(2).values
            is_clear = best[0] - best[1] > MIN_MARGIN * prediction.logits.float().std()
            if is_clear and tuple(theirs[:number]) == prediction.drafted and number < len(theirs):
                compared += 1
                assert theirs[number] == int(prediction.logits.argmax())
    assert compared > 5 * len(requests)


async def predict(folder, requests):
    async with started(folder, dtype="bfloat16") as decoder:
        predictions = recorded(decoder)
        return await one_by_one(decoder, requests), predictions


def drafted(output):
    """Yield the number of tokens before each draft of vLLM, and the draft."""
    tokens = output["token_ids"]
    length = 1
    for draft in output["drafts"]:
        yield length, draft
        length += 1 + count_equal(draft, tokens[length:])
