"""Steps in fixed shapes: the same tokens as without padding, and nothing that a CUDA graph could not contain.

On a CPU, a recorded step is repeated by computing it again from its fixed inputs.
"""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
import torch

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.kernels.choice import KernelSelector, LoadedKernels
from dashinfer_vlm_core.kernels.cuda import CudaKernels
from dashinfer_vlm_core.kernels.streams import HostCopy
from dashinfer_vlm_core.kernels.torch_kernels import TorchKernels
from dashinfer_vlm_core.kernels.types import KVSpan
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from dashinfer_vlm_core.models.weights import Weights
from dashinfer_vlm_torch.decode_graphs import (
    DecodeGraphs,
    StepShape,
    record_graphs,
    step_shapes,
    unsupported_reason,
)
from dashinfer_vlm_torch.decoder import TorchDecoder
from dashinfer_vlm_torch.kv_cache import KVCache
from dashinfer_vlm_torch.model import TextModel
from dashinfer_vlm_torch.proposer import Draft
from dashinfer_vlm_torch.runner import ModelRunner
from dashinfer_vlm_torch.sampler import LaunchedArgmax, _choose
from dashinfer_vlm_torch.sequence import ScheduledChunk, SequenceState
from tests.recording import check_recordable, repeat

from .oracle import collect, decoding, ids, prompt, text, visual

KV_TOKENS = 300


class CudaFactory:
    """The kernels for CUDA on every device."""

    name = "cuda"
    priority = 1

    def applies(self, device, dtype):
        return True

    def unsupported_reason(self, text):
        return ""

    def load(self, device):
        return LoadedKernels(CudaKernels(device))

    def identity(self):
        return self.name


class CountingGraphs(DecodeGraphs):
    """Counts the steps that were replayed, and those that were not."""

    replayed = computed = 0

    def run(self, packed, spans, token_ids=None):
        x = super().run(packed, spans, token_ids)
        if x is None:
            self.computed += 1
        else:
            self.replayed += 1
        return x


class StaticDecoder(TorchDecoder):
    """Replays steps of these shapes on a CPU."""

    shapes = (StepShape(8, 1024), StepShape(4, 1024), StepShape(1, 1024), StepShape(8, 64), StepShape(4, 64))

    def _load(self):
        model = super()._load()._model
        cache = KVCache(self._text, self._kv_tokens + 1, device="cpu", dtype=self._cache_dtype)
        assert unsupported_reason(model, cache) == ""
        self.graphs = CountingGraphs(model, cache, repeat)
        for shape in self.shapes:
            self.graphs.record(shape)
        runner = ModelRunner(model, cache, self.graphs)
        runner.computes_in_background = self.schedules_ahead
        return runner


def static_decoder(oracle, *, schedules_ahead=False, **options):
    config = EngineConfig(**{"device": "cpu", "dtype": "float32", "kv_cache_mib": 64} | options)
    decoder = StaticDecoder(read_spec(oracle.folder), config, KernelSelector([CudaFactory()], config))
    decoder.schedules_ahead = schedules_ahead
    return decoder


def decode_all(decoder, requests):
    async def run():
        async with decoding(decoder):
            return await asyncio.gather(*(collect(decoder, request) for request in requests))

    return asyncio.run(run())


def requests(oracle):
    return [
        prompt(1, 20),
        text(7),
        visual(5, (1, 4, 6), 7, width=oracle.width),
        visual(4, (2, 3, 4), 8, width=oracle.width, content=4),
        prompt(2, 150),
        text(*[1, 2, 3, 4] * 12, ignore_eos=True, max_tokens=40),  # drafts
    ]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 32])
@pytest.mark.parametrize("ahead", [False, True])
def test_padded_steps_give_the_tokens_of_transformers(oracle, batch, ahead):
    decoder = static_decoder(oracle, max_batch_size=batch, prefill_chunk=40, schedules_ahead=ahead)
    found = decode_all(decoder, requests(oracle))
    assert [ids(tokens) for tokens in found[:-1]] == [oracle.greedy(request) for request in requests(oracle)[:-1]]
    plain = oracle.decoder()
    assert ids(found[-1]) == ids(decode_all(plain, requests(oracle)[-1:])[0])
    assert decoder.graphs.replayed > 0
    assert decoder.graphs.computed > 0  # more tokens than the largest shape


