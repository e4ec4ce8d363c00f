"""The decoder's callers: queueing, rejection, cancellation, errors, threads and event loops."""

from __future__ import annotations

import asyncio
import gc
import math
import shutil
import threading
import time
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
import torch

from dashinfer_vlm_core.concurrency.compute import CPU_EXECUTOR
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.decoders import DRAFT_MODEL, GUIDED_DECODING, LORA, POOLING, PREFIX_CACHE, SAMPLING_PARAMETERS
from dashinfer_vlm_core.decoders.interface import RequestNotStarted
from dashinfer_vlm_core.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthExceeded,
    DecoderFailed,
    EngineClosed,
    InvalidParameter,
    QueueFull,
)
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from dashinfer_vlm_torch import register_decoders
from dashinfer_vlm_torch.decoder import TorchDecoder
from dashinfer_vlm_torch.runner import ModelRunner
from dashinfer_vlm_torch.sequence import INITIAL_OUTPUT_ROWS
from dashinfer_vlm_torch.worker import Worker
from tests.decoder_pause import DecoderPause
from tests.kernels import selector
from tests.waiting import HANG, until

from .oracle import collect, decoding, ids, prompt, visual, with_embedding

LONG = {"max_tokens": 3000, "ignore_eos": True}
IDLE = {"running": 0, "waiting": 0, "kv_used": 0}


def load(decoder):
    """Return the number of running and waiting requests, and the used rows."""
    stats = decoder.snapshot()
    return {"running": stats.running, "waiting": stats.waiting, "kv_used": stats.kv_used}


async def wait_for_load(decoder, **state):
    """Wait until `load` includes `state`: the worker's thread may be ahead of this one, or behind."""
    await asyncio.to_thread(until, lambda: state.items() <= load(decoder).items())


