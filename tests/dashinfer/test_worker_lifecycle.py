"""A decoder with its engine in another process: ends of streams, slots, worker failures, and cleanup."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from dashinfer_vlm_core.decoders.supervisor import POLL_SECONDS, Supervisor
from dashinfer_vlm_core.errors import (
    ContextLengthExceeded,
    DecoderFailed,
    EngineClosed,
    InvalidParameter,
    QueueFull,
    SetupError,
    UnsupportedParameter,
)
from dashinfer_vlm_dashinfer.process import WorkerProcess
from dashinfer_vlm_server import create_app
from tests.clock import run as run_skippable
from tests.clock import skippable_loop
from tests.conversations import as_openai, blurred_image, user
from tests.plugins.oracle import collect, ids, prompt, visual
from tests.waiting import HANG, until

from .conftest import decoding

pytestmark = pytest.mark.dashinfer

LONG = {"max_tokens": 3000, "ignore_eos": True}
"""Seconds of the engine's work with a context of `CONTEXT`, so that most of it remains even if a test is slow."""

CONTEXT = 4096


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def all_children():
    """Return the processes started by any thread of this process."""
    return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


@pytest.fixture
def children():
    """Return a function that lists the processes started since the test began."""
    others = all_children()
    return lambda: sorted(all_children() - others)


def shared_files():
    return set(Path("/dev/shm").iterdir())


