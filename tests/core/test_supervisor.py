"""A failed decoder is replaced a limited number of times; a hanging one is abandoned."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import numpy as np
import pytest

from dashinfer_vlm_core import Engine, EngineConfig, hookimpl
from dashinfer_vlm_core.concurrency.compute import CPU_EXECUTOR
from dashinfer_vlm_core.decoders import Pooled
from dashinfer_vlm_core.decoders.interface import RequestNotStarted
from dashinfer_vlm_core.decoders.supervisor import Supervisor
from dashinfer_vlm_core.errors import DecoderFailed, EngineClosed, SetupError
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.testing import Script, ScriptedDecoder
from dashinfer_vlm_torch.worker import Worker
from tests.conversations import as_openai, blurred_image, user
from tests.decoder_pause import DecoderPause
from tests.waiting import HANG, until

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "ignore_eos": True}
LONG = HELLO | {"max_tokens": 1500}


class Hang:
    """Blocks the next step of `runner` until `end` is called.

    A request counted as running may not be in a step yet; wait for `entered` where the step must hang.
    """

    def __init__(self, runner):
        self.entered = threading.Event()
        self._go = threading.Event()
        self._launch = runner.launch
        runner.launch = self._hang

    def _hang(self, chunks, previous=None):
        self.entered.set()
        self._go.wait(timeout=HANG)
        return self._launch(chunks, previous)

    def end(self):
        self._go.set()


class FaultInjector:
    """A plugin that registers the torch decoder as `kept`, records its instances and injects faults."""

    name = "kept"

    def __init__(self):
        self.decoders = []
        self.pending_failures = 0
        self._factory = load_plugins().decoder("torch")
        self.check_support = self._factory.check_support

    @hookimpl
    def register_decoders(self, register):
        register(self)

    def create(self, spec, config, kernels):
        if self.pending_failures:
            self.pending_failures -= 1
            raise SetupError("There is no memory left.")
        self.decoders.append(self._factory.create(spec, config, kernels))
        return self.decoders[-1]

    def kill(self):
        """Raise an exception in the newest decoder's thread at its next step."""
        if worker := self.decoders[-1]._worker:
            worker._scheduler.schedule = lambda: 1 / 0

    def die_in(self, engine):
        """Return a stream of `engine` whose decoder fails in the middle of it."""
        pause = DecoderPause(self.decoders[-1], steps=2)
        stream = engine.stream(LONG)
        next(stream)
        self.kill()
        pause.release()
        return stream

    def hang(self, step_timeout=600.0):
        """Make the decoder's next step hang on the compute thread."""
        worker = self.decoders[-1]._worker
        worker._step_timeout = step_timeout  # only now, so that no earlier step can exceed it
        return Hang(worker._runner)


@pytest.fixture
def injector():
    return FaultInjector()


@pytest.fixture
def impatient(monkeypatch):
    """Abandon steps that hang when the decoder is closed. Until then, a busy machine may need longer for a step."""
    stop = Worker.stop

    def stop_soon(worker):
        worker._step_timeout = 0.5
        stop(worker)

    monkeypatch.setattr(Worker, "stop", stop_soon)
    return monkeypatch


@pytest.fixture
def start(tiny_checkpoint, injector):
    """Start engines with the decoder of `injector`."""
    engines = []

    def start(**options):
        registry = load_plugins()
        registry.add_plugin(injector, name="kept")
        config = EngineConfig(model=str(tiny_checkpoint), decoder="kept", **options)
        engines.append(Engine(config, registry=registry).start())
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def test_closed_engine_is_freed_without_the_garbage_collector(start, injector):
    """Which `dashinfer-vlm serve` does not run on what it loads first."""
    engine = start()
    engine.chat(HELLO)
    decoder = weakref.ref(injector.decoders.pop())
    gc.disable()
    try:
        engine.close()
        until(lambda: decoder() is None, seconds=10)
    finally:
        gc.enable()


@pytest.mark.supports("restart", backend="torch-cpu")
def test_failed_decoder_is_replaced_and_its_requests_fail(start, injector, caplog):
    engine = start()
    before = engine.chat(HELLO).usage
    stream = injector.die_in(engine)
    with pytest.raises(DecoderFailed, match="failed while the request ran"):
        list(stream)
    assert engine.chat(HELLO).usage == before
    assert engine.stats().restarts == 1
    assert engine.stats().active_requests == 0
    assert engine.status().state == "ready"
    assert "The decoder torch has failed" in caplog.text


def test_decoder_is_replaced_without_new_requests(start, injector):
    engine = start()
    engine.chat(HELLO)
    stream = injector.die_in(engine)
    until(lambda: engine.stats().restarts == 1)
    stream.close()


@pytest.mark.slow
def test_decoder_is_abandoned_after_too_many_restarts(start, injector):
    engine = start(limits={"decoder_restarts": 1})
    for _ in range(2):
        stream = injector.die_in(engine)
        with pytest.raises(DecoderFailed):
            list(stream)
    until(lambda: engine.status().state == "failed")
    assert engine.status().fatal_error
    with pytest.raises(DecoderFailed):
        engine.chat(HELLO)
    assert len(injector.decoders) == 2


@pytest.mark.slow
def test_restart_count_resets_after_healthy_period(start, injector, monkeypatch):
    monkeypatch.setattr("dashinfer_vlm_core.decoders.supervisor.HEALTHY_SECONDS", 0.0)
    engine = start(limits={"decoder_restarts": 1})
    for deaths in range(1, 4):
        stream = injector.die_in(engine)
        with pytest.raises(DecoderFailed):
            list(stream)
        until(lambda deaths=deaths: engine.stats().restarts == deaths)
    assert engine.chat(HELLO).usage


