"""A decoder that dies is replaced, a bounded number of times; one that hangs is given up on."""

from __future__ import annotations

import threading

import pytest

from dashinfer_vlm_core import Engine, EngineConfig, hookimpl
from dashinfer_vlm_core.errors import DecoderFailed, EngineClosed, SetupError
from dashinfer_vlm_core.plugins import load_plugins
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
        """Let it come to no end; what is returned lets it go on."""
        go = threading.Event()
        step = self.made[-1]._worker._runner.step
        self.made[-1]._worker._runner.step = lambda chunks: (go.wait(60), step(chunks))[1]
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
        assert "hangs" in engine.status().trouble
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
        stream = engine.submit(HELLO)
        until(lambda: engine.stats().decoder.running == 1)
        engine.close()
        with pytest.raises(EngineClosed):
            stream.result(timeout=10)
    finally:
        go.set()
