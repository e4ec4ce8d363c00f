"""The PyTorch decoder and the vision encoder on CUDA = transformers and the CPU; skipped without a GPU."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.kernels.cuda import CudaKernels, compute_capability
from dashinfer_vlm_core.kernels.experts import GroupedExperts
from dashinfer_vlm_core.kernels.graphs import CudaGraphRecorder
from dashinfer_vlm_core.kernels.streams import HIGH_PRIORITY, LOW_PRIORITY, stream_executor, to_device
from dashinfer_vlm_core.kernels.torch_kernels import TorchKernels
from dashinfer_vlm_core.kernels.types import KVSpans
from dashinfer_vlm_core.models.qwen2_vl import Qwen2VL
from dashinfer_vlm_torch.decode_graphs import DecodeGraphs, StepShape
from dashinfer_vlm_torch.kv_cache import KVCache
from dashinfer_vlm_torch.proposer import Draft
from dashinfer_vlm_torch.runner import ModelRunner
from dashinfer_vlm_torch.sampler import _choose
from dashinfer_vlm_torch.sequence import LogitsRow, ScheduledChunk
from tests.core.test_cuda_kernels import FRAMES, MIXED, SHAPES, SINGLE, inputs
from tests.kernels import selector
from tests.patches import random_patches
from tests.plugins.oracle import collect, decoding, ids, prompt, text, visual
from tests.plugins.test_torch_async_scheduling import Ahead
from tests.plugins.test_torch_decode_graphs import SAMPLING, HiddenStates, load, sequence

BATCHES = {"single": SINGLE, "mixed": MIXED, "frames": FRAMES}
SPANS = pytest.mark.parametrize("spans", BATCHES.values(), ids=BATCHES)
GRIDS = [(2, 4, 4), (1, 8, 6), (3, 4, 4), (1, 4, 4), (5, 2, 2)]


@contextmanager
def no_synchronization():
    """Raise an error where torch waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def difference(found, expected):
    """The largest difference relative to the largest value."""
    return float((found.float().cpu() - expected.float().cpu()).abs().max() / expected.float().abs().max())


@pytest.fixture
def oracle(oracles):
    return oracles("gqa-tied")


@SPANS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_equals_cpu(dtype, shape, spans):
    q, k, v = inputs(spans, *shape)
    expected = TorchKernels("cpu").attend(q, k, v, KVSpans(spans))
    found = CudaKernels("cuda").attend(*(part.to("cuda", dtype) for part in (q, k, v)), KVSpans(spans, device="cuda"))
    assert difference(found, expected) < {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]


@pytest.mark.skipif(
    not torch.cuda.is_available() or compute_capability("cuda") < (8, 0), reason="the GPU has no FlashAttention"
)
@SPANS
def test_attention_does_not_wait(spans):
    q, k, v = (part.to("cuda", torch.bfloat16) for part in inputs(spans, 4, 2, 16))
    kernels = CudaKernels("cuda")
    with no_synchronization():
        kernels.attend(q, k, v, KVSpans(spans, device="cuda"))


def requests(oracle):
    return [
        prompt(1, 20),
        text(7),
        visual(5, (1, 4, 6), 7, width=oracle.width),
        visual(4, (6, 3, 4), 8, width=oracle.width, content=4),
        prompt(2, 150),
    ]


def decode_all(decoder, batch):
    async def run():
        async with decoding(decoder):
            return [ids(tokens) for tokens in await asyncio.gather(*(collect(decoder, each) for each in batch))]

    return asyncio.run(run())


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("batch", [1, 3, 32])
def test_tokens_equal_transformers(oracle, batch, cuda_graphs):
    decoder = oracle.decoder(device="cuda", max_batch_size=batch, prefill_chunk=40, cuda_graphs=cuda_graphs)
    assert decode_all(decoder, requests(oracle)) == [oracle.greedy(request) for request in requests(oracle)]


