"""Conversations through the whole engine: earlier turns are neither encoded nor computed again."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise

import pytest

from dashinfer_vlm_core import Engine, EngineConfig, hookimpl
from dashinfer_vlm_core.concurrency.compute import THREAD_NAME
from dashinfer_vlm_core.decoders import DecoderSupport
from dashinfer_vlm_core.kernels.torch_kernels import TorchKernels
from dashinfer_vlm_core.models.qwen2_vl.vit import Qwen2VLEncoder
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_torch import runner
from dashinfer_vlm_torch.decoder import TorchDecoder
from dashinfer_vlm_torch.kv_cache import KVCache
from dashinfer_vlm_torch.runner import ModelRunner
from tests.conversations import as_openai, assistant, blurred_image, user


class CountingRunner(ModelRunner):
    """Records how many tokens each step computes."""

    def launch(self, chunks, previous=None):
        self.computed = [*getattr(self, "computed", ()), sum(chunk.end - chunk.start for chunk in chunks)]
        return super().launch(chunks, previous)


class CountingDecoder(TorchDecoder):
    def _load(self):
        runner = super()._load()
        self.runner = CountingRunner(runner._model, runner._cache)
        return self.runner


class CountingPlugin:
    """A plugin with the counting PyTorch decoder."""

    name = "counted"

    @hookimpl
    def register_decoders(self, register):
        register(self)

    def check_support(self, spec, config):
        return DecoderSupport(score=1, reason="for a test")

    def create(self, spec, config, kernels):
        self.decoder = CountingDecoder(spec, config, kernels)
        return self.decoder


class CountingEngine:
    """An engine that counts the work of its vision encoder and decoder per request."""

    def __init__(self, **options):
        registry, self._plugin = load_plugins(), CountingPlugin()
        registry.add_plugin(self._plugin, name="counted")
        # Without drafts, the number of computed tokens follows from the usage.
        options = {"dtype": "float32", "speculative_method": "none"} | options
        self.engine = Engine(EngineConfig(model="demo", decoder="counted", **options), registry=registry)

    def __enter__(self):
        self.engine.start()
        return self

    def __exit__(self, *_):
        self.engine.close()

    def chat(self, *messages, **fields):
        """Return the text, the usage, the encoder's passes, and the number of computed tokens."""
        before = len(getattr(self._plugin.decoder.runner, "computed", ()))
        passes = self.engine.stats().vision.passes
        body = {"messages": as_openai(messages), "temperature": 0, "max_tokens": 40, **fields}
        answer = self.engine.chat(body)
        read = sum(self._plugin.decoder.runner.computed[before:])
        return answer.choices[0].message.content, answer.usage, self.engine.stats().vision.passes - passes, read

    def stats(self):
        return self._plugin.decoder.snapshot()


def cached(usage):
    return usage.prompt_tokens_details.cached_tokens


def turns():
    """Return the user messages of three turns, two of them with an image."""
    return [
        user(blurred_image(1), "What is in the picture?"),
        user("Are you sure?"),
        user("And in this one? ", blurred_image(2)),
    ]


def chat(counting):
    """Run three turns, each with the whole conversation so far; return the result of each."""
    messages, results = [], []
    for turn in turns():
        messages.append(turn)
        results.append(counting.chat(*messages))
        messages.append(assistant(results[-1][0]))
    return results


def test_conversation_computes_each_turn_once():
    with CountingEngine(prefix_cache=False) as plain:
        expected = chat(plain)
    with CountingEngine() as counting:
        found = chat(counting)
        again = counting.chat(turns()[0])
    assert [text for text, *_ in found] == [text for text, *_ in expected]
    assert [passes for _, _, passes, _ in found] == [1, 0, 1]
    for _, usage, _, read in found:  # the last token of a completion is returned, but not computed
        assert read == usage.prompt_tokens - cached(usage) + usage.completion_tokens - 1
    for (_, before, *_), (_, after, *_) in pairwise(found):
        assert cached(after) >= before.prompt_tokens
    assert [cached(usage) for _, usage, *_ in expected] == [0, 0, 0]
    assert again[0] == found[0][0]
    assert (cached(again[1]), again[2]) == (again[1].prompt_tokens - 1, 0)


def test_many_users_of_one_image_compute_it_once():
    questions = [f"Question {number}: what is in the picture?" for number in range(8)]
    bodies = [
        {"messages": as_openai([user(blurred_image(1), question)]), "temperature": 0, "max_tokens": 12}
        for question in questions
    ]

    async def all_at_once(engine):
        return await asyncio.gather(*(engine.achat(body) for body in bodies))

    with CountingEngine() as counting:
        answers = asyncio.run(all_at_once(counting.engine))
        found = [cached(answer.usage) for answer in answers]
        stats = counting.stats()
    with CountingEngine(prefix_cache=False) as plain:
        expected = asyncio.run(all_at_once(plain.engine))
    assert [one.choices[0].message.content for one in answers] == [one.choices[0].message.content for one in expected]
    images = answers[0].usage.prompt_tokens_details.image_tokens
    assert found.count(0) == 1
    assert sum(count > images for count in found) == 7
    assert (stats.queries, stats.hits, stats.cached_tokens) == (8, 7, sum(found))


def test_several_choices_count_only_common_cached_tokens():
    with CountingEngine() as counting:
        request = {"n": 3, "temperature": 1.0, "seed": 4}
        _, first, _, read = counting.chat(turns()[0], **request)
        _, second, *_ = counting.chat(turns()[0], **request)
    assert cached(first) == 0
    assert cached(second) == second.prompt_tokens - 1
    assert read == first.prompt_tokens + 2 + first.completion_tokens - 3


@pytest.mark.slow
@pytest.mark.parametrize("salts", [("", "anna"), ("anna", ""), ("anna", "bert")])
def test_cache_salt_isolates_text_and_images(salts):
    """The results are those of an empty cache."""
    first, second = salts
    with CountingEngine() as counting:
        results = [counting.chat(turns()[0], cache_salt=salt or None) for salt in (first, second, first)]
    assert [cached(usage) for _, usage, *_ in results] == [0, 0, results[0][1].prompt_tokens - 1]
    assert [passes for _, _, passes, _ in results] == [1, 1, 0]


def test_all_computation_is_on_compute_thread(monkeypatch):
    """Otherwise OpenMP would create a second team of threads, which slows down every step."""
    seen = {}

    def record(owner, name):
        plain = getattr(owner, name)

        def recording(*arguments, **options):
            seen.setdefault(name, set()).add(threading.current_thread().name)
            return plain(*arguments, **options)

        monkeypatch.setattr(owner, name, recording)

    record(TorchKernels, "linear")  # weights, as they are read
    record(TorchKernels, "norm")
    record(TorchKernels, "attend")
    record(Qwen2VLEncoder, "normalize")
    record(runner, "launch_sample")
    record(KVCache, "copy_rows")
    with CountingEngine() as counting:
        counting.chat(user(blurred_image(1), "What is in the picture?"))
        counting.chat(user(blurred_image(1), "Is it red?"))
        bodies = [
            {"messages": as_openai([user(blurred_image(1), f"{word}?")]), "max_tokens": 8} for word in ("A", "B", "C")
        ]

        async def all_at_once():
            await asyncio.gather(*map(counting.engine.achat, bodies))

        asyncio.run(all_at_once())
    assert seen == {
        name: {THREAD_NAME} for name in ("linear", "norm", "attend", "normalize", "launch_sample", "copy_rows")
    }
