"""A decoder whose engine lives in another process: ends of streams, places, deaths, and what is left behind."""

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
from dashinfer_vlm_core.decoders.dashinfer.process import WorkerProcess
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
from dashinfer_vlm_server import create_app
from tests.conversations import as_openai, blurred_image, user
from tests.plugins.oracle import collect, ids, prompt, visual
from tests.waiting import HANG

from .conftest import decoding

pytestmark = pytest.mark.dashinfer

LONG = {"max_tokens": 3000, "ignore_eos": True}
"""Seconds of the engine's work, in a context of `ROOM`: however late a test goes on, most of it is to come."""

ROOM = 4096


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def all_children():
    """Processes that any thread of ours started."""
    return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


@pytest.fixture
def children():
    """Lists the processes that were started since the test began."""
    others = all_children()
    return lambda: sorted(all_children() - others)


def shared_files():
    return sorted(Path("/dev/shm").iterdir())


def is_gone(pid):
    """Whether the process has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def reading(running, requests):
    """Tasks that read the answers, once the first token is there: in any fixed time, all may be done already."""
    begun = asyncio.Event()

    async def read(request):
        async for _ in running.decode(request):
            begun.set()

    tasks = [asyncio.create_task(read(request)) for request in requests]
    await begun.wait()
    return tasks


def test_no_token_is_lost_at_the_end_of_a_stream(decoder):
    wanted = np.random.default_rng(0).integers(1, 40, 200).tolist()

    async def run():
        async with decoding(decoder(max_waiting=200)) as running:
            requests = [prompt(seed, 4, max_tokens=count, ignore_eos=True) for seed, count in enumerate(wanted)]
            return await asyncio.gather(*(collect(running, request) for request in requests))

    found = asyncio.run(run())
    assert [len(tokens) for tokens in found] == wanted
    assert all(tokens[-1].finish_reason == "length" for tokens in found)


def test_leaving_a_stream_stops_it_and_frees_its_place(decoder, oracle):
    """The worker is halted while the reader leaves: however slow this machine is, the engine has most of it to go."""
    max_tokens = 3000

    async def run():
        running = decoder(max_batch_size=1, max_model_len=4096)
        counts, book = Counter(), running._handle_frame

        def count_tokens(frame):
            counts.update({number: len(tokens) for number, tokens, *_ in frame.get("of", ())})
            book(frame)

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


def test_cancelling_readers_that_run_and_wait_leaves_the_others_alone(decoder, oracle):
    async def run():
        async with decoding(decoder(max_batch_size=2, max_model_len=ROOM)) as running:
            tasks = await reading(running, [prompt(seed, 10, **LONG) for seed in range(6)])
            for task in tasks:
                task.cancel()
            answer = await collect(running, prompt(9, 10))
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            return ids(answer), ends

    answer, ends = asyncio.run(run())
    assert answer == oracle.greedy(prompt(9, 10))
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)


def test_two_hundred_wait_for_four_places(decoder, oracle):
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


def test_closing_ends_what_runs_and_waits(decoder):
    async def run():
        running = decoder(max_batch_size=1, max_model_len=ROOM)
        await running.start()
        pid = running.pid
        tasks = await reading(running, [prompt(seed, 5, **LONG) for seed in range(3)])
        await running.close()
        await running.close()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(EngineClosed):
            await collect(running, prompt(1, 5))
        return ends, is_gone(pid)

    ends, gone = asyncio.run(run())
    assert all(isinstance(end, EngineClosed) for end in ends)
    assert gone


def test_what_the_engine_might_not_survive_never_reaches_it(decoder, oracle):
    refused = {
        "context": (prompt(1, 500, max_tokens=13), ContextLengthExceeded, "messages"),
        "pictures": (visual(2, (1, 2, 2), 3, width=oracle.width), UnsupportedParameter, "messages"),
        "presence": (prompt(1, 5, presence_penalty=1.0), UnsupportedParameter, "presence_penalty"),
        "frequency": (prompt(1, 5, frequency_penalty=1.0), UnsupportedParameter, "frequency_penalty"),
        "bias": (prompt(1, 5, logit_bias={1: 1.0}), UnsupportedParameter, "logit_bias"),
        "minimum": (prompt(1, 5, min_tokens=3), UnsupportedParameter, "min_tokens"),
        "repetition": (prompt(1, 5, repetition_penalty=2.5), InvalidParameter, "repetition_penalty"),
        "alternatives": (prompt(1, 5, logprobs=11), InvalidParameter, "top_logprobs"),
        "penalised": (prompt(1, 5, logprobs=1, repetition_penalty=1.5), UnsupportedParameter, "logprobs"),
        "stop token": (prompt(1, 5, stop_token_ids=(96,)), InvalidParameter, "stop_token_ids"),
    }

    async def run():
        async with decoding(decoder()) as running:
            for name, (request, kind, param) in refused.items():
                with pytest.raises(kind) as refusal:
                    await collect(running, request)
                assert refusal.value.param == param, name
            fits = await collect(running, prompt(1, 500, max_tokens=12, top_k=10**9, temperature=1.0, ignore_eos=True))
            return len(fits), running.fatal_error

    assert asyncio.run(run()) == (12, "")


def test_a_killed_worker_fails_its_own_requests_and_is_replaced(decoder, oracle, children):
    """Six times, with eight streams each; then nothing is left of any of them. One may have come to its end before."""
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
        async with decoding(Supervisor(lambda: decoder(max_model_len=ROOM), restarts=6)) as running:
            ends = []
            for kill in range(6):
                ends += await streams(running)
                assert ids(await collect(running, prompt(1, 10))) == expected
                if kill == 0:
                    before = descriptors(), len(children()), shared_files()
            return ends, running.restarted, before, (descriptors(), len(children()), shared_files())

    ends, restarts, before, after = asyncio.run(run())
    assert restarts == 6
    failed = [end for end in ends if end != LONG["max_tokens"]]
    assert all(isinstance(end, DecoderFailed) and end.retryable for end in failed)
    assert len(failed) >= 6
    assert len(ends) == 48
    assert before == after
    assert not children()


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be put forward, so that a test of a timeout neither waits nor races."""

    skipped = 0.0

    def time(self):
        return super().time() + self.skipped


