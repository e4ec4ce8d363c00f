"""Each family has the features of the PyTorch decoder that do not depend on the model. See docs/support.md."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from tests.conversations import CONVERSATIONS, as_openai, blurred_image, user
from tests.kernels import needs_native
from tests.pdfs import document, rendered
from tests.qwen3_5 import tiny_qwen3_5
from tests.qwen3_vl import tiny_qwen3
from tests.samples import data_url, encode
from tests.tiny import MERGES, to_bfloat16, write_qwen2_5_vl
from tests.waiting import HANG, until

pytestmark = pytest.mark.slow

WRITERS = {
    "qwen2_5_vl": write_qwen2_5_vl,
    "qwen3_vl": tiny_qwen3.write_checkpoint,
    "qwen3_5": tiny_qwen3_5.write_checkpoint,
}
PROMPT = {"messages": as_openai([user(blurred_image(1), [blurred_image(2), blurred_image(3)], "Compare.")])}
LONG = PROMPT | {"max_tokens": 1500, "ignore_eos": True}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}}

WITHOUT_TEXT = {str(token): -100 for token in range(256 + len(MERGES), 320)}
"""A bias against the tokens without text, which have no entry in the log probabilities."""


def covers(feature):
    """Run a test with each family, and record what it shows for docs/support.md."""
    params = [
        pytest.param(name, marks=pytest.mark.supports(feature, backend="torch-cpu", family=name)) for name in WRITERS
    ]
    return pytest.mark.parametrize("family", params)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: write(tmp_path_factory.mktemp(name)) for name, write in WRITERS.items()}


@pytest.fixture(scope="module")
def start(folders):
    """Return an engine that is not started."""

    def start(family, **options):
        defaults = {"model": str(folders[family]), "dtype": "float32", "media_workers": 0, "kv_cache_mib": 64}
        return Engine(EngineConfig(**defaults | {"device": "cpu", "decoder": "torch"} | options))

    return start


@pytest.fixture(scope="module")
def engines(start):
    """Start an engine per family on first use."""
    engines = {}

    def engine(family):
        if family not in engines:
            engines[family] = start(family).start()
        return engines[family]

    yield engine
    for engine in engines.values():
        engine.close()


def token_ids(engine, **options):
    return list(engine.submit(PROMPT | options).result(timeout=HANG).token_ids[0])


@covers("sampling")
def test_seeded_sampling_gives_the_same_tokens_in_any_batch(engines, family):
    engine = engines(family)
    options = {"temperature": 1.2, "top_p": 0.95, "top_k": 50, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
    options |= {"max_tokens": 16, "ignore_eos": True}
    requests = [options | {"seed": seed} for seed in (7, 8, 7)]

    async def together():
        return await asyncio.gather(*(asyncio.to_thread(token_ids, engine, **request) for request in requests))

    alone = token_ids(engine, **requests[0])
    first, other, again = asyncio.run(together())
    assert alone == first == again
    assert other != first


@covers("documents")
def test_page_equals_the_same_page_as_png(start, family):
    page = document("A page", size=(150, 200), paint="0.2 0.5 0.9 rg 20 20 90 60 re f")
    question = {"type": "text", "text": "What?"}
    file = {"type": "file", "file": {"file_data": data_url(page, "application/pdf"), "render": "image"}}
    with start(family, media_workers=1) as engine:
        (item,) = engine.preview({"messages": [{"role": "user", "content": [file]}]}).items
        picture = {"type": "image_url", "image_url": {"url": data_url(encode(rendered(page, *item.size)))}}
        ours, theirs = (
            engine.submit({"messages": [{"role": "user", "content": [part, question]}], **GREEDY}).result(timeout=HANG)
            for part in (file, picture)
        )
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    assert ours.token_ids == theirs.token_ids
    assert item.tokens > 4


@covers("sampling-ocr")
def test_min_p_and_ngrams_limit_the_tokens(engines, family):
    """Of min_p, by a biased token whose probability is above the others' limit."""
    engine = engines(family)
    options = {"temperature": 1.5, "seed": 1, "max_tokens": 16, "ignore_eos": True, "logit_bias": {"5": 12}}
    assert len(set(token_ids(engine, **options))) > 1
    assert set(token_ids(engine, **options, min_p=0.99)) == {5}
    tokens = token_ids(engine, **options, min_p=0.99, no_repeat_ngram_size=2)
    assert len(set(itertools.pairwise(tokens))) == 15


@covers("streaming")
def test_streamed_text_equals_plain_text(engines, family):
    engine = engines(family)
    for name in ("text", "three pictures between text", "picture and video"):
        request = {"messages": as_openai(CONVERSATIONS[name]), "temperature": 0, "max_tokens": 16, "ignore_eos": True}
        plain = engine.chat(request).choices[0]
        chunks = [chunk.choices[0] for chunk in engine.stream(request)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == plain.message.content
        assert chunks[-1].finish_reason == plain.finish_reason
        assert len(chunks) > 2


@covers("cancellation")
def test_closed_stream_frees_memory(engines, family):
    engine = engines(family)
    stream = engine.stream(LONG)
    next(stream)
    held = engine.stats().decoder
    stream.close()
    until(lambda: engine.stats().decoder.running == 0)
    assert held.running == 1
    assert held.kv_used > 0
    assert engine.stats().decoder.kv_used == 0


@covers("tools")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_tool_call_follows_its_schema(engines, family, choice):
    request = PROMPT | {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
    done = engines(family).chat(request).choices[0]
    (call,) = done.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (done.finish_reason, call.function.name) == ("tool_calls", "weather")
    assert arguments["city"] in ("Rome", "Oslo")
    assert 1 <= arguments["days"] <= 9


def first_logprobs(engine):
    """Return the log probabilities of the most likely first tokens of some texts and conversations."""
    texts = [
        [user(text)] for text in ("Hello there.", "What is a star?", "the in then", "a b c d e f", "1 2 3", "Why?")
    ]
    found = []
    for messages in (*texts, *list(CONVERSATIONS.values())[1:4]):
        request = {"messages": as_openai(messages), "logit_bias": WITHOUT_TEXT, "temperature": 0, "max_tokens": 1}
        choice = engine.chat(request | {"logprobs": True, "top_logprobs": 20}).choices[0]
        found.append({entry.token: entry.logprob for entry in choice.logprobs.content[0].top_logprobs})
    return found


def median_error(found, expected):
    """Return the median difference of the log probabilities of the most likely tokens in `expected`."""
    pairs = [(ours, exact, max(exact, key=exact.get)) for ours, exact in zip(found, expected, strict=True)]
    return statistics.median(abs(ours.get(token, -math.inf) - exact[token]) for ours, exact, token in pairs)


@needs_native
@covers("int4")
def test_int4_is_close_to_rounded_weights(start, engines, family, tmp_path):
    """The C kernels compute with 4 bits what PyTorch's compute with the same weights in float32."""
    options = {"quantization": "int4", "model": str(to_bfloat16(WRITERS[family](tmp_path / "model")))}
    with start(family, dtype="bfloat16", **options) as native, start(family, **options) as rounded:
        found, expected, exact = (first_logprobs(engine) for engine in (native, rounded, engines(family)))
    assert median_error(found, expected) < 0.3
    assert median_error(expected, exact) > 0.05


@covers("int8-kv-cache")
def test_int8_kv_cache_stays_close(start, engines, family):
    with start(family, kv_cache_dtype="int8", kv_cache_mib=16) as engine:
        found, expected = first_logprobs(engine), first_logprobs(engines(family))
    assert 0 < median_error(found, expected) < 0.1
