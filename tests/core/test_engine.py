from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from types import MappingProxyType

import pytest

from dashinfer_vlm_core import Engine, EngineConfig, hookimpl
from dashinfer_vlm_core.concurrency.compute import THREAD_NAME
from dashinfer_vlm_core.engine import select_decoder
from dashinfer_vlm_core.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthExceeded,
    EngineClosed,
    EngineError,
    InvalidParameter,
    MediaUndecodable,
    ModelNotFound,
    PluginError,
    QueueFull,
    SetupError,
    UnsupportedParameter,
)
from dashinfer_vlm_core.media.image import decode_image
from dashinfer_vlm_core.models.interface import Patches
from dashinfer_vlm_core.plugins import Registry, load_plugins
from dashinfer_vlm_core.protocol.sampling import SAMPLING_PARAMETERS
from dashinfer_vlm_core.testing import Script, scripted_engine, scripted_registry
from tests.conversations import as_openai, blurred_image, data_url, user
from tests.samples import image_url
from tests.waiting import HANG, NEVER, until

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
LONG = "A long answer that goes on and on and on. " * 20


@pytest.fixture
def scripted(tiny_checkpoint):
    """Start an engine that plays a script; return both. The script counts the running requests."""
    engines = []

    def scripted(*answers, delay=0.0, supported_params=SAMPLING_PARAMETERS, **options):
        script = Script(*answers, delay=delay, supported_params=supported_params)
        config = EngineConfig(model=str(tiny_checkpoint), decoder="scripted", **options)
        engines.append(Engine(config, registry=scripted_registry(script)).start())
        return engines[-1], script

    yield scripted
    for engine in engines:
        engine.close()