def test_sampled_tokens_and_logprobs_equal_those_without_padding(oracle):
    options = [{"temperature": 0.8, "seed": seed, "top_p": 0.9, "logprobs": 3} for seed in range(5)]
    batch = [prompt(seed, 5 + seed, **sampling) for seed, sampling in enumerate(options)]
    found, expected = (decode_all(decoder, batch) for decoder in (static_decoder(oracle), oracle.decoder()))
    for one, other in zip(found, expected, strict=True):
        assert ids(one) == ids(other)
        assert [token.logprob for token in one] == pytest.approx([token.logprob for token in other], abs=1e-4)


def test_cached_prefixes_are_those_of_other_steps(oracle):
    """Rows that were written by padded steps are read by others, and the other way round."""
    first = prompt(3, 60, max_tokens=30, ignore_eos=True)
    longer = text(*first.token_ids.tolist(), *ids(decode_all(oracle.decoder(), [first])[0]), 5, 6, 7)

    async def run(decoder):
        async with decoding(decoder):
            return [ids(await collect(decoder, request)) for request in (first, longer)]

    found, expected = (asyncio.run(run(decoder)) for decoder in (static_decoder(oracle), oracle.decoder()))
    assert found == expected


@pytest.fixture
def model(oracle):
    return load(oracle)


def load(oracle, device="cpu", kernels=CudaKernels, dtype=torch.float32):
    spec = read_spec(oracle.folder)
    with Weights(spec.folder, spec.tensor_renames) as weights:
        return TextModel(
            weights,
            spec.text,
            kernels(device),
            device=device,
            dtype=dtype,
            quantization=None,
        )


def sequence(request, first_row):
    state = SequenceState(request, ())
    state.first_row = first_row
    return state


class HiddenStates(ModelRunner):
    """Keeps the hidden states of the last step."""

    def _sample(self, x, batch):
        self.x = x.clone()
        ids = torch.zeros(len(x), dtype=torch.int64)
        return LaunchedArgmax(ids, HostCopy(ids))