def run_skipping(main):
    """Run a coroutine on such a loop."""
    loop = SkippingLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


@asynccontextmanager
async def passing_time(seconds):
    """Put the clock forward by so many seconds, again and again."""

    async def skip():
        while True:
            asyncio.get_running_loop().skipped += seconds
            await asyncio.sleep(0.01)

    passing = asyncio.create_task(skip())
    try:
        yield
    finally:
        passing.cancel()


def test_a_worker_that_hangs_is_replaced_and_one_that_idles_is_not(decoder, oracle, children, caplog):
    expected = oracle.greedy(prompt(1, 10))
    timeout = EngineConfig().step_timeout

    async def run():
        first = decoder(max_model_len=ROOM)
        made = iter([first, decoder(max_model_len=ROOM)])
        async with decoding(Supervisor(lambda: next(made), restarts=1)) as running:
            assert ids(await collect(running, prompt(1, 10))) == expected
            while first._active:  # noqa: ASYNC110 - nothing says that the engine has let go of a request
                await asyncio.sleep(0.001)
            asyncio.get_running_loop().skipped += 10 * timeout
            await asyncio.sleep(0.001)  # the timeout's own task runs
            assert ids(await collect(running, prompt(1, 10))) == expected
            assert running.restarted == 0
            stream = running.decode(prompt(2, 5, **LONG))
            await anext(stream)
            os.kill(int(children()[0]), signal.SIGSTOP)
            # More than once: what the worker sent before it was halted counts as a sign of life.
            async with passing_time(timeout):
                with pytest.raises(DecoderFailed, match="failed while the request ran") as failure:
                    async for _ in stream:
                        pass
            assert ids(await collect(running, prompt(1, 10))) == expected
            return failure.value, running.restarted

    failure, restarts = run_skipping(run())
    assert failure.retryable
    assert restarts == 1
    assert f"sent nothing for {timeout:g} seconds" in caplog.text
    assert not children()