def text_of(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_scripted_engine_completes_request(tiny_checkpoint):
    with scripted_engine("A red circle.", model=str(tiny_checkpoint)) as engine:
        answer = engine.chat(HELLO)
    assert answer.choices[0].message.content == "A red circle."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_all_entry_points_give_same_completion(scripted):
    engine, _ = scripted("The same.")

    async def in_event_loop():
        plain = await engine.achat(HELLO)
        chunks = [chunk async for chunk in engine.astream(HELLO)]
        return plain.choices[0].message.content, text_of(chunks)

    assert engine.chat(HELLO).choices[0].message.content == "The same."
    assert text_of(engine.stream(HELLO)) == "The same."
    assert asyncio.run(in_event_loop()) == ("The same.", "The same.")


def test_many_threads_and_loops_share_engine(scripted):
    engine, script = scripted(lambda request: request.id, delay=0.001)
    answers = []

    def thread(number):
        async def loop():
            return await asyncio.gather(*(engine.achat(HELLO) for _ in range(4)))

        answers.extend(asyncio.run(loop()) if number % 2 else [engine.chat(HELLO) for _ in range(4)])

    threads = [threading.Thread(target=thread, args=(number,)) for number in range(8)]
    for item in threads:
        item.start()
    for item in threads:
        item.join()
    assert len({answer.id for answer in answers}) == 32
    assert all(answer.choices[0].message.content == answer.id for answer in answers)
    assert script.running == 0


def test_decoder_gets_visual_tokens_positions_and_limit(scripted):
    engine, script = scripted("ok")
    engine.chat({"messages": as_openai([user(blurred_image(1), "What?")]), "max_tokens": 7})
    (request,) = script.requests
    (span,) = request.spans
    assert span.stop - span.start == len(span.tokens.embedding) == 16
    assert request.positions.shape == (3, len(request.token_ids))
    assert request.sampling.max_tokens == 7


def test_pixels_are_freed_while_a_response_is_decoded(scripted):
    def pixels():
        return [each for each in gc.get_objects() if type(each) is Patches and each.grid.w == 36]

    engine, script = scripted("It goes on and on. " * 20, delay=0.01)
    picture = {"type": "image_url", "image_url": {"url": image_url(56, 532)}}  # no other test has this size
    with contextlib.closing(engine.stream({"messages": [{"role": "user", "content": [picture]}]})) as chunks:
        next(chunks)
        script.delay = NEVER
        until(lambda: not pixels())
        assert script.running == 1


def test_default_max_tokens_is_remaining_context(scripted):
    engine, script = scripted("ok", max_model_len=100)
    engine.chat(HELLO)
    (request,) = script.requests
    assert request.sampling.max_tokens == 100 - len(request.token_ids)


def test_context_length_above_the_models_limit_is_rejected(scripted):
    with pytest.raises(ConfigError, match=r"`max_model_len` is 2049, .* supports at most 2048 tokens") as caught:
        scripted("ok", max_model_len=2049)
    assert caught.value.param == "max_model_len"


@pytest.mark.parametrize("name", ["model", "demo-under-test", None])
def test_model_name_is_optional(scripted, name):
    engine, _ = scripted("ok", served_model_name="demo-under-test")
    request = HELLO if name is None else {**HELLO, "model": name}
    assert engine.chat(request).model == "demo-under-test"


def test_folder_is_served_by_its_last_component(scripted, tiny_checkpoint):
    engine, _ = scripted("ok")
    assert engine.chat({**HELLO, "model": str(tiny_checkpoint)}).model == tiny_checkpoint.name


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"model": "gpt-4o"}, ModelNotFound, "model"),
        ({"temperature": 3}, InvalidParameter, "temperature"),
        ({"logit_bias": {"320": 1}}, InvalidParameter, "logit_bias"),
        ({"stop_token_ids": [320]}, InvalidParameter, "stop_token_ids"),
        ({"max_tokens": 5000}, ContextLengthExceeded, "max_tokens"),
        ({"max_completion_tokens": 5000}, ContextLengthExceeded, "max_completion_tokens"),
        ({"min_tokens": 3000}, InvalidParameter, "min_tokens"),
        ({"min_tokens": 1, "stop_token_ids": list(range(320))}, InvalidParameter, "stop_token_ids"),
        ({"messages": as_openai([{"role": "user", "content": "x" * 5000}])}, ContextLengthExceeded, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]},
            MediaUndecodable,
            "messages[0].content[0]",
        ),
    ],
)
def test_invalid_request_is_named_and_next_one_works(scripted, change, error, param):
    engine, script = scripted("ok")
    for send_request in (engine.chat, lambda request: list(engine.stream(request))):
        with pytest.raises(error) as caught:
            send_request({**HELLO, **change})
        assert caught.value.param == param
    assert engine.chat(HELLO).choices[0].message.content == "ok"
    assert len(script.requests) == 1


def test_unsupported_parameter_is_rejected_by_name(scripted):
    engine, _ = scripted("ok", supported_params=SAMPLING_PARAMETERS - {"logit_bias"})
    with pytest.raises(UnsupportedParameter, match="does not support `logit_bias`") as caught:
        engine.chat({**HELLO, "logit_bias": {"5": 1}})
    assert caught.value.param == "logit_bias"
    assert engine.chat({**HELLO, "logit_bias": {}}).choices[0].message.content == "ok"


def test_decoder_error_reaches_only_its_caller(scripted):
    engine, _ = scripted(QueueFull("Busy.", retry_after=3), "ok")
    with pytest.raises(QueueFull, match="Busy") as caught:
        engine.chat(HELLO)
    assert caught.value.retry_after == 3
    assert engine.chat(HELLO).choices[0].message.content == "ok"


@pytest.mark.parametrize("streamed", [False, True])
def test_unexpected_error_is_logged_and_not_leaked(scripted, caplog, streamed):
    engine, _ = scripted(RuntimeError("secret at 0x7f00"), "ok")
    with caplog.at_level(logging.ERROR), pytest.raises(EngineError, match="see its log for the cause") as caught:
        list(engine.stream(HELLO)) if streamed else engine.chat(HELLO)
    assert "secret" not in caught.value.message
    assert caught.value.code == "internal_error"
    assert "secret at 0x7f00" in caplog.text
    assert engine.chat(HELLO).choices[0].message.content == "ok"