async def cancel_all(tasks):
    """Cancel tasks and return their outcomes."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_closing_stream_frees_memory_immediately(oracle):
    async def run():
        async with decoding(oracle.decoder()) as decoder:
            pause = DecoderPause(decoder, steps=4)
            stays = asyncio.create_task(collect(decoder, prompt(1, 20, max_tokens=200, ignore_eos=True)))
            async with aclosing(decoder.decode(prompt(2, 30, **LONG))) as tokens:
                async for _ in tokens:
                    break
                await wait_for_load(decoder, running=2)
                held = load(decoder)
            after = load(decoder)
            pause.release()
            answer = await stays
            return held, after, ids(answer), load(decoder)

    held, after, answer, idle = asyncio.run(run())
    assert (held["running"], held["kv_used"] >= 20 + 30 + 2 * INITIAL_OUTPUT_ROWS) == (2, True)
    assert (after["running"], after["kv_used"] < held["kv_used"]) == (1, True)
    expected = oracle.greedy(prompt(1, 20))
    assert answer[: len(expected)] == expected
    assert idle == IDLE


@pytest.mark.supports("cancellation", backend="torch-cpu")
def test_canceling_reader_task_frees_memory(oracle):
    """For a running, a waiting, and a prefilling request."""

    async def run():
        async with decoding(oracle.decoder(max_batch_size=2, prefill_chunk=1)) as decoder:
            pause = DecoderPause(decoder, steps=8)
            requests = [prompt(1, 3, **LONG), prompt(2, 300, **LONG), prompt(3, 3, **LONG)]
            tasks = [asyncio.create_task(collect(decoder, request)) for request in requests]
            await wait_for_load(decoder, running=2, waiting=1)
            ends, after = await cancel_all(tasks), load(decoder)
            pause.release()
            return ends, after

    ends, after = asyncio.run(run())
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    assert after == IDLE


@pytest.mark.slow
def test_requests_wait_for_memory_and_all_complete(oracle):
    """2048 tokens fit; each request grows to 620."""
    requests = [prompt(seed, 20, max_tokens=600, ignore_eos=True) for seed in range(4)]

    async def run():
        async with decoding(oracle.decoder(kv_cache_mib=1)) as decoder:
            tasks = [asyncio.create_task(collect(decoder, request)) for request in requests]
            return await asyncio.gather(*tasks), load(decoder), decoder.snapshot().preemptions

    answers, idle, preemptions = asyncio.run(run())
    assert [len(tokens) for tokens in answers] == [600] * 4
    assert preemptions > 0
    assert idle == IDLE


def test_full_queue_rejects(oracle):
    async def run():
        async with decoding(oracle.decoder(max_batch_size=1, max_waiting=1)) as decoder:
            pause = DecoderPause(decoder, steps=4)
            tasks = [asyncio.create_task(collect(decoder, prompt(seed, 5, **LONG))) for seed in range(2)]
            await wait_for_load(decoder, running=1, waiting=1)
            with pytest.raises(QueueFull, match="1 requests are already waiting"):
                await collect(decoder, prompt(3, 5))
            await cancel_all(tasks)
            pause.release()
            return await collect(decoder, prompt(3, 5))

    assert ids(asyncio.run(run())) == oracle.greedy(prompt(3, 5))


def test_request_larger_than_memory_is_rejected_with_counts(oracle):
    async def run():
        async with decoding(oracle.decoder(kv_cache_mib=1)) as decoder:
            assert decoder.max_model_len == 2048
            with pytest.raises(
                ContextLengthExceeded, match=r"30 tokens .* 2019 tokens exceed the limit of 2048"
            ) as refusal:
                await collect(decoder, prompt(1, 30, max_tokens=2019))
            await collect(decoder, prompt(1, 30, max_tokens=2018, stop_token_ids=tuple(range(96))))
            return refusal.value

    error = asyncio.run(run())
    assert (error.prompt_tokens, error.limit, error.param) == (30, 2048, "messages")


def test_context_is_smallest_of_three_limits(oracle):
    assert oracle.decoder().max_model_len == 4096
    assert oracle.decoder(max_model_len=100).max_model_len == 100
    assert oracle.decoder(max_model_len=9000).max_model_len == 4096
    assert oracle.decoder(kv_cache_mib=1).max_model_len == 2048


def test_default_kv_cache_that_is_limited_is_logged(oracle, tmp_path, caplog):
    """A sparse file of 4 TB stands for weights that need all memory."""
    shutil.copytree(oracle.folder, tmp_path, dirs_exist_ok=True)
    with (tmp_path / "sparse.safetensors").open("wb") as file:
        file.truncate(1 << 42)
    config = EngineConfig(device="cpu", dtype="float32")
    decoder = TorchDecoder(read_spec(tmp_path), config, selector(config))
    assert decoder.max_model_len == 4096
    assert "KV cache of 256 MiB instead of 4096: the memory has" in caplog.text


def test_close_ends_running_and_waiting_requests(oracle):
    async def run():
        decoder = oracle.decoder(max_batch_size=1)
        await decoder.start()
        pause, worker = DecoderPause(decoder, steps=4), decoder._worker
        tasks = [asyncio.create_task(collect(decoder, prompt(seed, 5, **LONG))) for seed in range(3)]
        await wait_for_load(decoder, running=1, waiting=2)
        closing = asyncio.create_task(decoder.close())
        await asyncio.to_thread(until, lambda: worker._end_error)
        pause.release()
        await closing
        await decoder.close()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(EngineClosed):
            await collect(decoder, prompt(1, 5))
        await decoder.start()
        again = await collect(decoder, prompt(1, 5))
        await decoder.close()
        return ends, again

    ends, again = asyncio.run(run())
    assert all(isinstance(end, EngineClosed) for end in ends)
    assert ids(again) == oracle.greedy(prompt(1, 5))


def test_stop_waits_for_a_step_until_it_counts_as_hung(oracle):
    """Without one, it may wait for a step of another model."""
    decoder, waits = oracle.decoder(), []
    asyncio.run(decoder.start())
    worker = decoder._worker
    join = worker._thread.join
    worker._thread.join = lambda timeout: waits.append(timeout) or join()
    for seconds in (-math.inf, 12, 700):
        worker._step_started = time.monotonic() - seconds
        worker.stop()
    idle, slow, hung = waits
    assert (idle, hung) == (pytest.approx(600), 0)
    assert 588 - HANG < slow < 589
    asyncio.run(decoder.close())


def test_decoder_that_was_not_started_reports_it(oracle):
    with pytest.raises(EngineClosed, match="Start the engine"):
        asyncio.run(collect(oracle.decoder(), prompt(1, 5)))


def malformed(width):
    """Return requests that violate an invariant of DecodeRequest."""
    good = visual(3, (1, 2, 3), 4, width=width)
    return {
        "span beyond the prompt": replace(good, spans=(replace(good.spans[0], start=8),)),
        "span before the prompt": replace(good, spans=(replace(good.spans[0], start=-1),)),
        "more rows than places": with_embedding(good, torch.zeros(11, width)),
        "too narrow": with_embedding(good, torch.zeros(6, width - 1)),
        "not a matrix": with_embedding(good, torch.zeros(6)),
        "spans on top of each other": replace(good, spans=good.spans * 2),
        "no tokens": replace(good, token_ids=np.empty(0, np.int64), positions=np.empty((3, 0), np.int64), spans=()),
        "unknown token": replace(good, token_ids=good.token_ids + 10),
        "positions of another length": replace(good, positions=good.positions[:, 1:]),
        "no end": replace(good, sampling=replace(good.sampling, max_tokens=None)),
    }


def test_malformed_requests_do_not_affect_others(oracle):
    requests = malformed(oracle.width)

    async def run():
        async with decoding(oracle.decoder()) as decoder:
            neighbor = asyncio.create_task(collect(decoder, prompt(1, 20)))
            ends = await asyncio.gather(*(collect(decoder, bad) for bad in requests.values()), return_exceptions=True)
            return ends, await neighbor, load(decoder)

    ends, neighbor, idle = asyncio.run(run())
    assert {name: type(end) for name, end in zip(requests, ends, strict=True)} == dict.fromkeys(requests, DecoderFailed)
    assert ids(neighbor) == oracle.greedy(prompt(1, 20))
    assert idle == IDLE


@pytest.mark.parametrize(
    "embedding",
    [
        pytest.param(lambda rows: rows.to("meta"), id="step raises"),
        pytest.param(lambda rows: rows * float("nan"), id="NaN"),
    ],
)
def test_request_that_fails_its_step_fails_alone(oracle, embedding):
    """Other requests in prefill and decode are retried without it, and their completions are unchanged."""
    good = visual(3, (1, 2, 3), 4, width=oracle.width)
    bad = with_embedding(good, embedding(good.spans[0].tokens.embedding), digest=b"bad ".ljust(32))
    seeded = prompt(5, 9, temperature=1.0, seed=7, ignore_eos=True)

    async def run():
        async with decoding(oracle.decoder(prefill_chunk=20)) as decoder:
            alone = await collect(decoder, seeded)
            pause = DecoderPause(decoder, steps=2)  # then some are in prefill and some in decode
            neighbors = [asyncio.create_task(collect(decoder, one)) for one in (prompt(1, 20), seeded, good)]
            await wait_for_load(decoder, running=3)
            joining = asyncio.create_task(collect(decoder, bad))
            await asyncio.to_thread(until, lambda: decoder.snapshot().running + decoder.snapshot().waiting == 4)
            pause.release()
            with pytest.raises(DecoderFailed):
                await joining
            return ids(alone), [ids(tokens) for tokens in await asyncio.gather(*neighbors)], load(decoder)

    alone, neighbors, idle = asyncio.run(run())
    assert neighbors == [oracle.greedy(prompt(1, 20)), alone, oracle.greedy(good)]
    assert idle == IDLE


class LostDevice(ModelRunner):
    """A runner whose calls all fail, as after an illegal memory access in a CUDA context."""

    def launch(self, chunks, previous=None):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def check_device(self):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_lost_device_ends_decoder(oracle):
    """Failing each request separately would never end; an ended decoder is replaced or reported."""
    decoder = oracle.decoder()
    runner = decoder._load()
    lost = LostDevice(runner._model, runner._cache)

    async def run():
        decoder._worker = Worker(lost, decoder._scheduler(), asyncio.get_running_loop(), step_timeout=600)
        requests = [prompt(seed, 5) for seed in range(3)]
        ends = await asyncio.gather(*(collect(decoder, one) for one in requests), return_exceptions=True)
        fatal_error = decoder.fatal_error
        await decoder.close()
        return ends, fatal_error

    ends, fatal_error = asyncio.run(run())
    assert isinstance(ends[0], DecoderFailed)
    assert {type(end) for end in ends} <= {DecoderFailed, RequestNotStarted}  # which ones were started may vary
    assert fatal_error == "The decoder has stopped. Start the engine again."


def test_closed_event_loop_frees_its_requests(oracle):
    decoder = oracle.decoder()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(decoder.start())
    tokens = decoder.decode(prompt(1, 5, max_tokens=3000, ignore_eos=True))
    pause = DecoderPause(decoder, steps=2)
    loop.run_until_complete(anext(tokens))
    loop.close()
    pause.release()
    until(lambda: load(decoder) == IDLE)
    asyncio.run(decoder.close())
    del tokens
    gc.collect()


def test_token_is_delivered_while_the_next_step_computes(oracle):
    read, received_in_time = threading.Semaphore(0), []

    async def run():
        async with decoding(oracle.decoder()) as decoder:
            layers = decoder._runner._model._layers

            def wait_for_reader(x, batch):
                if len(batch.slots) == 1:  # not the prompt
                    received_in_time.append(read.acquire(timeout=HANG))
                return layers(x, batch)

            decoder._runner._model._layers = wait_for_reader
            async for _ in decoder.decode(prompt(1, 5, max_tokens=4, ignore_eos=True)):
                read.release()

    asyncio.run(run())
    assert received_in_time == [True] * 3


def test_waiting_work_runs_between_steps(oracle):
    async def run():
        async with decoding(oracle.decoder()) as decoder, aclosing(decoder.decode(prompt(1, 5, **LONG))) as tokens:
            await anext(tokens)
            return await asyncio.to_thread(CPU_EXECUTOR.run, lambda: decoder.snapshot().running)

    assert asyncio.run(run()) == 1


def test_worker_thread_is_named_idle_and_ends_at_close(oracle):
    def worker_threads():
        return [thread for thread in threading.enumerate() if thread.name == "dashinfer-vlm-torch-decoder"]

    others = worker_threads()  # ignore threads of engines that other tests share
    decoder = oracle.decoder()
    asyncio.run(decoder.start())
    (thread,) = set(worker_threads()) - set(others)
    assert thread.daemon
    asyncio.run(decoder.close())
    assert thread not in worker_threads()


def test_plugin_registers_decoder(oracle):
    factories = []
    register_decoders(factories.append)
    (factory,) = factories
    spec, config = read_spec(oracle.folder), EngineConfig(device="cpu")
    decoder = factory.create(spec, config, selector(config))
    assert (factory.name, decoder.name, decoder.supported_params) == (
        "torch",
        "torch",
        SAMPLING_PARAMETERS | {DRAFT_MODEL, GUIDED_DECODING, LORA, POOLING, PREFIX_CACHE},
    )
    assert factory.check_support(spec, config).score > 0


def test_setup_errors_are_named(oracle, tmp_path):
    spec = read_spec(oracle.folder)
    with pytest.raises(ConfigError, match="device"):
        oracle.decoder(device="nowhere")
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((oracle.folder / name).read_bytes())
    (factory,) = (found := [], register_decoders(found.append))[0]
    config = EngineConfig(device="cpu")
    decoder = factory.create(replace(spec, folder=tmp_path), config, selector(config))
    with pytest.raises(CheckpointError, match="safetensors"):
        asyncio.run(decoder.start())


@pytest.mark.parametrize("options", [{"logit_bias": {96: 1.0}}, {"logit_bias": {-1: 1.0}}, {"stop_token_ids": (96,)}])
def test_invalid_token_ids_are_rejected_by_name(oracle, options):
    async def run():
        async with decoding(oracle.decoder()) as decoder:
            await collect(decoder, prompt(1, 5, **options))

    with pytest.raises(InvalidParameter, match="must be 0 to 95") as refusal:
        asyncio.run(run())
    assert [refusal.value.param] == list(options)