def test_sampled_tokens_equal_cpu(oracle):
    batch = [prompt(seed, 12, **options) for seed, options in enumerate(SAMPLING.values())]
    batch += [prompt(9, 12, temperature=1.0, seed=3, top_p=0.8), prompt(8, 12, temperature=0.7, seed=4, top_k=9)]
    assert decode_all(oracle.decoder(device="cuda"), batch) == decode_all(oracle.decoder(), batch)


def test_graphs_are_recorded(oracle):
    decoder = oracle.decoder(device="cuda", dtype="bfloat16", max_batch_size=4)
    runner = decoder._load()
    assert runner._graphs is not None
    assert len(runner._graphs) >= 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_steps_equal_computed_ones(oracle, dtype):
    model = load(oracle, "cuda", dtype=dtype)
    states = []
    for shapes in ((StepShape(16, 64), StepShape(4, 64)), ()):
        cache = KVCache(model.config, 301, device="cuda", dtype=dtype)
        graphs = DecodeGraphs(model, cache, CudaGraphRecorder())
        for shape in shapes:
            model.executor.run(lambda graphs=graphs, shape=shape: graphs.record(shape))
        runner = HiddenStates(model, cache, graphs)
        one, two = (sequence(prompt(seed, 20), row) for seed, row in ((1, 0), (2, 40)))
        steps = [
            [ScheduledChunk(one, 0, 19), ScheduledChunk(two, 0, 18)],
            [ScheduledChunk(one, 19, 20, Draft((4, 5, 6))), ScheduledChunk(two, 18, 20)],
            [ScheduledChunk(one, 19, 20), ScheduledChunk(two, 19, 20)],
        ]
        for step in steps:
            runner.executor.run(lambda runner=runner, step=step: runner.step(step))
        states.append(runner.x)
    assert difference(*states) < {torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]


@torch.inference_mode()
def test_step_ahead_does_not_wait_and_has_the_same_tokens(oracle):
    model = load(oracle, "cuda")
    found = []
    for is_ahead in (False, True):
        cache = KVCache(model.config, 301, device="cuda", dtype=torch.float32)
        graphs = DecodeGraphs(model, cache, CudaGraphRecorder())
        model.executor.run(lambda graphs=graphs: graphs.record(StepShape(4, 64)))
        runner = ModelRunner(model, cache, graphs)
        states = [sequence(prompt(seed, 20, temperature=0.9, seed=seed), 40 * seed) for seed in range(3)]

        def append(outcomes):
            for state, (token,) in outcomes.items():
                state.append(token.id)

        def steps(*, is_ahead=is_ahead, runner=runner, states=states, append=append):
            append(runner.step([ScheduledChunk(state, 0, 20) for state in states]))
            step = runner.launch([ScheduledChunk(state, 20, 21) for state in states])
            for length in range(21, 30):
                ahead = [ScheduledChunk(state, length, length + 1) for state in states]
                if not is_ahead:
                    append(runner.read(step))
                    step = runner.launch(ahead)
                    continue
                with no_synchronization():
                    following = runner.launch(ahead, step)
                append(runner.read(step))
                step = following
            append(runner.read(step))

        runner.executor.run(steps)
        found.append([state.output_ids for state in states])
    assert found[0] == found[1]
    assert {len(output) for output in found[0]} == {11}


def test_asynchronous_scheduling_changes_no_token(oracle):
    batch, options = requests(oracle), {"device": "cuda", "speculative_method": "none"}
    found, counts = [], []
    for schedules_ahead in (None, False):
        decoder = oracle.decoder(schedules_ahead=schedules_ahead, **options)

        async def run(decoder=decoder):
            async with decoding(decoder):
                ahead = Ahead(decoder._worker._runner)
                tokens = await asyncio.gather(*(collect(decoder, request) for request in batch))
                counts.append(ahead.count)
                return list(map(ids, tokens))

        found.append(asyncio.run(run()))
    assert found[0] == found[1]
    assert counts[0] > 20
    assert counts[1] == 0