def broken_on_demand(environment, folder):
    """An interpreter that works until the file `broken` stands beside it."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n[ -e "{folder}/broken" ] && exit 7\nexec "{environment.python}" "$@"\n')
    python.chmod(0o755)
    return python


def test_a_worker_that_does_not_start_is_given_up_on(environment, decoder, tmp_path, children):
    python = broken_on_demand(environment, tmp_path)

    async def run():
        await (running := decoder(dashinfer_python=python)).start()
        await running.close()
        (tmp_path / "broken").touch()
        await decoder(dashinfer_python=python).start()

    with pytest.raises(SetupError, match=r"died during startup \(exit status 7"):
        asyncio.run(run())
    assert not children()


@pytest.fixture
def restarts_forgotten(monkeypatch):
    """A decoder that dies may be replaced as often as one that has run for long."""
    monkeypatch.setattr("dashinfer_vlm_core.decoders.supervisor.HEALTHY_SECONDS", 0.0)


@pytest.mark.usefixtures("restarts_forgotten")
def test_request_that_waits_when_the_worker_dies_goes_on_in_the_next(environment, decoder, oracle, tmp_path, children):
    """And fails where there is no next one."""
    python = broken_on_demand(environment, tmp_path)

    made = []

    def make():
        made.append(decoder(max_batch_size=1, max_model_len=ROOM, dashinfer_python=python))
        return made[-1]

    async def die_with_one_waiting(running):
        (reader,) = await reading(running, [prompt(2, 5, **LONG)])
        waiter = asyncio.create_task(collect(running, prompt(1, 10)))
        while not made[-1]._waiting:  # noqa: ASYNC110 - nothing says that a request waits
            await asyncio.sleep(0)
        os.kill(int(children()[0]), signal.SIGKILL)
        return await asyncio.gather(reader, waiter, return_exceptions=True)

    async def run():
        async with decoding(Supervisor(make, restarts=2)) as running:
            replaced = await die_with_one_waiting(running)
            (tmp_path / "broken").touch()
            return replaced, await die_with_one_waiting(running)

    replaced, given_up = asyncio.run(run())
    died, answer = replaced
    assert isinstance(died, DecoderFailed)
    assert ids(answer) == oracle.greedy(prompt(1, 10))
    assert "failed while the request ran" in given_up[0].message
    assert "died during startup (exit status 7" in given_up[1].message
    assert len(made) == 1 + 1 + 2
    assert not children()


def test_no_request_is_lost_while_a_dead_worker_is_slow_to_end(decoder, oracle, children, monkeypatch):
    """The supervisor closes the decoder meanwhile: its requests end, and what it had not begun with goes on."""
    close = WorkerProcess.close

    async def close_slowly(worker):
        await asyncio.sleep(5 * POLL_SECONDS)
        await close(worker)

    monkeypatch.setattr(WorkerProcess, "close", close_slowly)

    async def run():
        first, second = (decoder(max_batch_size=1, max_model_len=ROOM) for _ in range(2))
        made = iter([first, second])
        async with decoding(Supervisor(lambda: next(made), restarts=1)) as running:
            (reader,) = await reading(running, [prompt(2, 5, **LONG)])
            waiter = asyncio.create_task(collect(running, prompt(1, 10)))
            while not first._waiting:  # noqa: ASYNC110 - nothing says that a request waits
                await asyncio.sleep(0)
            os.kill(int(children()[0]), signal.SIGKILL)
            return await asyncio.wait_for(asyncio.gather(reader, waiter, return_exceptions=True), HANG)

    died, answer = asyncio.run(run())
    assert isinstance(died, DecoderFailed)
    assert ids(answer) == oracle.greedy(prompt(1, 10))
    assert not children()


def test_health_says_that_a_worker_was_given_up_on(environment, talking_checkpoint, cache, tmp_path, children):
    python = broken_on_demand(environment, tmp_path)
    config = EngineConfig(
        model=str(talking_checkpoint), decoder="dashinfer", device="cpu", cache_dir=cache, dashinfer_python=python
    )

    async def health(engine):
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/health/ready")

    with Engine(config) as engine:
        well = asyncio.run(health(engine))
        (tmp_path / "broken").touch()
        os.kill(int(children()[0]), signal.SIGKILL)
        while engine.status().state == "ready":
            time.sleep(0.01)
        with pytest.raises(DecoderFailed, match="died during startup"):
            engine.chat({"messages": [user("Hello")]})
        ill = asyncio.run(health(engine))
    assert (well.status_code, well.json()["decoder"], "CPU:0" in well.json()["reason"]) == (200, "dashinfer", True)
    assert (ill.status_code, ill.json()["status"]) == (503, "failed")
    assert "exit status 7" in ill.json()["fatal_error"]


def test_a_picture_is_refused_where_it_stands(talking_checkpoint, cache):
    config = EngineConfig(model=str(talking_checkpoint), decoder="dashinfer", device="cpu", cache_dir=cache)
    with Engine(config) as engine, pytest.raises(UnsupportedParameter, match="M-RoPE") as refusal:
        engine.chat({"messages": as_openai([user("What is this?", blurred_image(1))])})
    assert refusal.value.param == "messages[0].content[1]"


def test_pictures_are_answered_approximately_on_request(talking_checkpoint, cache):
    config = EngineConfig(
        model=str(talking_checkpoint), decoder="dashinfer", device="cpu", cache_dir=cache, approximate_vision=True
    )
    with Engine(config) as engine:
        answer = engine.chat({"messages": as_openai([user("What is this?", blurred_image(1))]), "max_tokens": 8})
    assert answer.usage.completion_tokens <= 8


def test_stop_strings_and_clients_that_leave(talking_checkpoint, cache):
    config = EngineConfig(
        model=str(talking_checkpoint), decoder="dashinfer", device="cpu", cache_dir=cache, max_batch_size=1
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
from dashinfer_vlm_core.decoders.dashinfer.decoder import DashInferDecoder
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec

async def main():
    config = EngineConfig(device="cpu", max_model_len=512, cache_dir=sys.argv[2])
    decoder = DashInferDecoder(read_spec(Path(sys.argv[1])), config)
    await decoder.start()
    print(decoder.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_worker_dies_with_its_parent(cache, oracle):
    command = [sys.executable, "-c", PARENT, str(oracle.folder), str(cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        parent.kill()
        while not is_gone(pid):
            time.sleep(0.01)