def is_gone(pid):
    """Return whether the process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def start_readers(running, requests):
    """Return tasks that read the completions, after the first token; after a fixed time, all might be finished."""
    begun = asyncio.Event()

    async def read(request):
        async for _ in running.decode(request):
            begun.set()

    tasks = [asyncio.create_task(read(request)) for request in requests]
    await begun.wait()
    return tasks


def test_no_token_is_lost_at_end_of_stream(decoder):
    wanted = np.random.default_rng(0).integers(1, 40, 200).tolist()

    async def run():
        async with decoding(decoder(max_waiting=200)) as running:
            requests = [prompt(seed, 4, max_tokens=count, ignore_eos=True) for seed, count in enumerate(wanted)]
            return await asyncio.gather(*(collect(running, request) for request in requests))

    found = asyncio.run(run())
    assert [len(tokens) for tokens in found] == wanted
    assert all(tokens[-1].finish_reason == "length" for tokens in found)


@pytest.mark.supports("cancellation", backend="dashinfer-cpu")
def test_closing_stream_stops_it_and_frees_its_slot(decoder, oracle):
    """The worker is stopped while the reader leaves, so that most tokens remain even on a slow machine."""
    max_tokens = 3000

    async def run():
        running = decoder(max_batch_size=1, max_model_len=4096)
        counts, handle_frame = Counter(), running._handle_frame

        def count_tokens(frame):
            counts.update({number: len(tokens) for number, tokens, *_ in frame.get("of", ())})
            handle_frame(frame)

        running._handle_frame = count_tokens
        async with decoding(running):
            async with aclosing(running.decode(prompt(1, 10, max_tokens=max_tokens, ignore_eos=True))) as tokens:
                await anext(tokens)
                os.kill(running.pid, signal.SIGSTOP)
            os.kill(running.pid, signal.SIGCONT)
            return ids(await collect(running, prompt(2, 10, max_tokens=3))), counts[1]

    answer, generated = asyncio.run(run())
    assert 0 < generated < max_tokens
    assert answer == oracle.greedy(prompt(2, 10, max_tokens=3))


def test_canceling_readers_does_not_affect_others(decoder, oracle):
    async def run():
        async with decoding(decoder(max_batch_size=2, max_model_len=CONTEXT)) as running:
            tasks = await start_readers(running, [prompt(seed, 10, **LONG) for seed in range(6)])
            for task in tasks:
                task.cancel()
            answer = await collect(running, prompt(9, 10))
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            return ids(answer), ends

    answer, ends = asyncio.run(run())
    assert answer == oracle.greedy(prompt(9, 10))
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)


def test_200_requests_wait_for_4_slots(decoder, oracle):
    requests = [prompt(seed % 20, 6, max_tokens=5) for seed in range(200)]

    async def run():
        async with decoding(decoder(max_batch_size=4, max_waiting=196)) as running:
            tasks = [asyncio.create_task(collect(running, request)) for request in requests]
            await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                await collect(running, requests[0])
            return await asyncio.gather(*tasks)

    expected = [oracle.greedy(request) for request in requests[:20]]
    assert [ids(tokens) for tokens in asyncio.run(run())] == expected * 10


def test_close_ends_running_and_waiting_requests(decoder):
    async def run():
        running = decoder(max_batch_size=1, max_model_len=CONTEXT)
        await running.start()
        pid = running.pid
        tasks = await start_readers(running, [prompt(seed, 5, **LONG) for seed in range(3)])
        await running.close()
        await running.close()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(EngineClosed):
            await collect(running, prompt(1, 5))
        return ends, is_gone(pid)

    ends, gone = asyncio.run(run())
    assert all(isinstance(end, EngineClosed) for end in ends)
    assert gone


@pytest.mark.supports("sampling-ocr", backend="dashinfer-cpu", rejected=True)
def test_dangerous_requests_never_reach_the_engine(decoder, oracle):
    rejected = {
        "context": (prompt(1, 500, max_tokens=13), ContextLengthExceeded, "messages"),
        "pictures": (visual(2, (1, 2, 2), 3, width=oracle.width), UnsupportedParameter, "messages"),
        "presence": (prompt(1, 5, presence_penalty=1.0), UnsupportedParameter, "presence_penalty"),
        "frequency": (prompt(1, 5, frequency_penalty=1.0), UnsupportedParameter, "frequency_penalty"),
        "bias": (prompt(1, 5, logit_bias={1: 1.0}), UnsupportedParameter, "logit_bias"),
        "minimum": (prompt(1, 5, min_tokens=3), UnsupportedParameter, "min_tokens"),
        "min_p": (prompt(1, 5, min_p=0.1), UnsupportedParameter, "min_p"),
        "n-grams": (prompt(1, 5, no_repeat_ngram_size=3), UnsupportedParameter, "no_repeat_ngram_size"),
        "repetition": (prompt(1, 5, repetition_penalty=2.5), InvalidParameter, "repetition_penalty"),
        "alternatives": (prompt(1, 5, logprobs=11), InvalidParameter, "top_logprobs"),
        "stop token": (prompt(1, 5, stop_token_ids=(96,)), InvalidParameter, "stop_token_ids"),
        "penalized": (prompt(1, 5, logprobs=1, repetition_penalty=1.5), UnsupportedParameter, "logprobs"),
    }

    async def run():
        async with decoding(decoder()) as running:
            for name, (request, kind, param) in rejected.items():
                with pytest.raises(kind) as caught:
                    await collect(running, request)
                assert caught.value.param == param, name
            fits = await collect(running, prompt(1, 500, max_tokens=12, top_k=10**9, temperature=1.0, ignore_eos=True))
            return len(fits), running.fatal_error

    assert asyncio.run(run()) == (12, "")


def read_variables(pid):
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def test_worker_does_not_inherit_keys(decoder, monkeypatch):
    monkeypatch.setenv("DASHINFER_VLM_API_KEY", "sesame")
    monkeypatch.setenv("HF_TOKEN", "sesame")
    monkeypatch.setenv("BFC_MEM_RATIO", "0.7")

    async def run():
        async with decoding(decoder()) as running:
            return read_variables(running.pid)

    variables = asyncio.run(run())
    assert b"BFC_MEM_RATIO=0.7" in variables
    assert not [variable for variable in variables if b"sesame" in variable]


def test_killed_worker_fails_its_requests_and_is_replaced(decoder, oracle, children):
    """Six times with eight streams each; then no resources remain. A stream may have finished before."""
    expected = oracle.greedy(prompt(1, 10))

    async def streams(running):
        async def read(seed):
            count = 0
            async for _ in running.decode(prompt(seed, 5, **LONG)):
                count += 1
                begun.set()
            return count

        begun = asyncio.Event()
        tasks = [asyncio.create_task(read(seed)) for seed in range(8)]
        await begun.wait()
        os.kill(int(children()[0]), signal.SIGKILL)
        return await asyncio.gather(*tasks, return_exceptions=True)

    async def run():
        async with decoding(Supervisor(lambda: decoder(max_model_len=CONTEXT), restarts=6)) as running:
            ends = []
            for kill in range(6):
                ends += await streams(running)
                assert ids(await collect(running, prompt(1, 10))) == expected
                if kill == 0:
                    before = descriptors(), len(children())
                    shared = shared_files()
            return ends, running.restarted, shared, before, (descriptors(), len(children()))

    ends, restarts, shared, before, after = asyncio.run(run())
    assert restarts == 6
    failed = [end for end in ends if end != LONG["max_tokens"]]
    assert all(isinstance(end, DecoderFailed) and end.retryable for end in failed)
    assert len(failed) >= 6
    assert len(ends) == 48
    assert all(late <= early for early, late in zip(before, after, strict=True)), (before, after)
    until(lambda: shared_files() <= shared)  # those of other processes, such as browsers, are temporary
    assert not children()


@asynccontextmanager
async def passing_time(seconds):
    """Repeatedly move the clock forward by a number of seconds."""

    async def skip():
        while True:
            await skippable_loop().askip(seconds)
            await asyncio.sleep(0.01)

    passing = asyncio.create_task(skip())
    try:
        yield
    finally:
        passing.cancel()


def test_only_hanging_worker_is_replaced_not_idle_one(decoder, oracle, children, caplog):
    expected = oracle.greedy(prompt(1, 10))
    timeout = EngineConfig().limits.step_timeout

    async def run():
        first = decoder(max_model_len=CONTEXT)
        made = iter([first, decoder(max_model_len=CONTEXT)])
        async with decoding(Supervisor(lambda: next(made), restarts=1)) as running:
            assert ids(await collect(running, prompt(1, 10))) == expected
            while first._active:  # noqa: ASYNC110 - there is no event for a released request
                await asyncio.sleep(0.001)
            await skippable_loop().askip(10 * timeout)
            assert ids(await collect(running, prompt(1, 10))) == expected
            assert running.restarted == 0
            stream = running.decode(prompt(2, 5, **LONG))
            await anext(stream)
            os.kill(int(children()[0]), signal.SIGSTOP)
            # More than once, because data sent before the worker was stopped counts as a sign of life.
            async with passing_time(timeout):
                with pytest.raises(DecoderFailed, match="failed while the request ran") as failure:
                    async for _ in stream:
                        pass
            assert ids(await collect(running, prompt(1, 10))) == expected
            return failure.value, running.restarted

    failure, restarts = run_skippable(run())
    assert failure.retryable
    assert restarts == 1
    assert f"sent nothing for {timeout:g} seconds" in caplog.text
    assert not children()


def breakable_interpreter(environment, folder):
    """Return an interpreter that works until the file `broken` exists next to it."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n[ -e "{folder}/broken" ] && exit 7\nexec "{environment.python}" "$@"\n')
    python.chmod(0o755)
    return python