@torch.inference_mode()
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_sampling_does_not_wait(sampling):
    rows = [LogitsRow(sequence(prompt(seed, 12, **sampling), 0)) for seed in range(3)]
    logits = torch.randn(3, 96, device="cuda")
    _choose(logits, rows, {})  # allocates page-locked memory
    with no_synchronization():
        _choose(logits, rows, {})


def encoder(folder, device, dtype="float32", **options):
    family, config = Qwen2VL(), EngineConfig(device=device, dtype=dtype, **options)
    return family.load_vision_encoder(family.load_spec(folder), config, selector(config))


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_visual_tokens_equal_cpu(tiny_checkpoint, dtype, bound):
    batch = [random_patches(*grid, seed=number) for number, grid in enumerate(GRIDS)]
    found, expected = (
        encoder(tiny_checkpoint, *where).encode(batch) for where in (("cuda", dtype), ("cpu", "float32"))
    )
    for one, other in zip(found, expected, strict=True):
        assert difference(one, other) < bound


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_recorded_passes_equal_computed_ones(tiny_checkpoint, dtype, bound):
    recording, plain = (encoder(tiny_checkpoint, "cuda", dtype, cuda_graphs=graphs) for graphs in (True, False))
    for seed in range(5):
        batch = [random_patches(*grid, seed=seed) for grid in GRIDS]
        for one, other in zip(recording.encode(batch), plain.encode(batch), strict=True):
            assert difference(one, other) < bound
    assert len(recording._graphs) == 1
    assert plain._graphs is None


def test_encoder_and_decoder_run_at_the_same_time(oracle, tiny_checkpoint):
    tower = encoder(tiny_checkpoint, "cuda")
    batch = [random_patches(*grid, seed=number) for number, grid in enumerate(GRIDS)]
    expected = torch.cat(tower.encode(batch))
    stop, differences = threading.Event(), []

    def encode():
        while not stop.is_set():
            differences.append(difference(torch.cat(tower.encode(batch)), expected))

    thread = threading.Thread(target=encode)
    thread.start()
    try:
        found = decode_all(oracle.decoder(device="cuda"), requests(oracle))
    finally:
        stop.set()
        thread.join()
    assert found == [oracle.greedy(request) for request in requests(oracle)]
    assert max(differences) < 1e-4


def test_streams_differ_and_results_are_complete():
    executors = [stream_executor("cuda", priority=priority) for priority in (HIGH_PRIORITY, LOW_PRIORITY)]
    streams = {executor.run(torch.cuda.current_stream) for executor in executors}
    assert len(streams) == 2
    assert torch.cuda.default_stream() not in streams
    weights = torch.randn(2048, 2048, device="cuda")  # on the default stream, which work waits for
    for executor in executors:
        product = executor.run(lambda: weights @ weights)

        torch.testing.assert_close(product, weights @ weights)


def test_copies_to_the_device_do_not_wait():
    to_device(torch.zeros(3), "cuda")  # allocates page-locked memory
    with no_synchronization():
        copied = to_device(torch.arange(3), "cuda")
    assert copied.tolist() == [0, 1, 2]


@pytest.mark.skipif(
    "not torch.cuda.is_available() or not CudaKernels('cuda').groups_experts(torch.bfloat16, [64])",
    reason="torch has no kernel for it",
)
def test_grouped_experts_equal_cpu_and_do_not_wait():
    x, router, gate_up, down = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(number)) / 8
        for number, shape in enumerate([(40, 64), (7, 64), (7, 96, 64), (7, 64, 48)])
    )
    totals = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        weights = [part.bfloat16().to(device, dtype) for part in (x, router, gate_up, down)]
        head = TorchKernels(device).linear(weights[1], fp32_output=True)
        experts, total = GroupedExperts(head, *weights[2:], 3), torch.zeros_like(weights[0])
        experts.add_to(total.clone(), weights[0])
        with no_synchronization() if device == "cuda" else nullcontext():
            experts.add_to(total, weights[0])
        totals.append(total)
    expected, found = (total.float().cpu() for total in totals)
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)  # a row may get another expert by rounding
    assert errors.median() < 0.03