def test_canceling_caller_frees_its_request(scripted):
    engine, script = scripted(LONG, delay=0.05)

    async def cancel():
        task = asyncio.create_task(engine.achat(HELLO))
        await asyncio.to_thread(until, lambda: script.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    until(lambda: script.running == 0)


def test_closing_async_stream_frees_its_request(scripted):
    engine, script = scripted(LONG, delay=0.05)

    async def leave():
        stream = engine.astream(HELLO)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        assert script.running == 1
        await stream.aclose()

    asyncio.run(leave())
    until(lambda: script.running == 0)


def test_closing_sync_stream_frees_its_request(scripted):
    engine, script = scripted(LONG, delay=0.05)
    stream = engine.stream(HELLO)
    next(stream)
    stream.close()
    until(lambda: script.running == 0)


def test_stop_string_ends_decoding_early(scripted):
    engine, script = scripted(LONG, delay=0.001)
    answer = engine.chat({**HELLO, "stop": ["goes"]})
    assert answer.choices[0].message.content == "A long answer that "
    assert answer.choices[0].finish_reason == "stop"
    assert script.running == 0


@pytest.mark.parametrize("way", ["chat", "stream"])
def test_closing_fails_running_requests(scripted, way):
    engine, script = scripted(LONG, delay=0.05)
    caught = []

    def send_request():
        try:
            list(engine.stream(HELLO)) if way == "stream" else engine.chat(HELLO)
        except EngineClosed as error:
            caught.append(error)

    thread = threading.Thread(target=send_request)
    thread.start()
    until(lambda: script.running == 1)
    engine.close()
    thread.join(timeout=HANG)
    assert len(caught) == 1
    assert script.running == 0


def test_closing_during_image_decoding_fails_every_request(scripted, monkeypatch):
    engine, _ = scripted("ok", media_workers=0)
    begun, go = threading.Event(), threading.Event()

    def slow_decode(*arguments, **options):
        begun.set()
        go.wait(timeout=HANG)
        return decode_image(*arguments, **options)

    monkeypatch.setattr("dashinfer_vlm_core.media.decoder.decode_image", slow_decode)
    parts = [{"type": "image_url", "image_url": {"url": data_url(blurred_image(seed, 90, 90))}} for seed in range(8)]
    request = {"messages": [{"role": "user", "content": parts}], "max_tokens": 5}
    outcomes = []

    def send_request():
        try:
            outcomes.append(engine.chat(request))
        except BaseException as error:  # noqa: BLE001 - the test checks the type
            outcomes.append(error)

    threads = [threading.Thread(target=send_request) for _ in range(6)]
    for thread in threads:
        thread.start()
    assert begun.wait(timeout=HANG)
    engine.close()
    for thread in threads:
        thread.join(timeout=HANG)
    assert not go.is_set()
    go.set()
    assert [type(outcome) for outcome in outcomes] == [EngineClosed] * 6


def test_requests_beyond_queue_are_rejected_before_any_work(scripted):
    engine, script = scripted(LONG, delay=0.02, max_batch_size=1, max_waiting=1)
    streams = [engine.stream(HELLO) for _ in range(2)]
    for stream in streams:
        next(stream)
    with pytest.raises(QueueFull, match="2 completions are already running or waiting"):
        engine.chat({"messages": as_openai([user("x", blurred_image(1))])})
    assert len(script.requests) == 2
    for stream in streams:
        stream.close()
    until(lambda: script.running == 0)
    assert engine.chat({**HELLO, "max_tokens": 3}).usage.completion_tokens == 3


def engine_threads(others):
    """Return the running threads of engines; the compute thread belongs to the process, `others` to other tests."""
    started = set(threading.enumerate()) - others
    return [thread for thread in started if "dashinfer" in thread.name and thread.name != THREAD_NAME]


def test_closed_engine_reports_how_to_start_it(tiny_checkpoint):
    engine = scripted_engine("ok", model=str(tiny_checkpoint))
    for _ in range(2):
        assert engine.status().state == "closed"
        with pytest.raises(EngineClosed, match=r"with Engine\(\.\.\.\)"):
            engine.chat(HELLO)
        with pytest.raises(EngineClosed):
            next(engine.stream(HELLO))
        with pytest.raises(EngineClosed):
            asyncio.run(engine.achat(HELLO))
        engine.close()


def test_engine_can_be_started_and_closed_repeatedly(tiny_checkpoint):
    engine, others = scripted_engine("ok", model=str(tiny_checkpoint)), set(threading.enumerate())
    for _ in range(2):
        assert engine.start() is engine.start()
        assert engine.chat(HELLO).choices[0].message.content == "ok"
        engine.close()
        engine.close()
    until(lambda: not engine_threads(others))


def test_engine_is_async_context_manager(tiny_checkpoint):
    async def use():
        async with scripted_engine("ok", model=str(tiny_checkpoint)) as engine:
            return (await engine.achat(HELLO)).choices[0].message.content, engine.status()

    content, status = asyncio.run(use())
    assert content == "ok"
    assert (status.state, status.decoder, status.decoder_reason) == ("ready", "scripted", "returns scripted responses")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "no-such-model"}, CheckpointError, r"registered name \(known: .*demo.*\), a folder"),
        ({"decoder": "no-such-decoder"}, PluginError, "No decoder is named 'no-such-decoder'"),
        ({"device": "no-such-device"}, SetupError, "no-such-device"),
    ],
)
def test_invalid_setup_is_named_and_leaves_no_thread(tiny_checkpoint, options, error, message):
    engine, others = Engine(EngineConfig(**{"model": str(tiny_checkpoint), **options})), set(threading.enumerate())
    with pytest.raises(error, match=message):
        engine.start()
    assert engine.status().state == "closed"
    assert not engine_threads(others)


