"""1,500 valid and invalid requests through the public interface: none of them ends the worker."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.errors import RequestError
from tests.conversations import as_openai, blurred_image, user

pytestmark = pytest.mark.dashinfer

CASES = 1500
TOGETHER = 24
VOCAB = 320
EDGES = (
    0,
    1,
    -1,
    2,
    1e-38,
    1e-7,
    0.99,
    0.9999999,
    1.0000001,
    1e9,
    -1e9,
    2**31,
    2**63,
    float("nan"),
    float("inf"),
    "1",
    None,
    True,
)
TEXTS = ("", " ", "Hello", "\x00", "é🙂", "<|im_end|>", "<|image_pad|>" * 5, "ab " * 300, "ab " * 1000)

RANGES = {
    "temperature": lambda rng: rng.choice((rng.uniform(0, 2), 1e-5, 1e-4, 2)),
    "top_p": lambda rng: rng.choice((rng.random(), 1, 1e-9, 0.999999, 0.9999995)),
    "top_k": lambda rng: rng.choice((0, 1, 5, VOCAB - 1, VOCAB, VOCAB + 1, 10**6)),
    "seed": lambda rng: rng.randrange(-(2**63), 2**63),
    "repetition_penalty": lambda rng: rng.choice((rng.uniform(0.01, 2), rng.uniform(1, 2), 0.01, 2, 2.1)),
    "max_tokens": lambda rng: rng.choice((1, 2, 3, 5, 8)),
    "stop_token_ids": lambda rng: rng.choice(([], [1], [VOCAB - 1], [7, 8], list(range(50)), [VOCAB])),
    "stop": lambda rng: rng.choice(("a", ["b", "c"], [])),
    "ignore_eos": lambda rng: rng.random() < 0.5,
}
UNHONOURED = {
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "logit_bias": {"1": 5},
    "min_tokens": 2,
    "min_p": 0.1,
    "no_repeat_ngram_size": 3,
    "response_format": {"type": "json_object"},
}


def case(number):
    """Return a request: mostly valid, sometimes with one invalid value or an unsupported feature."""
    rng = random.Random(number)
    names = rng.sample(list(RANGES), rng.randrange(0, 6))
    body = {"max_tokens": rng.randrange(1, 6)} | {name: RANGES[name](rng) for name in names}
    if rng.random() < 0.2:
        body |= {"logprobs": True, "top_logprobs": rng.randrange(0, 13)}
    if rng.random() < 0.15:
        body[rng.choice(list(RANGES))] = rng.choice(EDGES)
    if rng.random() < 0.05:
        body.update([rng.choice(list(UNHONOURED.items()))])
    text = rng.choice(TEXTS) if rng.random() < 0.3 else "".join(rng.choices("abcdefgh .,\n", k=rng.randrange(1, 60)))
    content = [text] if rng.random() > 0.01 else [text, blurred_image(number % 3)]
    return {"messages": as_openai([user(*content)]), **body}


def test_no_request_ends_the_worker(chat_checkpoint, cache):
    config = EngineConfig(
        model=str(chat_checkpoint), decoder="dashinfer", device="cpu", cache_dir=cache, max_batch_size=16
    )
    outcomes = Counter()

    async def send(engine, number):
        try:
            answer = await engine.achat(case(number))
        except RequestError as error:
            return type(error).__name__
        assert answer.choices[0].finish_reason in {"stop", "length"}
        return "answered"

    async def send_sequentially(engine, numbers):
        outcomes.update([await send(engine, number) for number in numbers])

    async def all_cases(engine):
        numbers = iter(range(CASES))
        await asyncio.gather(*(send_sequentially(engine, numbers) for _ in range(TOGETHER)))

    with Engine(config) as engine:
        decoder = engine._ready().pipeline.decoder._decoder
        pid = decoder.pid
        asyncio.run(all_cases(engine))
        assert (decoder.pid, decoder.fatal_error) == (pid, "")
        again = engine.chat({"messages": [user("Hello")], "temperature": 0, "max_tokens": 8})
        assert again.usage.completion_tokens
    assert outcomes.total() == CASES
    assert outcomes["answered"] > 0.5 * CASES
    assert outcomes["InvalidParameter"] > 15
    assert outcomes["UnsupportedParameter"] > 15
    assert outcomes["ContextLengthExceeded"] > 15
