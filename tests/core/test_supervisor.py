"""A decoder that dies is replaced, a bounded number of times; one that hangs is given up on."""

from __future__ import annotations

import threading

import pytest

from dashinfer_vlm_core import Engine, EngineConfig, hookimpl
from dashinfer_vlm_core.concurrency.compute import CPU_EXECUTOR
from dashinfer_vlm_core.errors import DecoderFailed, EngineClosed, SetupError
from dashinfer_vlm_core.plugins import load_plugins
from tests.conversations import as_openai, blurred_image, user
from tests.decoder_pause import DecoderPause
from tests.waiting import HANG, until

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "ignore_eos": True}
LONG = HELLO | {"max_tokens": 1500}


class Hang:
    """The next step of `runner` does not end until `end` is called.

    A request that is counted as running may not be in a step yet: what needs one that hangs waits for `entered`.
    """

    def __init__(self, runner):
        self.entered = threading.Event()
        self._go = threading.Event()
        self._step = runner.step
        runner.step = self._hang

    def _hang(self, chunks):
        self.entered.set()
        self._go.wait(timeout=HANG)
        return self._step(chunks)

    def end(self):
        self._go.set()


class Kept:
    """A plugin that registers the torch decoder as `kept`, and keeps what it makes."""

    name = "kept"

    def __init__(self):
        self.made = []
        self.refusals = 0
        self._factory = load_plugins().decoder("torch")
        self.check_support = self._factory.check_support

    @hookimpl
    def register_decoders(self, register):
        register(self)

    def create(self, spec, config, kernels):
        if self.refusals:
            self.refusals -= 1
            raise SetupError("There is no memory left.")
        self.made.append(self._factory.create(spec, config, kernels))
        return self.made[-1]

    def kill(self):
        """Let the newest decoder's thread meet what it does not survive, at its next step."""
        if worker := self.made[-1]._worker:
            worker._scheduler.plan = lambda: 1 / 0

    def die_in(self, engine):
        """A stream of `engine`, whose decoder dies in the midst of it."""
        brake = DecoderPause(self.made[-1], steps=2)
        stream = engine.stream(LONG)
        next(stream)
        self.kill()
        brake.release()
        return stream

    def hang(self, step_timeout=600.0):
        """Let its next step come to no end, in its turn on the cores."""
        worker = self.made[-1]._worker
        worker._step_timeout = step_timeout  # now: no step before could take so long
        return Hang(worker._runner)


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr("dashinfer_vlm_torch.worker.STOP_SECONDS", 0.5)  # what hangs is given up on soon
    return Kept()


@pytest.fixture
def start(tiny_checkpoint, kept):
    """Start engines that decode by `kept`."""
    engines = []

    def start(**options):
        registry = load_plugins()
        registry.add_plugin(kept, name="kept")
        config = EngineConfig(model=str(tiny_checkpoint), decoder="kept", **options)
        engines.append(Engine(config, registry=registry).start())
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def test_a_decoder_that_dies_is_replaced_and_its_requests_are_told(start, kept, caplog):
    engine = start()
    before = engine.chat(HELLO).usage
    stream = kept.die_in(engine)
    with pytest.raises(DecoderFailed, match="failed while the request ran"):
        list(stream)
    assert engine.chat(HELLO).usage == before
    assert engine.stats().restarts == 1
    assert engine.stats().active_requests == 0
    assert engine.status().state == "ready"
    assert "The decoder torch has failed" in caplog.text


def test_it_is_replaced_though_nobody_asks(start, kept):
    engine = start()
    engine.chat(HELLO)
    stream = kept.die_in(engine)
    until(lambda: engine.stats().restarts == 1)
    stream.close()


def test_after_some_deaths_it_is_given_up_on(start, kept):
    engine = start(decoder_restarts=1)
    for _ in range(2):
        stream = kept.die_in(engine)
        with pytest.raises(DecoderFailed):
            list(stream)
    until(lambda: engine.status().state == "failed")
    assert engine.status().fatal_error
    with pytest.raises(DecoderFailed):
        engine.chat(HELLO)
    assert len(kept.made) == 2


