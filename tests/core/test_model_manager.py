"""Several models in one process: names, loading on request, failures, and idle models."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shutil
import threading
import weakref

import pytest

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.engine.managed_models import ManagedModel, configure_models
from dashinfer_vlm_core.engine.manager import ModelManager
from dashinfer_vlm_core.engine.model_rules import ModelPolicy
from dashinfer_vlm_core.errors import (
    CheckpointError,
    ConfigError,
    DecoderFailed,
    EngineClosed,
    EngineError,
    InvalidParameter,
    ModelNotFound,
    QueueFull,
    SetupError,
)
from dashinfer_vlm_core.testing import Script, scripted_registry
from tests.lora_folders import write_lora
from tests.waiting import HANG, auntil, until

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class FailingScript(Script):
    """The decoder of the model `b` cannot be started."""

    def create(self, spec, config, kernels):
        decoder = super().create(spec, config, kernels)
        if config.name == "b":
            self.failing = weakref.ref(decoder)
            decoder.start = self._fail
        return decoder

    async def _fail(self):
        raise SetupError("There is no memory left.")


def managed(folder, name, *, aliases=(), pinned=False, **options) -> ManagedModel:
    config = EngineConfig(model=str(folder), served_model_name=name, decoder="scripted", **options)
    return ManagedModel(config=config, aliases=aliases, pinned=pinned)


@pytest.fixture
def manage(tiny_checkpoint):
    """Start managers of models with scripted responses, of which the memory holds one."""
    with contextlib.ExitStack() as stack:

        def start(*models, script=None, clock=None, **policy) -> ModelManager:
            manager = ModelManager(
                models or [managed(tiny_checkpoint, "a"), managed(tiny_checkpoint, "b")],
                policy=ModelPolicy(**{"memory_limit": 10**12, **policy}),
                registry=scripted_registry(script or Script("Yes.")),
                estimate=lambda _: 10**12,
                clock=clock or Clock(),
            )
            stack.callback(manager.close)
            return manager.start()

        yield start


def states(manager) -> dict[str, str]:
    return {status.model: status.state for status in (engine.status() for engine in manager.models())}


def look_at_clock(manager):
    manager._loader._send(manager._loader._rules.tick)


def ask(manager, model):
    return manager.chat({"model": model, **HELLO}).model


def test_models_are_loaded_on_request_and_take_turns(manage):
    manager = manage()
    assert states(manager) == {"a": "unloaded", "b": "unloaded"}
    assert [ask(manager, name) for name in "abba"] == ["a", "b", "b", "a"]
    assert states(manager) == {"a": "ready", "b": "unloaded"}
    assert manager.status().state == "ready"


@pytest.mark.parametrize("kind", ["chat", "achat", "stream", "astream"])
def test_each_kind_of_request_names_its_model(manage, kind):
    manager = manage()
    request = {"model": "b", **HELLO}

    async def awaited():
        if kind == "astream":
            return [chunk async for chunk in manager.astream(request)]
        return await getattr(manager, kind)(request)

    if kind.startswith("a"):
        asyncio.run(awaited())
    else:
        assert list(getattr(manager, kind)(request))
    assert states(manager) == {"a": "unloaded", "b": "ready"}
    assert len(asyncio.run(manager.for_model("b").aencode("Hello"))) > 0


def test_names_aliases_and_loras_lead_to_their_model(manage, tiny_checkpoint, tmp_path):
    lora = str(write_lora(tmp_path / "sql", tiny_checkpoint, ("q_proj",)))
    manager = manage(
        managed(tiny_checkpoint, "a"), managed(tiny_checkpoint, "b", aliases=("best", "gpt"), lora={"sql": lora})
    )
    assert [ask(manager, name) for name in ("gpt", "sql", "model", str(tiny_checkpoint))] == ["b", "sql", "a", "a"]
    status = manager.for_model("sql").status()  # not loaded
    assert [each.name for each in status.loras] == ["sql"]
    assert status.aliases == ("best", "gpt")
    with pytest.raises(ModelNotFound, match=r"'c' is not served here. Use 'a' or 'b' or 'best'"):
        ask(manager, "c")


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"name": "a"}, "The name 'a' is used twice, by two models"),
        ({"name": "b", "aliases": ("a",)}, "The name 'a' is used twice, by 'a' and 'b'"),
        ({"name": "b", "lora": {"x": "owner/x"}}, "The name 'x' is used twice, by 'a' and 'b'"),
        ({"name": "x"}, "The name 'x' is used twice, by 'a' and 'x'"),
        ({"name": "b", "aliases": ("b",)}, "The name 'b' is used twice, by one model"),
    ],
)
def test_names_that_collide_are_refused(manage, tiny_checkpoint, second, message):
    first = managed(tiny_checkpoint, "a", aliases=("x",))
    with pytest.raises(ConfigError, match=message):
        manage(first, managed(tiny_checkpoint, **second))


@pytest.mark.parametrize("pinned", [False, True])
def test_model_that_does_not_fit_is_refused_by_name(manage, tiny_checkpoint, pinned):
    models = [managed(tiny_checkpoint, "a", pinned=pinned), managed(tiny_checkpoint, "b")]
    limit = 10**12 if pinned else 10**12 - 1
    with pytest.raises(ConfigError, match=f"the model '{'b' if pinned else 'a'}' needs about"):
        manage(*models, memory_limit=limit)


def test_pinned_models_are_loaded_at_the_start_and_stay(manage, tiny_checkpoint):
    clock = Clock()
    models = [managed(tiny_checkpoint, "a", pinned=True), managed(tiny_checkpoint, "b")]
    manager = manage(*models, clock=clock, memory_limit=None, idle_unload=60)
    assert states(manager) == {"a": "ready", "b": "unloaded"}
    ask(manager, "b")
    clock.now = 20
    assert [manager.for_model(name).status().idle_seconds for name in "ab"] == [None, 40]
    clock.now = 60
    look_at_clock(manager)
    until(lambda: states(manager) == {"a": "ready", "b": "unloaded"})
    with pytest.raises(InvalidParameter, match="'a' is pinned"):
        asyncio.run(manager.aunload("a"))


def test_without_limits_all_models_are_loaded_at_the_start(manage):
    assert states(manage(memory_limit=None)) == {"a": "ready", "b": "ready"}


def test_failed_load_is_an_error_with_its_reason_and_not_repeated_at_once(manage, tiny_checkpoint, tmp_path):
    clock = Clock()
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "my models" / "tiny")
    manager = manage(managed(tiny_checkpoint, "a"), managed(folder, "b"), clock=clock)
    (folder / "config.json").unlink()
    for _ in range(2):
        with pytest.raises(EngineClosed, match=r"'b' could not be loaded: tiny has no config.json") as raised:
            ask(manager, "b")
        assert raised.value.code == "model_load_failed"
    assert manager.for_model("b").status().state == "failed"
    assert "config.json" in manager.for_model("b").status().fatal_error
    shutil.copy(tiny_checkpoint / "config.json", folder)
    clock.now = 30
    assert [ask(manager, name) for name in "ba"] == ["b", "a"]


def test_failed_load_keeps_nothing_in_memory(manage):
    script = FailingScript("Yes.")
    manager = manage(script=script)
    with pytest.raises(EngineClosed, match="no memory left"):
        ask(manager, "b")
    until(lambda: gc.collect() >= 0 and script.failing() is None)


def test_with_block_closes_the_models_that_were_loaded_before_an_error(tiny_checkpoint):
    models = [managed(tiny_checkpoint, "a"), managed(tiny_checkpoint, "b")]
    manager = ModelManager(models, registry=scripted_registry(FailingScript("Yes.")))
    with pytest.raises(SetupError, match="no memory left"), manager:
        pass
    assert states(manager) == {"a": "closed", "b": "failed"}


def test_start_raises_why_a_pinned_model_cannot_be_loaded(manage, tmp_path):
    with pytest.raises(CheckpointError, match=f"{tmp_path} has no config.json"):
        manage(managed(tmp_path, "a", pinned=True))


@pytest.mark.parametrize("idle_unload", [None, 60.0])
def test_all_models_are_checked_before_the_first_one_is_loaded(tiny_checkpoint, tmp_path, idle_unload):
    loaded = []
    manager = ModelManager(
        [managed(tiny_checkpoint, "a"), managed(tmp_path, "b")],
        policy=ModelPolicy(idle_unload=idle_unload),
        registry=scripted_registry(Script("Yes.")),
    )
    manager.load = loaded.append
    with contextlib.closing(manager), pytest.raises(CheckpointError, match=f"{tmp_path} has no config.json"):
        manager.start()
    assert loaded == []


def test_model_that_is_loaded_later_is_not_downloaded_at_the_start(tiny_checkpoint, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    models = [managed(tiny_checkpoint, "a"), managed("maker/not-downloaded", "b")]
    policy = ModelPolicy(idle_unload=60.0)
    with ModelManager(models, policy=policy, registry=scripted_registry(Script("Yes."))) as manager:
        assert ask(manager, "a") == "a"


def test_closed_manager_is_not_ready_when_its_files_have_been_read(tiny_checkpoint, monkeypatch):
    policy = ModelPolicy(idle_unload=60.0)
    manager = ModelManager([managed(tiny_checkpoint, "a")], policy=policy, registry=scripted_registry(Script("Yes.")))
    monkeypatch.setattr(manager, "_read_files", manager.close)
    manager.start()
    assert manager.status().state == "closed"


def test_request_that_waits_too_long_is_rejected_and_a_canceled_one_leaves(manage):
    clock = Clock()
    manager = manage(script=Script("word " * 1000, "Yes.", delay=0.02), clock=clock)
    running = manager.stream({"model": "a", **HELLO})
    next(running)
    waiting = threading.Thread(target=lambda: outcomes.append(_outcome(manager, "b")))
    outcomes: list[object] = []
    waiting.start()
    until(lambda: manager._loader._rules.num_waiting("b") == 1)

    async def cancel():
        task = asyncio.create_task(manager.achat({"model": "b", **HELLO}))
        await auntil(lambda: manager._loader._rules.num_waiting("b") == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert manager._loader._rules.num_waiting("b") == 1
    clock.now = 120
    look_at_clock(manager)
    waiting.join()
    assert [type(outcome) for outcome in outcomes] == [QueueFull]
    assert next(running)  # the model is still loaded
    running.close()
    assert ask(manager, "a") == "a"


def _outcome(manager, name):
    try:
        return ask(manager, name)
    except EngineError as error:
        return error


def test_model_whose_decoder_failed_permanently_is_loaded_again(manage, tiny_checkpoint):
    manager = manage(managed(tiny_checkpoint, "a"))
    ask(manager, "a")
    first = manager._engines["a"]._engine._running
    first.pipeline.decoder.fatal_error = "killed"
    assert ask(manager, "a") == "a"
    assert manager._engines["a"]._engine._running is not first


def test_manager_fails_if_a_decoder_hangs(manage, tiny_checkpoint):
    manager = manage(managed(tiny_checkpoint, "a"))
    ask(manager, "a")
    running = manager._engines["a"]._engine._running
    running.pipeline.decoder.fatal_error = "A step has not ended."
    running.pipeline.decoder.hangs = True
    assert (manager.status().state, manager.status().fatal_error) == ("failed", "A step has not ended.")
    with pytest.raises(DecoderFailed):
        ask(manager, "a")
    assert manager._engines["a"]._engine._running is running


def test_manager_fails_if_a_model_cannot_be_unloaded(manage, tiny_checkpoint):
    async def fail():
        raise DecoderFailed("A step has not ended.")

    manager = manage(managed(tiny_checkpoint, "a"))
    ask(manager, "a")
    manager._engines["a"]._engine._running.pipeline.decoder._decoder.close = fail
    asyncio.run(manager.aunload("a"))
    until(lambda: manager.status().state == "failed")
    assert (states(manager), manager.status().fatal_error) == ({"a": "unloading"}, "A step has not ended.")


def test_close_rejects_what_waits(manage):
    manager = manage(script=Script("word " * 1000, "Yes.", delay=0.02))
    running = manager.stream({"model": "a", **HELLO})
    next(running)
    outcomes: list[object] = []
    waiting = threading.Thread(target=lambda: outcomes.append(_outcome(manager, "b")))
    waiting.start()
    until(lambda: manager._loader._rules.num_waiting("b") == 1)
    manager.close()
    waiting.join()
    assert [type(outcome) for outcome in outcomes] == [EngineClosed]
    with pytest.raises((EngineClosed, DecoderFailed)):
        list(running)
    with pytest.raises(EngineClosed):
        ask(manager, "a")


def test_models_are_closed_at_the_same_time(manage):
    manager, both = manage(memory_limit=None), threading.Barrier(2, timeout=HANG)

    async def close():
        await asyncio.to_thread(both.wait)

    for name in "ab":
        manager._engines[name]._engine._running.pipeline.decoder._decoder.close = close
    manager.close()
    assert states(manager) == {"a": "closed", "b": "closed"}


# Configuration


def test_models_of_a_file_share_options_and_replace_them(tiny_checkpoint):
    shared = EngineConfig(max_batch_size=3, kv_cache_mib=7, lora={"sql": "owner/sql"})
    one, two = configure_models(
        shared,
        [
            ("chat", {"model": str(tiny_checkpoint), "kv-cache-mib": "9", "aliases": ["x"], "pinned": "true"}),
            ("demo", {"lora": {"other": "owner/other"}}),
        ],
    )
    assert (one.config.name, one.config.model, one.config.max_batch_size, one.config.kv_cache_mib) == (
        "chat",
        str(tiny_checkpoint),
        3,
        9,
    )
    assert (one.aliases, one.pinned, one.names) == (("x",), True, ("chat", "x", "sql"))
    assert (two.config.model, two.config.kv_cache_mib, two.names) == ("demo", 7, ("demo", "other"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonsense": "1"}, "models: 'a': .*nonsense: is not a known option"),
        ({"max_batch_size": "0"}, "models: 'a': .*max_batch_size"),
        ({"pinned": "maybe"}, "`pinned` must be true or false, got 'maybe'"),
        (3, "'a' must be a folder or model ID, or a mapping"),
    ],
)
def test_invalid_options_name_the_model(options, message):
    with pytest.raises(ConfigError, match=message):
        configure_models(EngineConfig(), [("a", options)])
