"""One engine per configuration and process, regardless of the first caller and of how it ends."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dashinfer_vlm_core import EngineConfig
from dashinfer_vlm_core.engine.shared import PerProcess, SharedEngines
from dashinfer_vlm_core.errors import CheckpointError, ConfigError, EngineClosed
from dashinfer_vlm_core.testing import Script, scripted_registry
from tests.waiting import HANG

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def engines():
    engines = SharedEngines(scripted_registry(Script("Yes.")))
    yield engines
    engines.close()


@pytest.fixture
def config(tiny_checkpoint):
    return EngineConfig(model=str(tiny_checkpoint), decoder="scripted")


def test_equal_configurations_share_engine(engines, config, tiny_checkpoint):
    same = EngineConfig(model=str(tiny_checkpoint), decoder="scripted")
    other = EngineConfig(model=str(tiny_checkpoint), decoder="scripted", max_batch_size=2)
    assert engines.get(config) is engines.get(same)
    assert engines.get(config) is not engines.get(other)
    assert engines.get(config).chat(HELLO).choices[0].message.content == "Yes."


def test_options_of_plugins_are_resolved_before_an_engine_is_loaded(engines, monkeypatch):
    monkeypatch.setenv("DASHINFER_VLM_TENSOR_PARALLEL", "2")
    assert (
        engines.config("demo", {})
        == engines.config("demo", {"tensor_parallel": "2"})
        == EngineConfig(tensor_parallel=2)
    )
    with pytest.raises(ConfigError, match=r"tensor_paralel: is not a known option \(got 2\)"):
        engines.config("demo", {"tensor_paralel": 2})


def engine_threads():
    return {thread for thread in threading.enumerate() if thread.name == "dashinfer-vlm-engine"}


def test_concurrent_threads_and_tasks_share_engine(engines, config):
    before = engine_threads()

    async def use_concurrently():
        return await asyncio.gather(*(engines.aget(config) for _ in range(8)))

    with ThreadPoolExecutor(8) as pool:
        plain = [pool.submit(engines.get, config) for _ in range(4)]
        tasks = [pool.submit(asyncio.run, use_concurrently()) for _ in range(4)]
        found = {id(future.result()) for future in plain} | {id(e) for future in tasks for e in future.result()}
    assert len(found) == 1
    assert len(engine_threads() - before) == 1


def test_failed_start_is_raised_to_all_waiters_and_not_cached(engines, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = EngineConfig(model=str(folder), decoder="scripted")
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(engines.get, config) for _ in range(4)]
    assert all(isinstance(future.exception(), CheckpointError) for future in futures)
    from tests.tiny import write_checkpoint

    write_checkpoint(folder)
    assert engines.get(config).status().state == "ready"


def test_closed_engine_is_restarted(engines, config):
    first = engines.get(config)
    first.close()
    assert engines.get(config) is not first
    assert asyncio.run(engines.aget(config)).chat(HELLO)


def test_close_ends_all_and_next_use_restarts(engines, config):
    first = engines.get(config)
    remote = engines.remote("http://127.0.0.1:9/v1")
    assert engines.remote("http://127.0.0.1:9/v1") is remote
    assert engines.remote("http://127.0.0.1:9/v1", api_key="another") is not remote
    engines.close()
    assert first.status().state == "closed"
    with pytest.raises(EngineClosed):
        remote.chat(HELLO)
    assert engines.get(config).chat(HELLO)


def test_canceled_caller_does_not_cancel_shared_load(engines, config):
    async def main():
        first = asyncio.create_task(engines.aget(config))
        await asyncio.sleep(0)
        second = asyncio.create_task(engines.aget(config))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert asyncio.run(main()).status().state == "ready"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 warns of every fork with threads")
def test_forked_process_creates_its_own_engine():
    value = PerProcess(object)
    mine = value.get()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"same" if value.get() is mine else b"other")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 10) == b"other"
    assert value.get() is mine
    os.close(reading)
    os.close(writing)


@pytest.mark.slow
def test_process_without_close_exits_cleanly():
    program = (
        "from dashinfer_vlm_core import EngineConfig\n"
        "from dashinfer_vlm_core.engine.shared import SHARED\n"
        f"SHARED.get(EngineConfig()).chat({HELLO | {'max_tokens': 2}!r})\n"
        "SHARED.remote('http://127.0.0.1:9/v1')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG, check=False)
    assert ended.returncode == 0
    assert re.fullmatch(r"Loading demo \.\.\.\n(Loading .*\n)*", ended.stderr)  # logging is not configured