def test_worker_that_does_not_start_is_abandoned(environment, decoder, tmp_path, children):
    python = breakable_interpreter(environment, tmp_path)

    async def run():
        await (running := decoder(dashinfer_python=python)).start()
        await running.close()
        (tmp_path / "broken").touch()
        await decoder(dashinfer_python=python).start()

    with pytest.raises(SetupError, match=r"died during startup \(exit status 7"):
        asyncio.run(run())
    assert not children()


@pytest.fixture
def unlimited_restarts(monkeypatch):
    """Reset the restart count immediately, as after a long healthy run."""
    monkeypatch.setattr("dashinfer_vlm_core.decoders.supervisor.HEALTHY_SECONDS", 0.0)


@pytest.mark.supports("restart", backend="dashinfer-cpu")
@pytest.mark.usefixtures("unlimited_restarts")
def test_waiting_request_continues_in_next_worker(environment, decoder, oracle, tmp_path, children):
    """It fails if there is no next worker."""
    python = breakable_interpreter(environment, tmp_path)

    made = []

    def make():
        made.append(decoder(max_batch_size=1, max_model_len=CONTEXT, dashinfer_python=python))
        return made[-1]

    async def die_with_one_waiting(running):
        (reader,) = await start_readers(running, [prompt(2, 5, **LONG)])
        waiter = asyncio.create_task(collect(running, prompt(1, 10)))
        while not made[-1]._waiting:  # noqa: ASYNC110 - there is no event for a waiting request
            await asyncio.sleep(0)
        os.kill(int(children()[0]), signal.SIGKILL)
        return await asyncio.gather(reader, waiter, return_exceptions=True)

    async def run():
        async with decoding(Supervisor(make, restarts=2)) as running:
            replaced = await die_with_one_waiting(running)
            (tmp_path / "broken").touch()
            return replaced, await die_with_one_waiting(running)

    replaced, abandoned = asyncio.run(run())
    failed, answer = replaced
    assert isinstance(failed, DecoderFailed)
    assert ids(answer) == oracle.greedy(prompt(1, 10))
    assert "failed while the request ran" in abandoned[0].message
    assert "died during startup (exit status 7" in abandoned[1].message
    assert len(made) == 1 + 1 + 2
    assert not children()


