"""A decoder that dies is replaced, a bounded number of times; one that hangs is given up on."""

from __future__ import annotations

import threading

import pytest

from dashinfer_vlm_core import Engine, EngineConfig, hookimpl
from dashinfer_vlm_core.errors import DecoderFailed, EngineClosed, SetupError
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_core.turns import CPU_TURNS
from tests.conversations import as_openai, picture, user
from tests.waiting import until

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "ignore_eos": True}
LONG = HELLO | {"max_tokens": 1500}


class Kept:
    """A plugin that registers the torch decoder as `kept`, and keeps what it makes."""

    name = "kept"

    def __init__(self):
        self.made = []
        self.refuses = False
        self._factory = load_plugins().decoder("torch")
        self.fitness = self._factory.fitness

    @hookimpl
    def register_decoders(self, register):
        register(self)

    def create(self, spec, config):
        if self.refuses:
            raise SetupError("There is no memory left.")
        self.made.append(self._factory.create(spec, config))
        return self.made[-1]

    def kill(self):
        """Let the newest decoder's thread meet what it does not survive, at its next step."""
        if worker := self.made[-1]._worker:
            worker._scheduler.plan = lambda: 1 / 0

    def hang(self):
        """Let it come to no end in its turn on the cores; what is returned lets it go on."""
        go = threading.Event()
        runner = self.made[-1]._worker._runner
        step = runner.step
        runner.step = lambda chunks: (go.wait(60), step(chunks))[1]
        return go


@pytest.fixture
def kept():
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
    stream = engine.stream(LONG)
    next(stream)
    kept.kill()
    with pytest.raises(DecoderFailed, match="failed while the request ran"):
        list(stream)
    assert engine.chat(HELLO).usage == before
    assert engine.stats().restarts == 1
    assert engine.stats().answers == 0
    assert engine.status().state == "ready"
    assert "The decoder torch has failed" in caplog.text


def test_it_is_replaced_though_nobody_asks(start, kept):
    engine = start()
    engine.chat(HELLO)
    stream = engine.stream(LONG)
    next(stream)
    kept.kill()
    until(lambda: engine.stats().restarts == 1)
    stream.close()


def test_after_some_deaths_it_is_given_up_on(start, kept):
    engine = start(decoder_restarts=1)
    for _ in range(2):
        stream = engine.stream(LONG)
        next(stream)
        kept.kill()
        with pytest.raises(DecoderFailed):
            list(stream)
    until(lambda: engine.status().state == "failed")
    assert engine.status().trouble
    with pytest.raises(DecoderFailed):
        engine.chat(HELLO)
    assert len(kept.made) == 2


def test_one_that_cannot_be_made_again_says_why(start, kept):
    engine = start()
    stream = engine.stream(LONG)
    next(stream)
    kept.refuses = True
    kept.kill()
    until(lambda: engine.status().state == "failed")
    assert engine.status().trouble == "There is no memory left."
    with pytest.raises(DecoderFailed, match="no memory left"):
        engine.chat(HELLO)
    stream.close()


def test_one_that_hangs_fails_its_requests_and_is_given_up_on(start, kept):
    engine = start(step_timeout=2.0)
    engine.chat(HELLO)
    go = kept.hang()
    try:
        with pytest.raises(DecoderFailed):
            engine.chat(HELLO)
        until(lambda: engine.status().state == "failed")
        assert "has not ended within 2 seconds" in engine.status().trouble
        assert engine.stats().answers == 0
    finally:
        go.set()


def test_a_request_that_comes_while_it_is_replaced_waits_for_that(start, kept):
    engine = start()
    stream = engine.stream(LONG)
    next(stream)
    kept.kill()
    until(lambda: kept.made[0].trouble or len(kept.made) > 1)
    assert engine.chat(HELLO).usage.completion_tokens == 4
    stream.close()


def test_a_close_while_it_hangs_does_not_hang(start, kept):
    engine = start(step_timeout=2.0)
    go = kept.hang()
    try:
        answer = engine.submit(HELLO)
        until(lambda: engine.stats().decoder.running == 1)
        with pytest.raises(DecoderFailed, match="has not ended within 2 seconds"):
            engine.close()
        with pytest.raises(EngineClosed):
            answer.result(timeout=10)
        assert engine.status().state == "closed"
    finally:
        go.set()


def test_a_step_that_does_not_end_does_not_hide_the_error_of_the_block_around_it(start, kept, caplog):
    engine = start(step_timeout=1.0)
    go = kept.hang()
    try:
        engine.submit(HELLO)
        until(lambda: engine.stats().decoder.running == 1)
        with pytest.raises(KeyboardInterrupt), engine:
            raise KeyboardInterrupt
        assert "has not ended within 1 seconds" in caplog.text
        assert engine.status().state == "closed"
    finally:
        go.set()


def test_a_close_while_it_hangs_does_not_wait_for_a_tower_that_waits_for_its_turn(start, kept):
    engine = start(step_timeout=2.0)
    go = kept.hang()
    try:
        engine.submit(HELLO)
        until(lambda: CPU_TURNS._taken is not None)
        answer = engine.submit({"messages": as_openai([user(picture(1), "What is this?")]), "max_tokens": 4})
        until(lambda: CPU_TURNS._waiting)
        hanging = kept.made[-1]._worker._thread
        with pytest.raises(DecoderFailed, match="has not ended within 2 seconds"):
            engine.close()
        assert hanging.is_alive()
        with pytest.raises(EngineClosed):
            answer.result(timeout=10)
        with start() as other:  # in the same process, where the step hangs on
            assert other.chat(HELLO).usage.completion_tokens == 4
        assert hanging.is_alive()
    finally:
        go.set()
    hanging.join(timeout=10)
    until(lambda: CPU_TURNS._taken is None)