def test_images_beyond_context_are_rejected_before_resizing(scripted):
    engine, _ = scripted("ok", max_model_len=64)
    with pytest.raises(ContextLengthExceeded, match="The images and videos have at least 64 tokens") as caught:
        engine.chat({"messages": as_openai([user(*[blurred_image(seed) for seed in range(4)], "?")])})
    assert caught.value.param == "messages"


def test_any_mapping_is_accepted_as_request(scripted):
    engine, _ = scripted("ok")
    assert engine.chat(MappingProxyType(HELLO)).choices[0].message.content == "ok"


def test_decoder_failing_support_check_is_skipped(tiny_checkpoint, caplog):
    class Broken:
        name = "broken"

        @hookimpl
        def register_decoders(self, register):
            register(self)

        def check_support(self, spec, config):
            raise RuntimeError("no driver")

    registry = load_plugins()
    registry.add_plugin(Broken(), name="broken")
    with Engine(EngineConfig(model=str(tiny_checkpoint)), registry=registry) as engine:
        assert engine.status().decoder == "torch"
    with pytest.raises(SetupError, match="broken: its check failed: no driver"):
        Engine(EngineConfig(model=str(tiny_checkpoint), decoder="broken"), registry=registry).start()


def test_invalid_checkpoint_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json\. Set `model` to a folder"):
        Engine(EngineConfig(model=str(tmp_path))).start()
    contents = {
        "{bad": r"config\.json is not valid JSON: .* line 1 column 2",
        "[]": "is not a JSON object",
        "{}": "`model_type` is missing",
    }
    for content, problem in contents.items():
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=problem):
            Engine(EngineConfig(model=str(tmp_path))).start()
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    with pytest.raises(PluginError, match=r"No model family is named 'llava'; available: .*qwen2_vl"):
        Engine(EngineConfig(model=str(tmp_path))).start()


def test_missing_decoder_error_lists_all_reasons(tiny_checkpoint):
    from dashinfer_vlm_core.models.qwen2_vl.config import read_spec

    with pytest.raises(SetupError, match=r"No decoder can run here \(none is registered\)"):
        select_decoder(Registry(), read_spec(tiny_checkpoint), EngineConfig())