def test_padding_changes_no_row_of_a_sequence(oracle, model):
    """Drafts, the end of a prompt, a single token; the cache is filled with numbers that show each row written."""
    one, two, three = (sequence(prompt(seed, 20), row) for seed, row in ((1, 0), (2, 40), (3, 80)))
    before = [ScheduledChunk(one, 0, 19), ScheduledChunk(two, 0, 16), ScheduledChunk(three, 0, 19)]
    step = [
        ScheduledChunk(one, 19, 20, Draft((4, 5, 6), 2)),  # two forced tokens, which need no logits
        ScheduledChunk(two, 16, 19),
        ScheduledChunk(three, 19, 20),
    ]
    caches, states = [], []
    for graphs in (True, False):
        cache = KVCache(model.config, KV_TOKENS + 1, device="cpu", dtype=torch.float32)
        cache.pool.fill_(7)
        steps = DecodeGraphs(model, cache, repeat)
        if graphs:
            steps.record(StepShape(16, 64))
        runner = HiddenStates(model, cache, steps)
        runner.step(before)
        runner.step(step)
        caches.append(cache.pool)
        states.append(runner.x)
    torch.testing.assert_close(*states, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(caches[0][:, :, :KV_TOKENS], caches[1][:, :, :KV_TOKENS], atol=1e-4, rtol=1e-4)
    untouched = torch.ones(KV_TOKENS + 1, dtype=torch.bool)
    untouched[[*range(23), *range(40, 59), *range(80, 100), KV_TOKENS]] = False
    assert (caches[0][:, :, untouched] == 7).all()
    assert (caches[1][:, :, KV_TOKENS] == 7).all()


def test_visual_tokens_are_not_replayed(oracle, model):
    cache = KVCache(model.config, KV_TOKENS + 1, device="cpu", dtype=torch.float32)
    graphs = CountingGraphs(model, cache, repeat)
    graphs.record(StepShape(32, 64))
    runner = HiddenStates(model, cache, graphs)
    state = sequence(visual(3, (1, 2, 3), 4, width=oracle.width), 0)
    for start, stop, replayed in ((0, 3, 1), (3, 5, 1), (5, 9, 1), (9, 13, 2)):
        runner.step([ScheduledChunk(state, start, stop)])
        assert graphs.replayed == replayed


def test_shapes_cover_batch_and_context():
    assert step_shapes(max_batch_size=4, max_model_len=500) == [StepShape(count, 500) for count in (32, 16, 8, 4, 2, 1)]
    shapes = step_shapes(max_batch_size=100, max_model_len=20_000)
    assert shapes[0] == StepShape(128, 20_000)
    assert {shape.keys for shape in shapes} == {1024, 4096, 16384, 20_000}
    assert shapes == sorted(shapes, reverse=True)
    assert step_shapes(max_batch_size=4096, max_model_len=1024)[0] == StepShape(256, 1024)


def test_smallest_sufficient_shape_is_used(model):
    cache = KVCache(model.config, KV_TOKENS + 1, device="cpu", dtype=torch.float32)
    used = []

    def record(work):
        result = work()
        return lambda: used.append(len(result)) or result

    graphs = DecodeGraphs(model, cache, record)
    for count, keys in ((8, 64), (2, 128), (2, 32)):
        graphs.record(StepShape(count, keys))
    for count, start in ((1, 0), (2, 60), (3, 60), (2, 127), (9, 0)):
        state = sequence(prompt(1, 200), 0)
        HiddenStates(model, cache, graphs).step([ScheduledChunk(state, start, start + count)])
    assert used == [2, 2, 8]


def test_models_without_graphs_are_named(oracle, model, caplog):
    cache = KVCache(model.config, 10, device="cpu", dtype=torch.float32)
    assert unsupported_reason(model, cache) == ""
    assert "'torch'" in unsupported_reason(load(oracle, kernels=TorchKernels), cache)
    int8 = KVCache(model.config, 10, device="cpu", dtype=torch.int8)
    with caplog.at_level(logging.INFO):
        assert record_graphs(model, int8, []) is None
    assert "no CUDA graphs for this model: the KV cache is converted" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_graphs_that_cannot_be_recorded_are_omitted(model, caplog):
    cache = KVCache(model.config, 10, device="cpu", dtype=torch.float32)
    assert record_graphs(model, cache, [StepShape(1, 8)]) is None
    assert "CUDA graphs could not be recorded" in caplog.text


# Steps never wait for the device. On the device `meta`, which has no values, reading one is an error.


class UnreadRunner(ModelRunner):
    """Samples the tokens of a step without the copy to the CPU."""

    def _sample(self, x, batch):
        rows = [row for rows in batch.rows for row in rows]
        ids, _ = _choose(self._model.logits(x), rows, {})
        assert ids.shape == (len(rows),)
        return LaunchedArgmax(ids, None)


SAMPLING = {
    "greedy": {},
    "everything": {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.01,
        "seed": 1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "no_repeat_ngram_size": 3,
        "logit_bias": {3: 1.0},
        "min_tokens": 4,
        "stop_token_ids": (4,),
    },
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_step_reads_nothing_from_the_device(oracle, sampling):
    model = load(oracle, "meta")
    cache = KVCache(model.config, KV_TOKENS, device="meta", dtype=torch.float32)
    runner = UnreadRunner(model, cache)
    states = [
        sequence(request, 40 * row)
        for row, request in enumerate(
            [prompt(1, 20, **sampling), prompt(2, 20), visual(3, (1, 2, 3), 4, width=oracle.width, **sampling)]
        )
    ]
    for batch in (states, states[:1]):
        runner.launch([ScheduledChunk(state, 0, state.length) for state in batch])
        step = runner.launch([ScheduledChunk(state, state.length - 1, state.length) for state in batch])
        ahead = [ScheduledChunk(state, state.length, state.length + 1) for state in batch[::-2]]
        runner.launch(ahead, step)


@torch.inference_mode()
def test_recorded_step_uses_only_memory_of_the_device(oracle):
    model = load(oracle, "meta")
    cache = KVCache(model.config, KV_TOKENS, device="meta", dtype=torch.float32)
    graphs = DecodeGraphs(model, cache, check_recordable)
    graphs.record(StepShape(4, 64))
    packed = np.zeros((5, 3), np.int64)
    assert graphs.run(packed, [KVSpan(0, 3, 0, 3, 0)]).shape == (3, model.config.hidden_size)
