"""`benchmarks.compare` with servers that respond at once; nothing here measures speed."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from benchmarks import compare
from benchmarks.client import EngineTarget, HTTPTarget, Talk, load
from benchmarks.engines import free_port
from benchmarks.environments import OtherEngines
from benchmarks.limits import Rates
from benchmarks.pooling_load import embed
from benchmarks.report import LIMIT
from dashinfer_vlm_core.testing import scripted_engine

WIRE = str(OtherEngines.script("."))
SERVER = f"""
import itertools
import os
import sys
from pathlib import Path

sys.path.insert(0, {WIRE!r})
from wire import serve

requests = itertools.count()

def generate(chat):
    if next(requests) == int(sys.argv[3]):
        os._exit(1)
    return ["a"] * chat.max_tokens

serve(generate, model=Path(sys.argv[1]), port=int(sys.argv[2]))
"""
"""It ends at a request, of which the first 16 are those of the warm-up."""


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_checkpoint):
    """Compare servers in one round, each given the number of the request at which it ends."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "server.py").write_text(SERVER)
    command = f"{sys.executable} {folder / 'server.py'} {{model}} {{port}}"

    def run(**requests):
        engines = [each for name, number in requests.items() for each in ("--engine", f"{name}={command} {number}")]
        work = ["--workloads", "text-8,decode-1", "--quick", "--rounds", "1", "--settle", "0", "--out", str(folder)]
        return compare.main(["--model", str(tiny_checkpoint), "--engines", "", *engines, *work])

    return run


@pytest.fixture(scope="module")
def results(run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "measure_rates", lambda: Rates(read_gb_s=1.0, bf16_gflop_s=1.0, kernels="torch"))
        return run(steady=-1, other=-1, ending=16)


def test_time_to_ready_is_that_of_each_engine(results):
    (row,) = [row for row in results.rows if row.workload == "ready"]
    assert results.figures[row].keys() == {"steady", "other", "ending"}


def test_engine_that_ends_is_noted_and_the_others_are_measured(results):
    measured = {name for row in results.rows if row.workload != "ready" for name in results.figures[row]}
    assert measured == {"steady", "other", LIMIT}
    assert [note for note in results.notes if note.startswith("ending is left out from ")]


def test_missing_server_is_a_runtime_error():
    base = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(RuntimeError, match="Cannot connect"):
        asyncio.run(embed(base, []))

    async def connect():
        async with HTTPTarget(base):
            raise AssertionError

    with pytest.raises(RuntimeError, match=f"no response from {base}: Cannot connect"):
        asyncio.run(connect())


def test_error_of_an_engine_in_process_is_a_fault(tiny_checkpoint):
    with scripted_engine("a", model=str(tiny_checkpoint)) as engine:
        talk = Talk(turns=("a",), tokens=1 << 20)
        (sample,) = asyncio.run(load(EngineTarget(engine), [talk], users=1))
    assert sample.fault.startswith("ContextLengthExceeded: ")


def test_memory_includes_the_weights(results):
    (row,) = [row for row in results.rows if row.workload == "memory"]
    assert row.title == "peak of all processes"
    assert results.figures[row]["steady"][0] > 0


def test_engine_ends_with_its_thread():
    program = f"import sys, time; sys.path.insert(0, {WIRE!r}); import wire; wire.start(lambda: 1 / 0); time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 1
    assert b"ZeroDivisionError" in done.stderr


def test_error_before_the_first_round_is_not_replaced(monkeypatch, run):
    def fail():
        raise ZeroDivisionError

    monkeypatch.setattr(compare, "measure_rates", fail)
    with pytest.raises(ZeroDivisionError):
        run(steady=-1)
