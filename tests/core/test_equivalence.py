"""Ours = transformers, batched = alone, chunked = whole, cached = uncached, streamed = plain; greedy, float32."""

from __future__ import annotations

import asyncio

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_demo import CHECKPOINT
from tests.conversations import CONVERSATIONS, as_openai
from tests.recorder import Recorder
from tests.transformers_engine import TransformersEngine
from training import frozen

TOKENS = 24


@pytest.fixture(scope="module", params=["tiny", pytest.param("demo", marks=pytest.mark.slow)])
def checkpoint(request, tiny_checkpoint):
    return tiny_checkpoint if request.param == "tiny" else CHECKPOINT


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Return transformers' completions as token ids, including the end token."""
    oracle = TransformersEngine(checkpoint)
    return {name: oracle.generate([messages])[0][0][:TOKENS] for name, messages in CONVERSATIONS.items()}


@pytest.fixture
def running(checkpoint):
    """Start engines that record their token ids; they are closed at the end of the test."""
    engines = []

    def running(**options):
        recorder = Recorder()
        config = EngineConfig(model=str(checkpoint), decoder="recorded", dtype="float32", **options)
        engine = Engine(config, registry=recorder.registry()).start()
        engines.append(engine)
        return engine, recorder.tokens

    yield running
    for engine in engines:
        engine.close()


def body(name, **options):
    return {"messages": as_openai(CONVERSATIONS[name]), "temperature": 0, "max_tokens": TOKENS, **options}


def test_tokens_equal_transformers(running, expected):
    engine, tokens = running()
    for name, ids in expected.items():
        answer = engine.chat(body(name))
        assert tokens[answer.id] == ids, name


def test_batched_equals_alone(running, expected):
    engine, tokens = running()

    async def all_at_once():
        return await asyncio.gather(*(engine.achat(body(name)) for name in expected))

    for name, answer in zip(expected, asyncio.run(all_at_once()), strict=True):
        assert tokens[answer.id] == expected[name], name


@pytest.mark.parametrize("chunk", [1, 13])
def test_chunked_equals_whole(running, expected, chunk):
    engine, tokens = running(prefill_chunk=chunk)
    for name in ("one picture", "three pictures between text", "video"):
        answer = engine.chat(body(name))
        assert tokens[answer.id] == expected[name], name


def test_cached_equals_uncached(running, expected):
    engine, tokens = running()
    without, tokens_without = running(vision_cache_mib=0, prefix_cache=False)
    for name in ("one picture", "picture and video"):
        for _ in range(2):
            assert tokens[engine.chat(body(name)).id] == expected[name], name
            assert tokens_without[without.chat(body(name)).id] == expected[name], name


@pytest.mark.supports("streaming", backend="torch-cpu")
def test_streamed_equals_plain(running, expected):
    engine, tokens = running()
    for name in expected:
        plain = engine.chat(body(name)).choices[0]
        chunks = list(engine.stream(body(name)))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == plain.message.content, name
        assert tokens[chunks[0].id] == expected[name], name
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
            plain.finish_reason
        ]


def test_continued_conversation_equals_whole_conversation(running, expected):
    """The second turn repeats the first one's image, which is cached by then."""
    engine, tokens = running()
    engine.chat({**body("two turns"), "messages": as_openai(CONVERSATIONS["two turns"])[:1]})
    assert tokens[engine.chat(body("two turns")).id] == expected["two turns"]


@pytest.mark.slow
def test_frozen_prompts_give_frozen_tokens():
    """Their best logit leads by more than 1 at every step, so no summation order and no dtype can change them."""
    found = frozen.prompts()
    for dtype in ("float32", "bfloat16"):
        recorder = Recorder()
        config = EngineConfig(model="demo", decoder="recorded", dtype=dtype)
        with Engine(config, registry=recorder.registry()) as engine:
            requests = [{"messages": as_openai(prompt.messages()), "temperature": 0} for prompt in found]
            answers = asyncio.run(_all(engine, requests))
        for prompt, answer in zip(found, answers, strict=True):
            assert tuple(recorder.tokens[answer.id]) == prompt.token_ids, (dtype, prompt)
            assert answer.choices[0].message.content == prompt.text
            assert answer.usage.prompt_tokens == prompt.prompt_tokens


async def _all(engine, requests):
    return await asyncio.gather(*(engine.achat(request) for request in requests))
