"""Prefill of the history while no request runs: the next turn starts after the previous response, with equal logits."""

from __future__ import annotations

import numpy as np
import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.engine.admission import ConcurrencyLimiter
from dashinfer_vlm_core.engine.history import HistoryPrefill
from dashinfer_vlm_core.engine.loading import Shared
from tests.samples import image_url
from tests.waiting import until

TEMPLATE = """\
{%- set last = namespace(index=0) %}
{%- for message in messages if message.role == "user" %}{% set last.index = loop.index0 %}{% endfor %}
{%- set count = namespace(users=-1) %}
{%- for message in messages %}
{%- if message.role == "user" %}{% set count.users = count.users + 1 %}{% endif %}
{{- "<|im_start|>" + message.role + "\\n" }}
{%- if message.role == "assistant" and count.users == last.index %}
{{- "<think>" + (message.reasoning_content or "\\n") + "\\n</think>\\n\\n" }}
{%- endif %}
{%- for part in ([{"type": "text", "text": message.content}] if message.content is string else message.content) %}
{{- "<|vision_start|><|image_pad|><|vision_end|>" if part.type == "image" else part.text }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n" }}{% endif %}"""
"""Leaves out the reasoning before the last message of the user, as Qwen3.5's template does."""

RESPONSE = " ".join(map(str, range(60)))
FIXED = {"guided_choice": [RESPONSE]}
IMAGE = {"type": "image_url", "image_url": {"url": image_url(192, 192)}}
FIRST = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "What is on the left of the tree?"}]}]
SECOND = [*FIRST, {"role": "assistant", "content": RESPONSE}, {"role": "user", "content": "And on the right?"}]


@pytest.fixture(scope="module")
def start(dense, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)

    def create(shared=None, **options):
        config = {"model": str(dense), "device": "cpu", "dtype": "float32", "kv_cache_mib": 64}
        return Engine(EngineConfig(**config | {"chat_template": template} | options), shared=shared)

    return create


def chat(engine, messages, **fields):
    return engine.chat({"messages": messages, "temperature": 0, "max_tokens": 400, **fields})


def is_prefilling(engine):
    task = engine._running.pipeline.history._task
    return task is not None and not task.done()


def logprobs_of(completion):
    return [token.logprob for token in completion.choices[0].logprobs.content]


def test_next_turn_starts_after_the_previous_response(start, monkeypatch):
    monkeypatch.setattr(HistoryPrefill, "IDLE_SECONDS", 0.0)
    asked = {"logprobs": True, "max_tokens": 8}
    with start() as engine:
        first = chat(engine, FIRST, **FIXED)
        assert first.choices[0].message.content == RESPONSE
        until(lambda: not is_prefilling(engine))
        second = chat(engine, SECOND, **asked)
        stats = engine.stats().decoder
        prompt = engine.submit({"messages": SECOND, "max_tokens": 1}).result().prompt_token_ids
        end = len(prompt) - len(engine.submit({"messages": SECOND[-1:], "max_tokens": 1}).result().prompt_token_ids)
    assert second.usage.prompt_tokens_details.cached_tokens == end
    assert (stats.queries, stats.hits) == (2, 1)
    with start(prefix_cache=False) as engine:
        expected = chat(engine, SECOND, **asked)
        assert engine._running.pipeline.history is None
    np.testing.assert_allclose(logprobs_of(second), logprobs_of(expected), atol=1e-3)
    assert second.choices[0].message.content == expected.choices[0].message.content


def test_request_stops_the_prefill(start, monkeypatch):
    monkeypatch.setattr(HistoryPrefill, "STEP_TOKENS", 1)
    monkeypatch.setattr(HistoryPrefill, "IDLE_SECONDS", 0.0)
    with start() as engine:
        chat(engine, FIRST, **FIXED)
        steps = engine.stats().decoder.steps
        until(lambda: engine.stats().decoder.steps > steps + 3)
        chat(engine, [{"role": "user", "content": "Hello"}], max_tokens=1)
        assert not is_prefilling(engine)
        assert engine.stats().decoder.running == 0
        monkeypatch.setattr(HistoryPrefill, "IDLE_SECONDS", 600.0)
        chat(engine, FIRST, **FIXED)
        assert is_prefilling(engine)
    assert engine.status().state == "closed"


def test_nothing_is_prefilled_while_another_model_runs(start, monkeypatch):
    monkeypatch.setattr(HistoryPrefill, "IDLE_SECONDS", 0.0)
    shared = Shared()
    with start(shared=shared) as engine, ConcurrencyLimiter(1, shared.completions).slots():
        chat(engine, FIRST, **FIXED)
        steps = engine.stats().decoder.steps
        until(lambda: not is_prefilling(engine))
        assert engine.stats().decoder.steps == steps


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, **FIXED},
        {"max_tokens": 5, **FIXED},
        {
            "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
            "tool_choice": "required",
        },
    ],
    ids=["several choices", "cut", "tool call"],
)
def test_only_a_complete_text_is_prefilled(start, fields, monkeypatch):
    monkeypatch.setattr(HistoryPrefill, "IDLE_SECONDS", 600.0)
    with start() as engine:
        chat(engine, FIRST, **fields)
        assert not is_prefilling(engine)


def test_nothing_is_computed_if_the_response_is_repeated_as_generated(start, tmp_path, monkeypatch):
    monkeypatch.setattr(HistoryPrefill, "IDLE_SECONDS", 0.0)
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE.replace("and count.users == last.index ", ""))
    with start(chat_template=template) as engine:
        chat(engine, FIRST, **FIXED)
        steps = engine.stats().decoder.steps
        until(lambda: not is_prefilling(engine))
        assert engine.stats().decoder.steps == steps