def test_no_request_is_lost_while_dead_worker_exits_slowly(decoder, oracle, children, monkeypatch):
    """The supervisor closes the decoder: its running requests end, and requests that had not started continue."""
    close = WorkerProcess.close

    async def close_slowly(worker):
        await asyncio.sleep(5 * POLL_SECONDS)
        await close(worker)

    monkeypatch.setattr(WorkerProcess, "close", close_slowly)

    async def run():
        first, second = (decoder(max_batch_size=1, max_model_len=CONTEXT) for _ in range(2))
        made = iter([first, second])
        async with decoding(Supervisor(lambda: next(made), restarts=1)) as running:
            (reader,) = await start_readers(running, [prompt(2, 5, **LONG)])
            waiter = asyncio.create_task(collect(running, prompt(1, 10)))
            while not first._waiting:  # noqa: ASYNC110 - there is no event for a waiting request
                await asyncio.sleep(0)
            os.kill(int(children()[0]), signal.SIGKILL)
            return await asyncio.wait_for(asyncio.gather(reader, waiter, return_exceptions=True), HANG)

    failed, answer = asyncio.run(run())
    assert isinstance(failed, DecoderFailed)
    assert ids(answer) == oracle.greedy(prompt(1, 10))
    assert not children()


def test_health_reports_abandoned_worker(environment, chat_checkpoint, cache, tmp_path, children):
    python = breakable_interpreter(environment, tmp_path)
    config = EngineConfig(
        model=str(chat_checkpoint), decoder="dashinfer", device="cpu", cache_dir=cache, dashinfer_python=python
    )

    async def health(engine):
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/health/ready")

    with Engine(config) as engine:
        healthy = asyncio.run(health(engine))
        (tmp_path / "broken").touch()
        (worker,) = [pid for pid in children() if "worker.py\0serve" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(int(worker), signal.SIGKILL)  # the other process decodes media
        while engine.status().state == "ready":
            time.sleep(0.01)
        with pytest.raises(DecoderFailed, match="died during startup"):
            engine.chat({"messages": [user("Hello")]})
        unhealthy = asyncio.run(health(engine))
    assert (healthy.status_code, healthy.json()["decoder"], "CPU:0" in healthy.json()["decoder_reason"]) == (
        200,
        "dashinfer",
        True,
    )
    assert (unhealthy.status_code, unhealthy.json()["status"]) == (503, "failed")
    assert "exit status 7" in unhealthy.json()["fatal_error"]


@pytest.mark.supports("images", backend="dashinfer-cpu", rejected=True)
def test_image_is_rejected_with_its_path(chat_checkpoint, cache):
    config = EngineConfig(model=str(chat_checkpoint), decoder="dashinfer", device="cpu", cache_dir=cache)
    with Engine(config) as engine, pytest.raises(UnsupportedParameter, match="M-RoPE") as caught:
        engine.chat({"messages": as_openai([user("What is this?", blurred_image(1))])})
    assert caught.value.param == "messages[0].content[1]"


def test_stop_strings_and_closed_streams(chat_checkpoint, cache):
    config = EngineConfig(
        model=str(chat_checkpoint), decoder="dashinfer", device="cpu", cache_dir=cache, max_batch_size=1
    )
    body = {"messages": [user("Tell me.")], "temperature": 0, "max_tokens": 60}
    with Engine(config) as engine:
        text = engine.chat(body).choices[0].message.content
        stop = text[10:13]
        stopped = engine.chat({**body, "stop": [stop]}).choices[0]
        assert stopped.message.content == text[: text.index(stop)]
        assert stopped.finish_reason == "stop"
        stream = engine.stream({**body, "max_tokens": 1500, "ignore_eos": True})
        next(stream), next(stream)
        stream.close()
        assert engine.chat(body).choices[0].message.content == text


PARENT = """
import asyncio, sys
from pathlib import Path
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_dashinfer.decoder import DashInferDecoder
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec

async def main():
    config = EngineConfig(device="cpu", max_model_len=512, cache_dir=sys.argv[2])
    decoder = DashInferDecoder(read_spec(Path(sys.argv[1])), config)
    await decoder.start()
    print(decoder.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_worker_exits_with_its_parent(cache, oracle):
    command = [sys.executable, "-c", PARENT, str(oracle.folder), str(cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        parent.kill()
        while not is_gone(pid):
            time.sleep(0.01)
