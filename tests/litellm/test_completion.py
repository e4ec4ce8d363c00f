"""LiteLLM's own functions, in process: what is asked reaches the engine, and the answer comes back whole."""

from __future__ import annotations

import asyncio
import threading

import litellm
import pytest

import dashinfer_vlm_litellm
from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.shared import SHARED
from dashinfer_vlm_core.testing import Script
from tests.litellm.conftest import HELLO
from tests.samples import picture_url

TRUTH = "I know circles, squares, triangles, stars and crosses."
ASK = {"messages": [{"role": "user", "content": "Which shapes do you know?"}], "temperature": 0}


def text_of(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def ask(model, **options):
    return await litellm.acompletion(model, **options)


async def stream(model, **options):
    return [chunk async for chunk in await litellm.acompletion(model, stream=True, **options)]


def test_the_four_ways_give_the_engines_answer(demo):
    expected = SHARED.get(EngineConfig()).chat(ASK)
    whole = [litellm.completion(demo, **ASK), asyncio.run(ask(demo, **ASK))]
    streams = [list(litellm.completion(demo, stream=True, **ASK)), asyncio.run(stream(demo, **ASK))]
    assert expected.choices[0].message.content.startswith(TRUTH)
    for answer in whole:
        assert answer.choices[0].message.content == expected.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"
        assert answer.model == "demo"
        assert answer.id.startswith("chatcmpl-")
        assert counts(answer.usage) == counts(expected.usage)
    for chunks in streams:
        assert text_of(chunks) == expected.choices[0].message.content
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert len({chunk.id for chunk in chunks}) == 1


def counts(usage):
    details = usage.prompt_tokens_details
    return (
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
        details.image_tokens,
        details.video_tokens,
    )