def test_one_that_has_run_for_long_may_be_replaced_as_often_as_a_new_one(start, kept, monkeypatch):
    monkeypatch.setattr("dashinfer_vlm_core.decoders.supervisor.HEALTHY_SECONDS", 0.0)
    engine = start(decoder_restarts=1)
    for deaths in range(1, 4):
        stream = kept.die_in(engine)
        with pytest.raises(DecoderFailed):
            list(stream)
        until(lambda deaths=deaths: engine.stats().restarts == deaths)
    assert engine.chat(HELLO).usage


def test_one_that_cannot_be_made_at_once_is_tried_again(start, kept):
    engine = start(decoder_restarts=3)
    kept.refusals = 2
    stream = kept.die_in(engine)
    with pytest.raises(DecoderFailed):
        list(stream)
    assert engine.chat(HELLO).usage
    assert (engine.stats().restarts, kept.refusals) == (1, 0)


def test_one_that_cannot_be_made_again_says_why(start, kept):
    engine = start()
    kept.refusals = 100
    stream = kept.die_in(engine)
    until(lambda: engine.status().state == "failed")
    assert engine.status().fatal_error == "There is no memory left."
    with pytest.raises(DecoderFailed, match="no memory left"):
        engine.chat(HELLO)
    stream.close()


def test_one_that_hangs_fails_its_requests_and_is_given_up_on(start, kept):
    engine = start()
    engine.chat(HELLO)
    hang = kept.hang(step_timeout=0.5)
    try:
        with pytest.raises(DecoderFailed):
            engine.chat(HELLO)
        until(lambda: engine.status().state == "failed")
        assert "has not ended within 0.5 seconds" in engine.status().fatal_error
        assert engine.stats().active_requests == 0
    finally:
        hang.end()


def test_a_request_that_comes_while_it_is_replaced_waits_for_that(start, kept):
    engine = start()
    stream = kept.die_in(engine)
    until(lambda: kept.made[0].fatal_error or len(kept.made) > 1)
    assert engine.chat(HELLO).usage.completion_tokens == 4
    stream.close()


def test_a_close_while_it_hangs_does_not_hang(start, kept):
    engine = start()
    hang = kept.hang()
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


def test_a_step_that_does_not_end_does_not_hide_the_error_of_the_block_around_it(start, kept, caplog):
    engine = start()
    hang = kept.hang()
    try:
        engine.submit(HELLO)
        assert hang.entered.wait(timeout=HANG)
        with pytest.raises(KeyboardInterrupt), engine:
            raise KeyboardInterrupt
        assert "has not ended within 0.5 seconds" in caplog.text
        assert engine.status().state == "closed"
    finally:
        hang.end()


def test_a_close_while_it_hangs_does_not_wait_for_a_tower_that_waits_for_its_turn(start, kept):
    engine = start()
    hang = kept.hang()
    try:
        engine.submit(HELLO)
        assert hang.entered.wait(timeout=HANG)
        answer = engine.submit({"messages": as_openai([user(blurred_image(1), "What is this?")]), "max_tokens": 4})
        until(lambda: CPU_EXECUTOR.waiting)
        hanging = kept.made[-1]._worker._thread
        with pytest.raises(DecoderFailed, match=r"has not ended within 0\.5 seconds"):
            engine.close()
        assert hanging.is_alive()
        with pytest.raises(EngineClosed):
            answer.result(timeout=HANG)
        with start() as other:  # in the same process, where the step hangs on
            assert other.chat(HELLO).usage.completion_tokens == 4
        assert hanging.is_alive()
    finally:
        hang.end()
    hanging.join(timeout=HANG)
    until(lambda: CPU_EXECUTOR.active_thread is None)