def test_failed_restart_is_retried(start, injector):
    engine = start(limits={"decoder_restarts": 3})
    injector.pending_failures = 2
    stream = injector.die_in(engine)
    with pytest.raises(DecoderFailed):
        list(stream)
    assert engine.chat(HELLO).usage
    assert (engine.stats().restarts, injector.pending_failures) == (1, 0)


@pytest.mark.slow
def test_impossible_restart_reports_reason(start, injector):
    engine = start()
    injector.pending_failures = 100
    stream = injector.die_in(engine)
    until(lambda: engine.status().state == "failed")
    assert engine.status().fatal_error == "There is no memory left."
    with pytest.raises(DecoderFailed, match="no memory left"):
        engine.chat(HELLO)
    stream.close()


@pytest.mark.slow
def test_hanging_decoder_fails_requests_and_is_abandoned(start, injector):
    engine = start()
    engine.chat(HELLO)
    hang = injector.hang(step_timeout=0.5)
    try:
        with pytest.raises(DecoderFailed):
            engine.chat(HELLO)
        until(lambda: engine.status().state == "failed")
        assert "has not ended within 0.5 seconds" in engine.status().fatal_error
        assert engine.decoder_hangs
        assert engine.stats().active_requests == 0
    finally:
        hang.end()


def test_request_continues_when_a_slow_step_has_ended(tiny_checkpoint):
    async def wait_for_step():
        decoder = ScriptedDecoder(Script("Yes."), spec=read_spec(tiny_checkpoint), config=EngineConfig())
        supervisor = Supervisor(lambda: decoder, restarts=0)
        await supervisor.start()
        decoder.fatal_error = "A step has taken too long."
        waiting = asyncio.create_task(supervisor.load_lora(None))
        await asyncio.sleep(0)
        assert supervisor.restarting
        decoder.fatal_error = ""
        await asyncio.wait_for(waiting, timeout=HANG)
        await supervisor.close()

    asyncio.run(wait_for_step())


def test_request_during_restart_waits(start, injector):
    engine = start()
    stream = injector.die_in(engine)
    until(lambda: injector.decoders[0].fatal_error or len(injector.decoders) > 1)
    assert engine.chat(HELLO).usage.completion_tokens == 4
    stream.close()


def test_request_that_was_not_started_waits_for_the_restart(start, injector):
    engine = start(max_batch_size=1)
    pause = DecoderPause(injector.decoders[-1], steps=2)
    stream = engine.stream(LONG)
    next(stream)
    waiting = engine.submit(HELLO)
    until(lambda: engine.stats().decoder.waiting == 1)
    injector.kill()
    pause.release()
    with pytest.raises(DecoderFailed, match="failed while the request ran"):
        list(stream)
    assert waiting.result(timeout=HANG).completion.usage.completion_tokens == 4
    assert engine.stats().restarts == 1


def test_prompt_whose_pooling_was_not_started_waits_for_the_restart(tiny_checkpoint):
    pooled, decoders = Pooled(vector=np.zeros(1, np.float32)), []

    class PoolingDecoder(ScriptedDecoder):
        async def pool(self, request):
            if self is not decoders[0]:
                return pooled
            self.fatal_error = "It died."
            raise RequestNotStarted

    def make():
        decoders.append(PoolingDecoder(Script("Yes."), spec=read_spec(tiny_checkpoint), config=EngineConfig()))
        return decoders[-1]

    async def pool():
        supervisor = Supervisor(make, restarts=1)
        await supervisor.start()
        found = await asyncio.wait_for(supervisor.pool(None), timeout=HANG)
        await supervisor.close()
        return found

    assert asyncio.run(pool()) is pooled
    assert len(decoders) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_close_with_hanging_step_does_not_hang(start, injector):
    engine = start()
    hang = injector.hang()
    try:
        answer = engine.submit(HELLO)
        assert hang.entered.wait(timeout=HANG)
        with pytest.raises(DecoderFailed, match=r"has not ended within 0\.5 seconds"):
            engine.close()
        with pytest.raises(EngineClosed):
            answer.result(timeout=HANG)
        assert engine.status().state == "closed"
    finally:
        hang.end()


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_hanging_step_does_not_hide_error_of_with_block(start, injector, caplog):
    engine = start()
    hang = injector.hang()
    try:
        engine.submit(HELLO)
        assert hang.entered.wait(timeout=HANG)
        with pytest.raises(KeyboardInterrupt), engine:
            raise KeyboardInterrupt
        assert "has not ended within 0.5 seconds" in caplog.text
        assert engine.status().state == "closed"
    finally:
        hang.end()


@pytest.mark.slow
def test_close_with_hanging_step_does_not_wait_for_tower(start, injector, impatient):
    engine = start()
    hang = injector.hang()
    try:
        engine.submit(HELLO)
        assert hang.entered.wait(timeout=HANG)
        answer = engine.submit({"messages": as_openai([user(blurred_image(1), "What is this?")]), "max_tokens": 4})
        until(lambda: CPU_EXECUTOR.waiting)
        hanging = injector.decoders[-1]._worker._thread
        with pytest.raises(DecoderFailed, match=r"has not ended within 0\.5 seconds"):
            engine.close()
        assert hanging.is_alive()
        with pytest.raises(EngineClosed):
            answer.result(timeout=HANG)
        impatient.undo()
        with start() as other:  # in the same process, where the step still hangs
            assert other.chat(HELLO).usage.completion_tokens == 4
        assert hanging.is_alive()
    finally:
        hang.end()
    hanging.join(timeout=HANG)
    until(lambda: CPU_EXECUTOR._current is None)
